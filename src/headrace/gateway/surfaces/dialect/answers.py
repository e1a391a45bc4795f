"""What the answers of chat and completions share: the head repeated in every part, a sequence collected, the bytes around a choice.

A chunk is assembled from bytes: everything that is constant over a stream (id, model, created, ...) is encoded once, only the new text
(and log-probabilities, if asked for) is encoded per chunk. Text is always a JSON string, so nothing a model says can break the framing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from headrace.core.finish import FINISH_WORDS, FinishReason
from headrace.gateway.generation.event_log import EventLog
from headrace.gateway.generation.generation import Generation
from headrace.gateway.http.sse import DONE
from headrace.gateway.sessions.fitting import Fitted
from headrace.gateway.surfaces.dialect import schemas
from headrace.gateway.upstream.seam import OutputEvent, PreparedPrompt, TokenUsage, ToolCall
from headrace.text.logprobs import DecodedLogprobs

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every part of an answer repeats: the answer's id, the time of its creation, the model and its fingerprint.

    event_log  numbers a stream's events; None: they have no ids
    context    how the conversation was shortened; None: it was not
    """

    id: str
    created: int
    model: str
    fingerprint: str | None
    event_log: EventLog | None = None
    context: schemas.ContextUsage | None = None

    @classmethod
    def of(cls, prefix: str, generation: Generation) -> AnswerHead:
        return cls(
            id=f"{prefix}{generation.answer_id}",
            created=generation.created,
            model=generation.shown_model,
            fingerprint=generation.model.upstream.fingerprint,
            event_log=generation.event_log,
            context=None if generation.fitted is None else context_usage(generation.fitted),
        )


