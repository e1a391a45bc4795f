"""Sequences of output events -> OpenAI's JSON, whole or in chunks, for chat and for completions.

A chunk is assembled from bytes: everything that is constant over a stream (id, model, created, ...) is encoded once, only the new text
(and log-probabilities, if asked for) is encoded per chunk. Text is always a JSON string, so nothing a model says can break the framing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headrace.core.finish import FinishReason
from headrace.core.plan import TokenLogprobs
from headrace.gateway.http.sse import DONE
from headrace.gateway.surfaces.dialect import schemas
from headrace.gateway.surfaces.dialect.logprobs import chat_logprobs, completion_logprobs, echo_logprobs, joined_logprobs, prompt_logprobs
from headrace.gateway.upstream.tokens import OutputEvent
from headrace.text.assemble import OutputDelta, TokenEntry
from headrace.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What every part of an answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str | None


@dataclass(slots=True)
class _Output:
    """One sequence, collected."""

    texts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.entries.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason


class Answer(Protocol):
    """How one request's events become bytes. Either `chunk`s and `last`, or `add`s and `whole`."""

    def chunk(self, events: Sequence[OutputEvent]) -> bytes:
        """Server-sent events for what is new; empty when there is nothing a client should hear of."""
        ...

    def last(self, usage: schemas.Usage) -> bytes:
        """The end of a stream: usage if it was asked for, then [DONE]."""
        ...

    def add(self, events: Sequence[OutputEvent]) -> None: ...

    def whole(self, usage: schemas.Usage) -> bytes: ...


