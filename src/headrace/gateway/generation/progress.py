"""Records the times, token counts and finish reasons of one generating request, for metrics, usage and the request log.

The definitions are vLLM's. TTFT = arrival at the gateway to the first token. TPOT = (last token - first token) / (tokens - 1), once per
sequence. ITL = every gap, where a chunk of k tokens counts as k gaps of a k-th each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidRequest, SequenceFailed, Unavailable
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.core.update import FINISH_WORDS, FinishReason
from headrace.gateway.upstream.seam import EventStream, OutputEvent
from headrace.observe.finished_request import MAX_DETAIL_CHARS, Times
from headrace.observe.metrics import ReplicaMetrics


@dataclass(slots=True)
class _Sequence:
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish: FinishReason | None = None
    metrics: ReplicaMetrics | None = None
    """Metrics of the replica that gave the first token."""

    @property
    def tpot_s(self) -> float | None:
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class RequestProgress:
    """Times and token counts of one running request.

    ttft_s   seconds from arrival to the first token of any sequence; None before it
    failure  the engine's message where it ended a sequence without an answer
    """

    __slots__ = ("_arrived_at", "_instruments", "_sequences", "_stream", "failure", "num_sequences", "ttft_s")

    def __init__(self, stream: EventStream, *, num_sequences: int, arrived_at: float, instruments: Callable[[str], ReplicaMetrics]) -> None:
        self._stream = stream
        self._sequences = [_Sequence() for _ in range(num_sequences)]
        self.num_sequences = num_sequences
        self._arrived_at = arrived_at
        self._instruments = instruments
        self.ttft_s: float | None = None
        self.failure: str | None = None

    def record(self, events: Sequence[OutputEvent], now: float) -> None:
        """now: on the clock of `arrived_at`"""
        for event in events:
            sequence = self._sequences[event.index]
            if event.num_tokens:
                if sequence.num_tokens == 0:
                    self._record_first(sequence, now, self._metrics_of(event.index))
                elif sequence.metrics is not None:
                    sequence.metrics.inter_token_latency.observe((now - sequence.last_s) / event.num_tokens, event.num_tokens)
                sequence.num_tokens += event.num_tokens
                sequence.last_s = now
            if event.finish is not None:
                sequence.finish = event.finish

    def record_replayed(self, event: OutputEvent) -> None:
        """Tokens and latencies were counted by the earlier stream."""
        if event.finish is not None:
            self._sequences[event.index].finish = event.finish

    def _record_first(self, sequence: _Sequence, now: float, metrics: ReplicaMetrics | None) -> None:
        sequence.first_s, sequence.metrics = now, metrics
        if self.ttft_s is None:
            self.ttft_s = now - self._arrived_at
            if metrics is not None:
                metrics.time_to_first_token.observe(self.ttft_s)

    def close(self, now: float, *, n: int) -> None:
        """n: sequences per prompt, which share one queue time"""
        if (metrics := self._metrics_of(0)) is not None:
            metrics.request_latency.observe(now - self._arrived_at)
        for index in range(0, self.num_sequences, n):
            queue_time_s = self._stream.facts(index).queue_time_s
            if queue_time_s is not None and (metrics := self._metrics_of(index)) is not None:
                metrics.queue_time.observe(queue_time_s)
        for index, sequence in enumerate(self._sequences):
            if (tpot_s := sequence.tpot_s) is not None and (metrics := self._metrics_of(index)) is not None:
                metrics.time_per_output_token.observe(tpot_s)

    @property
    def tpot_s(self) -> float | None:
        """The mean over the sequences that have one."""
        times_s = [time_s for sequence in self._sequences if (time_s := sequence.tpot_s) is not None]
        return sum(times_s) / len(times_s) if times_s else None

    def times(self) -> Times:
        facts = self._stream.facts(0)
        in_engine = () if (stages := facts.stages) is None else (stages.prefill, stages.decode, stages.preempted, stages.stalled)
        return Times(self.ttft_s, self.tpot_s, facts.queue_time_s, *in_engine)

    @property
    def has_run(self) -> bool:
        """Whether a token came, or an end that is no failure."""
        ends = [sequence.finish for sequence in self._sequences if sequence.finish is not None]
        return self.ttft_s is not None or any(end.is_answer or end is FinishReason.DEADLINE for end in ends)

    @property
    def is_whole(self) -> bool:
        return all(sequence.finish is not None and sequence.finish.is_answer for sequence in self._sequences)

    @property
    def finish_reasons(self) -> list[str]:
        return [FINISH_WORDS[sequence.finish] for sequence in self._sequences if sequence.finish is not None]

    def _metrics_of(self, index: int) -> ReplicaMetrics | None:
        name = self._stream.facts(index).replica
        return None if name is None else self._instruments(name)


def is_charged(end_reason: HeadraceError | None, *, has_run: bool) -> bool:
    """What failed without output costs nothing; what its client or its deadline ended costs the prompt."""
    return has_run or not (end_reason is None or isinstance(end_reason, Unavailable))


DEADLINE_PASSED = "The request's deadline passed before it was complete."


def raise_if_failed(finish: FinishReason, detail: str | None) -> None:
    """Raises DeadlineExceeded, Unavailable, InvalidRequest or SequenceFailed."""
    if finish.is_answer:
        return
    if finish is FinishReason.DEADLINE:
        raise DeadlineExceeded(DEADLINE_PASSED)
    if finish is FinishReason.CANCELLED:
        raise Unavailable("The engine cancelled this request; it can be sent again.")
    if detail is not None and detail.startswith(CANNOT_CONTINUE):  # sending it again would end the same way
        reason = detail.removeprefix(CANNOT_CONTINUE)[:MAX_DETAIL_CHARS]
        raise InvalidRequest("grammar", "one whose output can be continued within its limits", remedy=f"This output ended: {reason}")
    raise SequenceFailed("The engine could not continue this request. Other requests are not affected; it can be sent again.")
