"""POST /v1/completions: the wire types of plain prompts, how a body is parsed, and how events become its answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from sys import getsizeof
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace.core.counted import counted
from headrace.core.errors import InvalidRequest
from headrace.core.plan import wide_columns
from headrace.gateway.access.principal import Principal
from headrace.gateway.cache.control import CacheControl
from headrace.gateway.generation.generation import Generation
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.http.config import Limits
from headrace.gateway.surfaces.dialect import schemas
from headrace.gateway.surfaces.dialect.answers import (
    AnswerHead,
    ChoiceOutput,
    Chunks,
    around_choices,
    finish_part,
    outputs_of,
    usage_body,
    whole_finish_part,
)
from headrace.gateway.surfaces.dialect.field_rule import Surface
from headrace.gateway.surfaces.dialect.logprobs import EchoedLogprobs, completion_logprobs, echo_logprobs, prompt_logprobs
from headrace.gateway.surfaces.dialect.parse import (
    check_shared,
    convert,
    given_params,
    lowered_priority,
    surface_fields,
)
from headrace.gateway.surfaces.dialect.schemas import CompletionLogprobs, PromptLogprobs, SamplingFields
from headrace.gateway.surfaces.dialect.structured import requested_grammar
from headrace.gateway.surfaces.generating import GeneratingSurface
from headrace.gateway.upstream.generation_request import PlainPrompts, RequestedGrammar
from headrace.gateway.upstream.seam import OutputEvent, Prepared, TokenUsage
from headrace.text.logprobs import DecodedLogprobs

_encode = msgspec.json.encode

DEFAULT_MAX_TOKENS = 16
"""`max_tokens` of a request without it: OpenAI's default for completions. A chat may then use what the context leaves."""


def _names(parsed: ParsedCompletion) -> dict[str, str]:
    _, _, grammar = parsed
    return {} if grammar is None else {"grammar": grammar.field}


def _common(parsed: ParsedCompletion, principal: Principal) -> ParsedRequest:
    request, prompts, grammar = parsed
    return ParsedRequest(
        model=request.model,
        prompt=PlainPrompts(prompts=prompts, add_special_tokens=request.add_special_tokens, needs_text=request.echo),
        sampling=given_params(request) | _own_params(request),
        is_streaming=request.stream,
        priority=lowered_priority(request.priority, principal.priority),
        grammar=grammar,
        has_priority=request.priority is not None,
        cache_salt=request.cache_salt,
        cache=CacheControl.of(request.cache),
        logprobs_field="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        num_shown=request.n,
        num_kept_encodings=request.has_echo_logprobs + (request.prompt_logprobs is not None and request.n > 1),
    )


def _own_params(request: CompletionRequest) -> dict[str, Any]:
    """The sampling parameters whose meaning is that of completions alone."""
    prompt_logprobs = request.prompt_logprobs
    if request.has_echo_logprobs and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return {"logprobs": request.logprobs, "prompt_logprobs": prompt_logprobs, "max_tokens": 1 if request.is_echo_only else max_tokens}


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: int | None = None

    @property
    def is_echo_only(self) -> bool:
        """No output is wanted. One token is generated all the same, and neither shown nor billed."""
        return self.echo and self.max_tokens == 0

    @property
    def has_echo_logprobs(self) -> bool:
        """The echoed prompt has log-probabilities, as many as the output."""
        return self.echo and self.logprobs is not None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(schemas.AnswerBody):
    """Also the chunk of a stream: OpenAI gives both the same shape."""

    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: schemas.CompletionUsage | UnsetType | None = UNSET


Prompts = list[str | list[int]]


ParsedCompletion = tuple[CompletionRequest, Prompts, RequestedGrammar | None]


