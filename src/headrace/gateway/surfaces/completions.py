"""Implements POST /v1/completions."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from sys import getsizeof
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace.core.errors import InvalidRequest, counted
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.call import Ready
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.surfaces.dialect import parse, schemas
from headrace.gateway.surfaces.dialect.answers import ChoiceOutput, OpenAIAnswer
from headrace.gateway.surfaces.dialect.field_table import COMPLETIONS
from headrace.gateway.surfaces.dialect.logprobs import EchoedLogprobs, completion_logprobs, echo_logprobs, prompt_logprobs
from headrace.gateway.surfaces.endpoint import BodyParser, GeneratingSurface
from headrace.gateway.upstream.generation_request import PlainPrompts
from headrace.gateway.upstream.seam import OutputEvent, TokenUsage
from headrace.text.logprobs import DecodedLogprobs

_encode = msgspec.json.encode

MAX_PROMPTS = 64

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions. A chat may then use what the context leaves."""


class CompletionRequest(schemas.SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: int | None = None

    @property
    def is_echo_only(self) -> bool:
        return self.echo and self.max_tokens == 0

    @property
    def has_echo_logprobs(self) -> bool:
        return self.echo and self.logprobs is not None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: schemas.CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: schemas.PromptLogprobs | UnsetType = UNSET


class Completion(schemas.AnswerBody):
    """Also the chunk of a stream: OpenAI gives both the same shape."""

    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: schemas.CompletionUsage | UnsetType | None = UNSET


ParsedCompletion = parse.Parsed[CompletionRequest]


def parse_completion(body: dict[str, object]) -> tuple[ParsedCompletion, list[str]]:
    """((request, grammar of the answer), names of fields that change nothing). Raises InvalidRequest."""
    ignored: dict[str, None] = {}
    request = parse.convert(parse.honoured_fields(body, COMPLETIONS, ignored), CompletionRequest)
    if request.best_of is not None and request.best_of != request.n:
        raise InvalidRequest("best_of", f"best_of = n ({request.n})", request.best_of, "There is no ranking of discarded sequences.")
    if request.max_tokens == 0 and not request.is_echo_only:
        raise InvalidRequest("max_tokens", "at least 1 (0 only with echo)", 0)
    request.prompt = prompts = prompt_list(request.prompt)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"at most {counted(MAX_PROMPTS, 'prompt')}", len(prompts), "Send several requests.")
    return parse.checked(request, body), list(ignored)


