"""A recorded answer as an upstream gives one: `RecordedPrepared` and its stream, so that encoders know no difference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.core.plan import LogprobColumns
from headrace.core.update import StageSeconds
from headrace.gateway.cache.recorded_answer import WholeAnswer
from headrace.gateway.upstream.output_events import OutputEvent, TokenUsage
from headrace.gateway.upstream.seam import EventListener
from headrace.text.logprobs import DecodedLogprobs

REPLAY_EVENTS = 32
"""Events that a replay gives at a time, each of which becomes a chunk in about 10 us. Other requests have their turn between batches."""


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A `PreparedPrompt`. Answers with log-probabilities of their prompts are not recorded."""

    num_tokens: int | None
    text: str

    def decoded_logprobs(self, logprobs: LogprobColumns) -> Iterator[DecodedLogprobs]:
        return iter(())


@dataclass(frozen=True, slots=True)
class RecordedPrepared:
    """An answer that is there already. A `Prepared`."""

    answer: WholeAnswer

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
    def prompts(self) -> Sequence[RecordedPrompt]:
        return [RecordedPrompt(*prompt) for prompt in self.answer.prompts]

    @property
    def keeps_events(self) -> bool:
        return False

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

    def replica(self, index: int) -> str | None:
        return None

    def queue_time_s(self, index: int) -> float | None:
        return None

    def stages(self, index: int) -> StageSeconds | None:
        return None

    def saved_state(self) -> bytes | None:
        return None

    def replay(self, index: int, place: int) -> OutputEvent:
        raise AssertionError("a replayed answer has no event log")

    def cancel(self) -> None:
        self._events = iter(())

    async def close(self) -> None:
        self.cancel()