class _Chunks:
    """The constant parts of a stream's chunks."""

    def __init__(self, facts: Facts, kind: str, *, include_usage: bool) -> None:
        head = {"id": facts.id, "object": kind, "created": facts.created, "model": facts.model, "system_fingerprint": facts.fingerprint}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._include_usage = include_usage

    def chunk(self, choice: bytes) -> bytes:
        return b"".join((self._head, choice, b"]", self._tail))

    def last(self, usage: schemas.Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return b"".join((self._head, b'],"usage":', _encode(usage), b"}\n\n", DONE))


def _finish_part(delta: OutputDelta) -> bytes:
    if delta.finish is None:
        return b',"finish_reason":null}'
    return b',"finish_reason":"%s","stop_reason":%s}' % (delta.finish.value.encode(), _encode(delta.stop_reason))


class ChatAnswer:
    def __init__(self, request: schemas.ChatRequest, facts: Facts, tokenizer: Tokenizer, *, include_usage: bool) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._num_top = request.top_logprobs or 0
        self._has_logprobs = request.logprobs
        self._num_prompt_top = request.prompt_logprobs
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._outputs = [_Output() for _ in range(request.n)]
        self._is_opened = [False] * request.n
        self._chunks = _Chunks(facts, "chat.completion.chunk", include_usage=include_usage)

    def chunk(self, events: Sequence[OutputEvent]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            delta = event.delta
            if not self._is_opened[event.index]:
                self._is_opened[event.index] = True
                opening = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                parts.append(self._chunks.chunk(opening % event.index))
            if delta.text or delta.finish is not None or (self._has_logprobs and delta.logprobs):
                parts.append(self._chunks.chunk(self._choice(event.index, delta)))
        return b"".join(parts)

    def _choice(self, index: int, delta: OutputDelta) -> bytes:
        content = b'{"content":%s}' % _encode(delta.text) if delta.text or delta.finish is None else b"{}"
        logprobs = _encode(chat_logprobs(delta.logprobs, self._num_top)) if self._has_logprobs and delta.logprobs else b"null"
        return b'{"index":%d,"delta":%s,"logprobs":%s%s' % (index, content, logprobs, _finish_part(delta))

    def last(self, usage: schemas.Usage) -> bytes:
        return self._chunks.last(usage)

    def add(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            self._outputs[event.index].add(event.delta)
            if event.index == 0:
                self._prompt_logprobs.extend(event.delta.prompt_logprobs)

    def whole(self, usage: schemas.Usage) -> bytes:
        answer = schemas.ChatCompletion(
            id=self._facts.id,
            object="chat.completion",
            created=self._facts.created,
            model=self._facts.model,
            choices=[self._whole_choice(index, output) for index, output in enumerate(self._outputs)],
            usage=usage,
            system_fingerprint=self._facts.fingerprint,
        )
        if self._num_prompt_top is not None:
            answer.prompt_logprobs = prompt_logprobs(self._tokenizer, self._prompt_logprobs, self._num_prompt_top)
        return _encode(answer)

    def _whole_choice(self, index: int, output: _Output) -> schemas.ChatChoice:
        return schemas.ChatChoice(
            index=index,
            message=schemas.AssistantMessage(role="assistant", content="".join(output.texts)),
            logprobs=chat_logprobs(output.entries, self._num_top) if self._has_logprobs else None,
            finish_reason=(output.finish or FinishReason.STOP).value,
            stop_reason=output.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a completions request: its ids, and its text as echo shows it."""

    ids: tuple[int, ...]
    text: str


class CompletionAnswer:
    """Choices are numbered prompt by prompt: prompt p's sequence i is choice p * n + i.

    With max_tokens 0 (echo only) the one token that was generated is not shown.
    """

    def __init__(
        self, request: schemas.CompletionRequest, prompts: Sequence[Prompt], facts: Facts, tokenizer: Tokenizer, *, include_usage: bool
    ) -> None:
        self._request = request
        self._prompts = prompts
        self._facts = facts
        self._tokenizer = tokenizer
        self._num_top = request.logprobs
        count = len(prompts) * request.n
        self._outputs = [_Output() for _ in range(count)]
        self._is_opened = [False] * count
        self._scores: list[list[TokenLogprobs]] = [[] for _ in prompts]
        self._echoes: dict[int, schemas.CompletionLogprobs] = {}
        self._prompt_logprobs: dict[int, schemas.PromptLogprobs] = {}
        self._chunks = _Chunks(facts, "text_completion", include_usage=include_usage)
        self._is_echo_only = request.max_tokens == 0

    def chunk(self, events: Sequence[OutputEvent]) -> bytes:
        self._collect_scores(events)
        return b"".join([self._chunk(event.index, event.delta) for event in events])

    def _chunk(self, index: int, delta: OutputDelta) -> bytes:
        text, logprobs = self._shown(delta.text, delta.logprobs, index)
        if self._request.echo and not self._is_opened[index]:
            if not (delta.token_ids or delta.finish):
                return b""  # only scores of the prompt so far
            prompt = self._prompts[index // self._request.n]
            text = prompt.text + text
            scored = self._echoed(index)
            logprobs = joined_logprobs(scored, logprobs) if scored and logprobs else scored or logprobs
        self._is_opened[index] = True
        if not (text or delta.finish is not None or logprobs):
            return b""
        encoded = (index, _encode(text), _encode(logprobs), _finish_part(delta))
        return self._chunks.chunk(b'{"index":%d,"text":%s,"logprobs":%s%s' % encoded)

    def last(self, usage: schemas.Usage) -> bytes:
        return self._chunks.last(usage)

    def add(self, events: Sequence[OutputEvent]) -> None:
        self._collect_scores(events)
        for event in events:
            self._outputs[event.index].add(event.delta)

    def whole(self, usage: schemas.Usage) -> bytes:
        answer = schemas.Completion(
            id=self._facts.id,
            object="text_completion",
            created=self._facts.created,
            model=self._facts.model,
            choices=[self._whole_choice(index, output) for index, output in enumerate(self._outputs)],
            system_fingerprint=self._facts.fingerprint,
            usage=usage,
        )
        return _encode(answer)

    def _whole_choice(self, index: int, output: _Output) -> schemas.CompletionChoice:
        text, logprobs = self._shown("".join(output.texts), output.entries, index)
        if self._request.echo:
            text = self._prompts[index // self._request.n].text + text
            scored = self._echoed(index)
            logprobs = joined_logprobs(scored, logprobs) if scored and logprobs else scored or logprobs
        choice = schemas.CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs or (schemas.CompletionLogprobs([], [], [], []) if self._num_top is not None else None),
            finish_reason=(output.finish or FinishReason.STOP).value,
            stop_reason=output.stop_reason,
        )
        if self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = self._scored_prompt(index // self._request.n, self._request.prompt_logprobs)
        return choice

    def _scored_prompt(self, number: int, num_top: int) -> schemas.PromptLogprobs:
        """Made once per prompt: its choices show the same."""
        made = self._prompt_logprobs.get(number)
        if made is None:
            made = self._prompt_logprobs[number] = prompt_logprobs(self._tokenizer, self._scores[number], num_top)
        return made

    def _shown(self, text: str, entries: Sequence[TokenEntry], index: int) -> tuple[str, schemas.CompletionLogprobs | None]:
        if self._is_echo_only:
            return "", None
        if self._num_top is None or not entries:
            return text, None
        offset = len(self._prompts[index // self._request.n].text) if self._request.echo else 0
        return text, completion_logprobs(entries, self._num_top, offset=offset)

    def _echoed(self, index: int) -> schemas.CompletionLogprobs | None:
        """Log-probabilities of the echoed prompt, when they were asked for. Made once per prompt."""
        if self._num_top is None:
            return None
        number = index // self._request.n
        made = self._echoes.get(number)
        if made is None:
            prompt = self._prompts[number]
            made = echo_logprobs(self._tokenizer, prompt.text, prompt.ids, self._scores[number], self._num_top)
            self._echoes[number] = made
        return made

    def _collect_scores(self, events: Sequence[OutputEvent]) -> None:
        """Every sequence of a prompt may bring the prompt's scores; the first one's are taken."""
        for event in events:
            number, index = divmod(event.index, self._request.n)
            if event.delta.prompt_logprobs and index == 0:
                self._scores[number].extend(event.delta.prompt_logprobs)
                self._echoes.pop(number, None)