def parse_completion(body: dict[str, object], limits: Limits) -> tuple[ParsedCompletion, list[str]]:
    """The request; its prompts, one entry each: text or token ids; what its answer must match; and the fields that change nothing."""
    ignored: dict[str, None] = {}
    request = convert(surface_fields(body, Surface.COMPLETIONS, limits, ignored), CompletionRequest)
    if request.best_of is not None and request.best_of != request.n:
        raise InvalidRequest("best_of", f"best_of = n ({request.n})", request.best_of, "There is no ranking of discarded sequences.")
    if request.max_tokens == 0 and not request.is_echo_only:
        raise InvalidRequest("max_tokens", "at least 1 (0 only with echo)", 0)
    prompts = prompt_list(request.prompt)
    if len(prompts) > limits.max_prompts:
        raise InvalidRequest("prompt", f"at most {counted(limits.max_prompts, 'prompt')}", len(prompts), "Send several requests.")
    check_shared(request, limits, num_prompts=len(prompts))
    request.prompt = ""  # it is in `prompts`: a text worker would send a large one back twice
    return (request, prompts, requested_grammar(request, body, limits)), list(ignored)


def prompt_list(prompt: str | list[Any]) -> Prompts:
    """OpenAI's four forms of `prompt` as a list of prompts. Raises InvalidRequest for a mixed or empty list."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}):
        return prompt
    rule = "a string, a list of strings, a list of token ids, or a list of such lists"
    raise InvalidRequest("prompt", rule, prompt, "Lists may not be empty or mixed.")


TEXT_CHOICE = b'{"index":%d,"text":%s,"logprobs":null,"finish_reason":null}'


class CompletionAnswer:
    """A `generation.answer_encoder.AnswerEncoder`. Choices are numbered prompt by prompt: prompt p's sequence i is choice p * n + i.

    With max_tokens 0 (echo only) the one token that was generated is not shown.
    """

    def __init__(self, request: CompletionRequest, prepared: Prepared, head: AnswerHead, hold_json: Callable[[int], None]) -> None:
        """hold_json: called with the bytes of JSON that are kept for further choices, see `AnswerMemory.hold_json`"""
        self._request = request
        self._hold_json = hold_json
        self._prompts = prepared.prompts
        self._head = head
        self._num_top = request.logprobs
        count = prepared.num_sequences
        self._outputs = outputs_of(count)
        self._is_opened = [False] * count
        self._prompt_logprobs = [wide_columns() for _ in prepared.prompts]
        self._echoes: dict[int, EchoedLogprobs] = {}
        self._encoded_prompt_logprobs: dict[int, list[bytes]] = {}
        self._chunks = Chunks(head, "text_completion", TEXT_CHOICE, request, self._prompts)

    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        self._collect_prompt_logprobs(events)
        for event in events:
            self._chunks.count(event.index, 0 if self._request.is_echo_only else event.num_tokens)
            yield from self._chunk(event)

    def _chunk(self, event: OutputEvent) -> Iterator[bytes]:
        index = event.index
        text, logprobs = self._shown(event.text, event.logprobs)
        echoed: EchoedLogprobs | None = None
        if self._request.echo and not self._is_opened[index]:
            if not (event.num_tokens or event.finish):
                return  # only log-probabilities of the prompt so far
            text = self._prompts[index // self._request.n].text + text
            echoed = yield from self._echoed(index)
        self._is_opened[index] = True
        if logprobs or echoed:
            choice = self._choice_with_logprobs(index, text, logprobs, echoed, finish_part(event))
            yield from self._chunks.around(index, event.place, choice)
        elif event.finish is not None:
            yield self._chunks.chunk(
                index, event.place, b'{"index":%d,"text":%b,"logprobs":null%b' % (index, _encode(text), finish_part(event))
            )
        elif text:
            yield self._chunks.text(index, event.place, text)

    def _choice_with_logprobs(
        self, index: int, text: str, logprobs: Sequence[DecodedLogprobs], echoed: EchoedLogprobs | None, end: bytes
    ) -> Iterator[bytes]:
        """A choice with log-probabilities. echoed: log-probabilities of its prompt;  end: the bytes after them"""
        assert self._num_top is not None
        yield b'{"index":%d,"text":%b,"logprobs":' % (index, _encode(text))
        offset = len(self._prompts[index // self._request.n].text) if self._request.echo else 0
        yield from completion_logprobs(logprobs, self._num_top, offset=offset, prompt=echoed)
        yield end

    def encode_end(self, usage: TokenUsage) -> bytes:
        return self._chunks.encode_end(self._billed(usage))

    def _billed(self, usage: TokenUsage) -> TokenUsage:
        """The usage of the answer. With echo alone the generated token is not part of it."""
        return usage._replace(completion_tokens=0) if self._request.is_echo_only else usage

    def add(self, events: Sequence[OutputEvent]) -> None:
        self._collect_prompt_logprobs(events)
        for event in events:
            self._outputs[event.index].add(event)

    def encode_body(self, usage: TokenUsage) -> Iterator[bytes]:
        answer = Completion(
            id=self._head.id,
            object="text_completion",
            created=self._head.created,
            model=self._head.model,
            choices=[],
            system_fingerprint=self._head.fingerprint,
            usage=usage_body(self._billed(usage)),
        )
        before, behind = around_choices(answer)
        for index, output in enumerate(self._outputs):
            yield b"," if index else before
            yield from self._whole_choice(index, output)
        yield behind

    def _whole_choice(self, index: int, output: ChoiceOutput) -> Iterator[bytes]:
        text, logprobs = self._shown("".join(output.texts), output.logprobs)
        echoed: EchoedLogprobs | None = None
        if self._request.echo:
            text = self._prompts[index // self._request.n].text + text
            echoed = yield from self._echoed(index)
        end = whole_finish_part(output)
        if self._num_top is not None:
            yield from self._choice_with_logprobs(index, text, logprobs, echoed, end[:-1])
        else:
            yield b'{"index":%d,"text":%b,"logprobs":null%b' % (index, _encode(text), end[:-1])
        if self._request.prompt_logprobs is not None:
            yield b',"prompt_logprobs":'
            yield from self._encode_prompt_logprobs(index // self._request.n, self._request.prompt_logprobs)
        yield b"}"

    def _encode_prompt_logprobs(self, number: int, num_top: int) -> Iterator[bytes]:
        """The prompt's log-probabilities. Where several choices show them they are encoded once and kept."""
        made = self._encoded_prompt_logprobs.get(number)
        if made is not None:
            yield from made
            return
        made = []
        for piece in prompt_logprobs(self._prompts[number], self._prompt_logprobs[number], num_top):
            if self._request.n > 1:
                self._hold_json(getsizeof(piece))
                made.append(piece)
            yield piece
        self._encoded_prompt_logprobs[number] = made

    def _shown(self, text: str, logprobs: Sequence[DecodedLogprobs]) -> tuple[str, Sequence[DecodedLogprobs]]:
        if self._request.is_echo_only:
            return "", ()
        return text, () if self._num_top is None else logprobs

    def _echoed(self, index: int) -> Generator[bytes, None, EchoedLogprobs | None]:
        """Log-probabilities of the echoed prompt, where the request has logprobs; encoded once per prompt. Yields empty pieces between
        pages, so that the encoding can be interrupted.
        """
        if self._num_top is None:
            return None
        number = index // self._request.n
        made = self._echoes.get(number)
        if made is None:
            made = self._echoes[number] = yield from echo_logprobs(self._prompts[number], self._prompt_logprobs[number], self._num_top)
            self._hold_json(sum(getsizeof(piece) for column in made for piece in column))
        return made

    def _collect_prompt_logprobs(self, events: Sequence[OutputEvent]) -> None:
        """Keep the log-probabilities of a prompt that the first of its sequences has; the other sequences may have them again."""
        for event in events:
            number, index = divmod(event.index, self._request.n)
            for page in event.prompt_logprobs if index == 0 else ():
                self._prompt_logprobs[number].extend(page)
                self._echoes.pop(number, None)


def _answer(parsed: ParsedCompletion, prepared: Prepared, generation: Generation) -> CompletionAnswer:
    return CompletionAnswer(parsed[0], prepared, AnswerHead.of("cmpl-", generation), generation.memory.hold_json)


completions = GeneratingSurface(parse_completion, _names, _common, _answer)