def prompt_list(prompt: str | list[Any]) -> list[Any]:
    """OpenAI's four forms, as a list of texts or of lists of token ids. Raises InvalidRequest for a mixed or empty list."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}):
        return prompt
    rule = "a string, a list of strings, a list of token ids, or a list of such lists"
    raise InvalidRequest("prompt", rule, prompt, "Lists may not be empty or mixed.")


def _names(parsed: ParsedCompletion) -> dict[str, str]:
    _, grammar = parsed
    return {} if grammar is None else {"grammar": grammar.field}


def _common(parsed: ParsedCompletion, principal: Principal) -> ParsedRequest:
    request, _ = parsed
    prompts = PlainPrompts(prompts=prompt_list(request.prompt), add_special_tokens=request.add_special_tokens, needs_text=request.echo)
    shared = parse.shared_request(parsed, principal, prompts)
    return msgspec.structs.replace(
        shared,
        sampling={**shared.sampling, **_own_params(request)},
        logprobs_field="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        num_shown=request.n,
        num_kept_encodings=request.has_echo_logprobs + (request.prompt_logprobs is not None and request.n > 1),
    )


def _own_params(request: CompletionRequest) -> dict[str, Any]:
    prompt_logprobs = request.prompt_logprobs
    if request.has_echo_logprobs and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return {"logprobs": request.logprobs, "prompt_logprobs": prompt_logprobs, "max_tokens": 1 if request.is_echo_only else max_tokens}


class CompletionAnswer(OpenAIAnswer[CompletionRequest]):
    """With max_tokens 0 (echo only) the generated token is not shown."""

    ID_PREFIX, OBJECT, CHUNK_OBJECT = "cmpl-", "text_completion", "text_completion"
    TEXT_CHOICE = b'{"index":%d,"text":%s,"logprobs":null,"finish_reason":null}'

    def __init__(self, parsed: ParsedCompletion, ready: Ready) -> None:
        super().__init__(parsed, ready)
        self._echoes: dict[int, tuple[int, EchoedLogprobs]] = {}
        self._encoded_prompt_logprobs: dict[int, list[bytes]] = {}

    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        self._keep_prompt_logprobs(events)
        for event in events:
            self._count(event.index, 0 if self._request.is_echo_only else event.num_tokens)
            yield from self._event(event)

    def _event(self, event: OutputEvent) -> Iterator[bytes]:
        index = event.index
        text, logprobs = self._shown(event.text, event.logprobs)
        echoed: EchoedLogprobs | None = None
        if self._request.echo and not self._is_opened[index]:
            if not (event.num_tokens or event.finish):
                return  # only log-probabilities of the prompt so far
            text = self._prompts[index // self._request.n].text + text
            echoed = yield from self._echoed(index)
        self._is_opened[index] = True
        if logprobs or echoed or event.finish is not None:
            shown = logprobs if logprobs or echoed else None
            yield from self._chunk(index, event.offset, self._choice(index, text, shown, echoed, event))
        elif text:
            yield self._text_chunk(index, event.offset, text)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[DecodedLogprobs] | None, echoed: EchoedLogprobs | None, event: OutputEvent | None
    ) -> Iterator[bytes]:
        """event: as for `ChoiceOutput.finish_part`"""
        yield b'{"index":%d,"text":%b' % (index, _encode(text))
        if (num_top := self._request.prompt_logprobs) is not None:
            yield b',"prompt_logprobs":'
            yield from self._encode_prompt_logprobs(index // self._request.n, num_top)
        yield b',"logprobs":'
        if logprobs is None or self._request.logprobs is None:
            yield b"null"
        else:
            offset = len(self._prompts[index // self._request.n].text) if self._request.echo else 0
            yield from completion_logprobs(logprobs, self._request.logprobs, offset=offset, prompt=echoed)
        yield self._outputs[index].finish_part(event)

    def _usage(self, usage: TokenUsage) -> bytes:
        return super()._usage(usage._replace(completion_tokens=0) if self._request.is_echo_only else usage)

    def _whole_choice(self, index: int, output: ChoiceOutput) -> Iterator[bytes]:
        text, logprobs = self._shown("".join(output.texts), output.logprobs)
        echoed: EchoedLogprobs | None = None
        if self._request.echo:
            text = self._prompts[index // self._request.n].text + text
            echoed = yield from self._echoed(index)
        yield from self._choice(index, text, logprobs, echoed, output.last)

    def _encode_prompt_logprobs(self, number: int, num_top: int) -> Iterator[bytes]:
        """Encoded once and kept if several choices show it."""
        made = self._encoded_prompt_logprobs.get(number)
        if made is not None:
            yield from made
            return
        made = []
        for piece in prompt_logprobs(self._prompts[number], self._prompt_logprobs[number], num_top):
            if self._request.n > 1:
                self._memory.hold_json(getsizeof(piece))
                made.append(piece)
            yield piece
        self._encoded_prompt_logprobs[number] = made

    def _shown(self, text: str, logprobs: Sequence[DecodedLogprobs]) -> tuple[str, Sequence[DecodedLogprobs]]:
        if self._request.is_echo_only:
            return "", ()
        return text, () if self._request.logprobs is None else logprobs

    def _echoed(self, index: int) -> Generator[bytes, None, EchoedLogprobs | None]:
        """Yields empty pieces between pages, so that other work can run."""
        if self._request.logprobs is None:
            return None
        number = index // self._request.n
        columns = self._prompt_logprobs[number]
        num_encoded, made = self._echoes.get(number, (-1, ()))
        if num_encoded != len(columns):
            made = yield from echo_logprobs(self._prompts[number], columns, self._request.logprobs)
            self._echoes[number] = len(columns), made
            self._memory.hold_json(sum(getsizeof(piece) for column in made for piece in column))
        return made


COMPLETION_BODY = BodyParser(parse_completion, ParsedCompletion)
completions = GeneratingSurface(parser=COMPLETION_BODY, names=_names, common=_common, encoder=CompletionAnswer)
