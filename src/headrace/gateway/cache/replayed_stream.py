"""A recorded answer as an upstream gives one: `RecordedPrepared` and its stream, so that encoders know no difference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.gateway.cache.recorded_answer import WholeAnswer
from headrace.gateway.upstream.seam import EventListener, OutputEvent, SequenceFacts, TextPrompt, TokenUsage

REPLAY_EVENTS = 32
"""Events that a replay gives at a time, each of which becomes a chunk in about 10 us. Other requests have their turn between batches."""


@dataclass(frozen=True, slots=True)
class RecordedPrepared:
    """An answer that is there already. A `Prepared`."""

    answer: WholeAnswer
    keeps_events: bool = False

    @property
    def ignored(self) -> Sequence[str]:
        return self.answer.ignored

    @property
    def prompt_tokens(self) -> int | None:
        return self.answer.token_usage.prompt_tokens

    @property
    def max_prompt_tokens(self) -> int:
        return self.answer.token_usage.prompt_tokens

    @property
    def max_output_tokens(self) -> int | None:
        return self.answer.token_usage.completion_tokens

    @property
    def num_sequences(self) -> int:
        return self.answer.num_sequences

    @property
    def seed(self) -> int | None:
        return self.answer.seed

    @property
    def prompts(self) -> Sequence[TextPrompt]:
        """Answers with log-probabilities of their prompts are not recorded."""
        return [TextPrompt(text, num_tokens) for num_tokens, text in self.answer.prompts]

    def stream(self) -> ReplayedStream:
        return ReplayedStream(self.answer)


class ReplayedStream:
    """An `EventStream` that no engine computes. A batch has several events of a sequence: the pieces in which the answer came."""

    num_resumes = 0
    unread_bytes = 0

    def __init__(self, answer: WholeAnswer) -> None:
        self._usage = answer.token_usage
        self._events = answer.output_events()
        self._is_begun = False

    async def events(self) -> list[OutputEvent]:
        if self._is_begun:
            await asyncio.sleep(0)
        self._is_begun = True
        return list(islice(self._events, REPLAY_EVENTS))

    def listen(self, listener: EventListener | None) -> None:
        """Events come from `events` alone."""

    def usage(self) -> TokenUsage:
        return self._usage

    def facts(self, index: int) -> SequenceFacts:
        return SequenceFacts()

    def saved_state(self) -> bytes | None:
        return None

    def replay(self, index: int, place: int) -> OutputEvent:
        raise AssertionError("a replayed answer has no event log")

    def cancel(self) -> None:
        self._events = iter(())

    async def close(self) -> None:
        self.cancel()