@dataclass(slots=True)
class ChoiceOutput:
    """One choice of an answer, collected from its sequence's events.

    logprobs        log-probabilities; a new part begins where the vocabulary of the token ids changes
    tool_pieces     pieces of tool calls, by the call's number
    has_tool_calls  set in a stream too, where tool calls are not collected
    is_call_cut, is_filtered  as in `OutputEvent`
    """

    logprobs: list[DecodedLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: list[str] = field(default_factory=list)
    tool_pieces: dict[int, list[ToolCall]] = field(default_factory=dict)
    has_tool_calls: bool = False
    is_call_cut: bool = False
    is_filtered: bool = False

    @property
    def finish_word(self) -> str:
        is_tool_turn = self.has_tool_calls and not self.is_call_cut
        return finish_word(self.finish or FinishReason.STOP, is_tool_turn=is_tool_turn, is_filtered=self.is_filtered)

    def add(self, event: OutputEvent) -> None:
        self.texts.append(event.text)
        for part in event.logprobs:
            if not (self.logprobs and self.logprobs[-1].texts is part.texts):
                self.logprobs.append(DecodedLogprobs(part.texts))
            self.logprobs[-1].extend(part)
        if event.reasoning:
            self.reasoning.append(event.reasoning)
        for piece in event.tool_calls:
            self.has_tool_calls = True
            self.tool_pieces.setdefault(piece.number, []).append(piece)
        if event.finish is not None:
            self.finish, self.stop_reason = event.finish, event.stop_reason
            self.is_call_cut, self.is_filtered = event.is_call_cut, event.is_filtered

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in the order in which they began, their pieces joined."""
        return [ToolCall.joined(pieces) for pieces in self.tool_pieces.values()]


def outputs_of(count: int) -> list[ChoiceOutput]:
    """The choices of one answer, empty."""
    return [ChoiceOutput() for _ in range(count)]


class Chunks:
    """The constant parts of a stream's chunks."""

    __slots__ = (
        "_after_text",
        "_before_texts",
        "_choice_end",
        "_context",
        "_counts",
        "_head",
        "_include_usage",
        "_log",
        "_n",
        "_prompts",
        "_tail",
    )

    def __init__(
        self, head: AnswerHead, kind: str, text_choice: bytes, request: schemas.SamplingFields, prompts: Sequence[PreparedPrompt]
    ) -> None:
        """text_choice: a choice with text alone, as a format of its index and the text's JSON"""
        num_sequences = request.n * len(prompts)
        options = request.stream_options or schemas.StreamOptions()
        self._include_usage = options.include_usage
        self._counts: list[int] | None = [0] * num_sequences if options.continuous_usage_stats else None
        self._n, self._prompts = request.n, prompts
        self._log, self._context = head.event_log, head.context
        shared = {"id": head.id, "object": kind, "created": head.created, "model": head.model, "system_fingerprint": head.fingerprint}
        self._head = b"data: " + _encode(shared)[:-1] + b',"choices":['
        before_text, after_text = text_choice.split(b"%s")
        self._before_texts = [self._head + before_text % index for index in range(num_sequences)]
        self._choice_end = after_text + b"]"
        self._end_with(b',"usage":null}\n\n' if self._include_usage else b"}\n\n")

    def count(self, index: int, num_new: int) -> None:
        """Count `num_new` tokens of choice `index`, whose chunks come next. With continuous_usage_stats these have the usage of this choice
        and its prompt alone, as vLLM has it.
        """
        if self._counts is None:
            return
        prompt = self._prompts[index // self._n].num_tokens or 0
        completion = self._counts[index] = self._counts[index] + num_new
        self._end_with(b',"usage":%b}\n\n' % _encode(schemas.CompletionUsage(prompt, completion, prompt + completion)))

    def _end_with(self, tail: bytes) -> None:
        self._tail = tail
        self._after_text = self._choice_end + tail

    def text(self, index: int, place: int, text: str) -> bytes:
        """A chunk with the text of one choice alone, as most chunks are. place: `OutputEvent.place`"""
        log = self._log
        if log is None:
            return self._before_texts[index] + _encode(text) + self._after_text
        entries = log.entries  # what `EventLog.line` does, without a call: this runs once per token
        entries.append(place * log.num_sequences + index)
        return b"%b%d\n%b%b%b" % (log.prefix, len(entries), self._before_texts[index], _encode(text), self._after_text)

    def chunk(self, index: int, place: int, choice: bytes) -> bytes:
        return b"".join((self._line(index, place), self._head, choice, b"]", self._tail))

    def around(self, index: int, place: int, choice: Iterable[bytes]) -> Iterator[bytes]:
        """`chunk` of a choice that comes in pieces, each made when it is asked for."""
        yield self._line(index, place)
        yield self._head
        yield from choice
        yield b"]"
        yield self._tail

    def _line(self, index: int, place: int) -> bytes:
        return b"" if self._log is None else self._log.line(index, place)

    def encode_end(self, usage: TokenUsage) -> bytes:
        if not self._include_usage or (self._log is not None and self._log.is_usage_seen):
            return DONE
        line = b"" if self._log is None else self._log.usage_line()
        return b"".join((line, self._head, b'],"usage":', _encode(usage_body(usage, self._context)), b"}\n\n", DONE))


def usage_body(usage: TokenUsage, context: schemas.ContextUsage | None = None) -> schemas.CompletionUsage:
    prompt, completion, cached, reasoning = usage[:4]
    made = schemas.CompletionUsage(prompt, completion, prompt + completion, schemas.PromptTokensDetails(cached))
    if reasoning:
        made.completion_tokens_details = schemas.CompletionTokensDetails(reasoning)
    if context is not None:
        made.context = context
    return made


def context_usage(fitted: Fitted) -> schemas.ContextUsage:
    return schemas.ContextUsage(fitted.fitting, fitted.num_dropped, fitted.usage.prompt_tokens, fitted.usage.completion_tokens)


def finish_part(event: OutputEvent, *, is_tool_turn: bool = False) -> bytes:
    if event.finish is None:
        return b',"finish_reason":null}'
    word = finish_word(event.finish, is_tool_turn=is_tool_turn, is_filtered=event.is_filtered)
    return b',"finish_reason":"%s","stop_reason":%s}' % (word.encode(), _encode(event.stop_reason))


def whole_finish_part(output: ChoiceOutput) -> bytes:
    """The end of a choice's object in a whole answer: finish_reason and stop_reason."""
    return b',"finish_reason":"%b","stop_reason":%b}' % (output.finish_word.encode(), _encode(output.stop_reason))


def finish_word(finish: FinishReason, *, is_tool_turn: bool, is_filtered: bool) -> str:
    """OpenAI's finish_reason. A sequence that stopped after complete tool calls waits for the tools' answers: tool_calls."""
    if finish is not FinishReason.STOP:
        return FINISH_WORDS[finish]
    return "content_filter" if is_filtered else "tool_calls" if is_tool_turn else FINISH_WORDS[finish]


def around_choices(answer: Struct) -> tuple[bytes, bytes]:
    """The bytes of a whole answer before and after its choices. answer: with an empty list of choices"""
    # Quotes inside JSON strings are escaped, so these bytes are the field and no text.
    before, mark, behind = _encode(answer).partition(b'"choices":[')
    return before + mark, behind
