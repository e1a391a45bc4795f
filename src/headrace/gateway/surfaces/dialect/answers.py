"""Builds what the answers of chat and completions share.

Everything that is constant over a stream (id, model, created, ...) is encoded once; only the new text and log-probabilities are encoded per
chunk. Text is always a JSON string, so nothing a model says can break the framing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, Generic

import msgspec

from headrace.core.plan import wide_columns
from headrace.core.update import FINISH_WORDS, FinishReason
from headrace.gateway.generation.call import Ready
from headrace.gateway.surfaces.dialect import schemas
from headrace.gateway.surfaces.dialect.parse import FieldsT, Parsed
from headrace.gateway.upstream.seam import OutputEvent, PassedField, TokenUsage, ToolCall
from headrace.text.logprobs import DecodedLogprobs

_encode = msgspec.json.encode


@dataclass(slots=True)
class ChoiceOutput:
    """logprobs: a part for each vocabulary of token ids; has_tool_calls: also set in a stream"""

    logprobs: list[DecodedLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_pieces: dict[int, list[ToolCall]] = field(default_factory=dict)
    has_tool_calls: bool = False
    passed: list[PassedField] = field(default_factory=list)
    last: OutputEvent | None = None

    def add(self, event: OutputEvent) -> None:
        self.texts.append(event.text)
        for part in event.logprobs:
            if not (self.logprobs and self.logprobs[-1].texts is part.texts):
                self.logprobs.append(DecodedLogprobs(part.texts))
            self.logprobs[-1].extend(part)
        if event.reasoning:
            self.reasoning.append(event.reasoning)
        self.passed += event.passed
        for piece in event.tool_calls:
            self.has_tool_calls = True
            self.tool_pieces.setdefault(piece.number, []).append(piece)
        if event.finish is not None:
            self.last = event

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [ToolCall.joined(pieces) for pieces in self.tool_pieces.values()]

    def finish_part(self, event: OutputEvent | None) -> bytes:
        """event: in a stream the chunk's, else the last one. finish_reason is tool_calls for a sequence that stopped after complete tool
        calls.
        """
        if event is None or event.finish is None:
            return b',"finish_reason":null}'
        word = FINISH_WORDS[event.finish]
        if event.finish is FinishReason.STOP and event.is_filtered:
            word = "content_filter"
        elif event.finish is FinishReason.STOP and self.has_tool_calls and not event.is_call_cut:
            word = "tool_calls"
        return b',"finish_reason":"%b","stop_reason":%b}' % (word.encode(), _encode(event.stop_reason))


class OpenAIAnswer(ABC, Generic[FieldsT]):
    """An `AnswerEncoder` of OpenAI's format; a subclass encodes the choices. Choices are numbered prompt by prompt: prompt p's sequence i
    is choice p * n + i.
    """

    ID_PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]
    TEXT_CHOICE: ClassVar[bytes]
    """A format of the choice's index and the text's JSON."""

    def __init__(self, parsed: Parsed[FieldsT], ready: Ready) -> None:
        request, call, prepared = parsed[0], ready.call, ready.prepared
        self._request = request
        self._prompts, self._memory = prepared.prompts, call.memory
        self._log, self._fitted = ready.event_log, ready.fitted
        num_sequences = request.n * len(prepared.prompts)
        self._outputs = [ChoiceOutput() for _ in range(num_sequences)]
        self._is_opened = [False] * num_sequences
        self._prompt_logprobs = [wide_columns() for _ in prepared.prompts]
        options = request.stream_options or schemas.StreamOptions()
        self._include_usage = options.include_usage
        self._counts = [0] * num_sequences if options.continuous_usage_stats else None
        head = {
            "id": f"{self.ID_PREFIX}{call.answer_id}",
            "object": self.CHUNK_OBJECT if request.stream else self.OBJECT,
            "created": call.created,
            "model": call.shown_model,
            "system_fingerprint": call.model.upstream.fingerprint,
        }
        self._head = (b"data: " if request.stream else b"") + _encode(head)[:-1] + b',"choices":['
        before_text, after_text = self.TEXT_CHOICE.split(b"%s")
        self._before_texts = [self._head + before_text % index for index in range(num_sequences)]
        self._choice_end = after_text + b"]"
        self._end_with(b',"usage":null}\n\n' if self._include_usage else b"}\n\n")

    # -- a stream ------------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]: ...

    def _count(self, index: int, num_new: int) -> None:
        """With continuous_usage_stats each chunk has the usage of its choice and prompt alone, as in vLLM."""
        if self._counts is None:
            return
        prompt = self._prompts[index // self._request.n].num_tokens or 0
        completion = self._counts[index] = self._counts[index] + num_new
        self._end_with(b',"usage":%b}\n\n' % _encode(schemas.CompletionUsage(prompt, completion, prompt + completion)))

    def _end_with(self, tail: bytes) -> None:
        self._tail = tail
        self._after_text = self._choice_end + tail

    def _text_chunk(self, index: int, offset: int, text: str) -> bytes:
        log = self._log
        if log is None:
            return self._before_texts[index] + _encode(text) + self._after_text
        entries = log.entries  # what `EventLog.line` does, without a call: this runs once per token
        entries.append(offset * log.num_sequences + index)
        return b"%b%d\n%b%b%b" % (log.prefix, len(entries), self._before_texts[index], _encode(text), self._after_text)

    def _chunk(self, index: int, offset: int, choice: Iterable[bytes]) -> Iterator[bytes]:
        """Numbered now, made on demand."""
        line = b"" if self._log is None else self._log.line(index, offset)
        return chain((line, self._head), choice, (b"]", self._tail))

    def encode_end(self, usage: TokenUsage) -> bytes:
        if not self._include_usage or (self._log is not None and self._log.is_usage_seen):
            return b""
        line = b"" if self._log is None else self._log.usage_line()
        return b"".join((line, self._head, b'],"usage":', self._usage(usage), b"}\n\n"))

    # -- a whole answer ------------------------------------------------------------------------------------------------------------

    def add(self, events: Sequence[OutputEvent]) -> None:
        self._keep_prompt_logprobs(events)
        for event in events:
            self._outputs[event.index].add(event)

    def _keep_prompt_logprobs(self, events: Sequence[OutputEvent]) -> None:
        """From the first sequence of each prompt: other sequences may repeat them."""
        for event in events:
            if event.prompt_logprobs and event.index % self._request.n == 0:
                for page in event.prompt_logprobs:
                    self._prompt_logprobs[event.index // self._request.n].extend(page)

    def encode_body(self, usage: TokenUsage) -> Iterator[bytes]:
        yield self._head
        for index, output in enumerate(self._outputs):
            yield b"," if index else b""
            yield from self._whole_choice(index, output)
        yield b'],"usage":' + self._usage(usage)
        yield from self._after_choices()
        yield b"}"

    @abstractmethod
    def _whole_choice(self, index: int, output: ChoiceOutput) -> Iterator[bytes]: ...

    def _after_choices(self) -> Iterator[bytes]:
        return iter(())

    def _usage(self, usage: TokenUsage) -> bytes:
        prompt, completion, cached, reasoning = usage[:4]
        made = schemas.CompletionUsage(prompt, completion, prompt + completion, schemas.PromptTokensDetails(cached))
        if reasoning:
            made.completion_tokens_details = schemas.CompletionTokensDetails(reasoning)
        if (fitted := self._fitted) is not None:
            made.context = schemas.ContextUsage(fitted.fitting, fitted.num_dropped, *fitted.usage[:2])
        return _encode(made)
