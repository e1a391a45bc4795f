"""Records the events of a whole answer as one compact value, from which an encoder writes the same answer again. It holds the texts
of its token ids, so that no tokenizer is needed for a replay.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import msgspec
from msgspec import Struct

from headrace.core.plan import LogprobColumns
from headrace.core.update import FinishReason
from headrace.gateway.stores.store import StoredEntry, entry_in
from headrace.gateway.upstream.seam import EventStream, OutputEvent, PassedField, Prepared, PreparedPrompt, TokenUsage, ToolCall
from headrace.text.logprobs import DecodedLogprobs, TokenTexts

FORM = 2

KEPT_USAGE = (
    *("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"),
    *("earlier_tokens", "earlier_prompt_tokens", "num_uncounted_prompts"),
)
"""Fields of `TokenUsage`."""

EVENT_BYTES = 64


class RecordedLogprobs(Struct, array_like=True, frozen=True):
    """vocabulary: index in `WholeAnswer.vocabularies`; columns: (type code, bytes) in the order of `LogprobColumns`"""

    vocabulary: int
    columns: list[tuple[Literal["i", "q", "f", "d"], bytes]]
    text_offsets: bytes
    visible: bytes


class RecordedEvent(Struct, array_like=True, frozen=True):
    index: int
    text: str
    num_tokens: int
    logprobs: list[RecordedLogprobs] = []
    finish: str | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: list[tuple[int, str | None, str | None, str, list[tuple[str, str]]]] = []
    is_call_cut: bool = False
    is_filtered: bool = False
    passed: list[tuple[str, str]] = []


class WholeAnswer(StoredEntry, frozen=True):
    """recorded_at    Unix seconds of the answer's end
    prompts        per prompt its number of tokens (None: not known) and its text as echo shows it
    usage          the values of `KEPT_USAGE`
    estimated_tokens  of `TokenUsage`; last, where gateways that do not know it read over it
    """

    recorded_at: float
    model: str
    num_sequences: int
    prompts: list[tuple[int | None, str]]
    seed: int | None
    ignored: list[str]
    usage: tuple[int, ...]
    events: list[RecordedEvent]
    vocabularies: list[dict[int, tuple[str, bytes]]]
    estimated_tokens: int = 0

    @property
    def token_usage(self) -> TokenUsage:
        return TokenUsage(**dict(zip(KEPT_USAGE, self.usage, strict=False)), estimated_tokens=self.estimated_tokens)

    def output_events(self) -> Iterator[OutputEvent]:
        vocabularies = [RecordedTexts(texts) for texts in self.vocabularies]
        for event in self.events:
            yield OutputEvent(
                event.index,
                event.text,
                event.num_tokens,
                logprobs=[_decoded(part, vocabularies) for part in event.logprobs],
                finish=None if event.finish is None else FinishReason(event.finish),
                stop_reason=event.stop_reason,
                reasoning=event.reasoning,
                tool_calls=[ToolCall(*call[:4], [PassedField(*field) for field in call[4]]) for call in event.tool_calls],
                is_call_cut=event.is_call_cut,
                is_filtered=event.is_filtered,
                passed=[PassedField(*field) for field in event.passed],
            )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RecordedTexts:
    """The `TokenTexts` of a recorded answer's token ids. Compared by identity, as a key of tables of encoded JSON."""

    texts: Mapping[int, tuple[str, bytes]]

    def token_text(self, token_id: int) -> str:
        return self.texts[token_id][0]

    def token_bytes(self, token_id: int) -> bytes:
        return self.texts[token_id][1]


class EventRecording:
    def __init__(self) -> None:
        self.events: list[RecordedEvent] = []
        self.vocabularies: list[dict[int, tuple[str, bytes]]] = []
        self._texts: list[TokenTexts] = []

    def add(self, event: OutputEvent) -> int:
        """Returns the event's approximate memory in bytes."""
        recorded = RecordedEvent(
            event.index,
            event.text,
            event.num_tokens,
            [self._recorded(part) for part in event.logprobs],
            None if event.finish is None else event.finish.value,
            event.stop_reason,
            event.reasoning,
            [(call.number, call.call_id, call.name, call.arguments, list(call.passed)) for call in event.tool_calls],
            event.is_call_cut,
            event.is_filtered,
            list(event.passed),
        )
        self.events.append(recorded)
        return EVENT_BYTES + event.num_bytes

    def _recorded(self, part: DecodedLogprobs) -> RecordedLogprobs:
        number = self._vocabulary(part.texts)
        texts, columns = self.vocabularies[number], part.columns
        for token_id in {*columns.token_ids, *columns.top_ids} - texts.keys():
            texts[token_id] = part.texts.token_text(token_id), part.texts.token_bytes(token_id)
        kept: list[tuple[Any, bytes]] = [(column.typecode, column.tobytes()) for column in columns.columns()]
        return RecordedLogprobs(number, kept, part.text_offsets.tobytes(), bytes(part.visible))

    def _vocabulary(self, texts: TokenTexts) -> int:
        """An answer has one, or two when another server took over before the first token."""
        for number, known in enumerate(self._texts):
            if known is texts:
                return number
        self._texts.append(texts)
        self.vocabularies.append({})
        return len(self._texts) - 1


def _decoded(part: RecordedLogprobs, vocabularies: Sequence[TokenTexts]) -> DecodedLogprobs:
    columns: list[Any] = [array(code, column) for code, column in part.columns]
    return DecodedLogprobs(vocabularies[part.vocabulary], LogprobColumns(*columns), array("q", part.text_offsets), bytearray(part.visible))


encode_answer = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(WholeAnswer)


def decode_answer(value: bytes | None) -> WholeAnswer | None:
    return entry_in(value, _decoder, FORM)


REPLAY_EVENTS = 32
"""Each event becomes a chunk in about 10 us; other requests have their turn between batches."""


def recorded_prepared(answer: WholeAnswer) -> Prepared:
    usage = answer.token_usage
    return Prepared(
        stream=partial(ReplayedStream, answer),
        prompts=[PreparedPrompt(text, num_tokens) for num_tokens, text in answer.prompts],
        prompt_tokens=usage.prompt_tokens,
        max_prompt_tokens=usage.prompt_tokens,
        max_output_tokens=usage.completion_tokens,
        num_sequences=answer.num_sequences,
        seed=answer.seed,
        ignored=answer.ignored,
    )


class ReplayedStream(EventStream):
    """The event stream of a recorded answer. Unlike an engine's, a batch has several events of one sequence: the recorded pieces."""

    def __init__(self, answer: WholeAnswer) -> None:
        self._usage = answer.token_usage
        self._events = answer.output_events()
        self._is_begun = False

    async def events(self) -> list[OutputEvent]:
        if self._is_begun:
            await asyncio.sleep(0)
        self._is_begun = True
        return list(islice(self._events, REPLAY_EVENTS))

    def usage(self) -> TokenUsage:
        return self._usage

    def cancel(self) -> None:
        self._events = iter(())
