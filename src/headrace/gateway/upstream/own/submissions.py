"""Keeps what happened to one call at its replicas, for whoever asks afterwards where its time went (`observe.timeline`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.clock import Clock
from headrace.core.update import STAGES, FinishReason, SequenceUpdate
from headrace.gateway.upstream.own.replica_health import ReplicaAttempt
from headrace.observe.finished_request import MAX_DETAIL_CHARS, AnswerAttempt, AnswerHandling, Compared
from headrace.observe.timeline import Span
from headrace.policy.routing.choice import ReplicaChoice


class SubmissionResult(StrEnum):
    ANSWERED = "answered"
    REJECTED = "rejected"
    LOST = "lost"
    MOVED = "moved"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


NEVER = 1e15
"""A moment after every other. JSON has no infinity."""

MAX_SUBMISSIONS = 64
"""Kept of one call."""


@dataclass(slots=True, eq=False)
class Submission:
    """Sequences that were sent together to one replica.

    begun     by sequence: seconds in the engine's queue, and when its first token was read
    lasts     by sequence: its last update
    ended_at  NEVER while it runs
    """

    indices: tuple[int, ...]
    choice: ReplicaChoice
    attempt: ReplicaAttempt
    begun: dict[int, tuple[float, float]] = field(default_factory=dict)
    lasts: dict[int, SequenceUpdate] = field(default_factory=dict)
    ended_at: float = NEVER
    result: SubmissionResult | None = None
    detail: str = ""

    def read(self, updates: Sequence[SequenceUpdate], clock: Clock) -> None:
        self.attempt.read(updates)
        for update in updates:
            if update.queue_time_s is not None:
                self.begun[update.index] = update.queue_time_s, clock()
            if update.entered:
                self.lasts[update.index] = update

    def end(self, at: float, result: SubmissionResult, error: Exception | None = None) -> None:
        """Ends its attempt, too. A later call changes nothing."""
        if self.result is None:
            match result:
                case SubmissionResult.LOST:
                    self.attempt.lose()
                case SubmissionResult.REJECTED:
                    self.attempt.reject(error)
                case _:
                    self.attempt.end()
            self.ended_at, self.result, self.detail = at, result, "" if error is None else str(error)[:MAX_DETAIL_CHARS]

    def spans(self, index: int, ended_at: float) -> list[Span]:
        """ended_at: when the sequence was read to its end, or the submission ended"""
        sent_at, last = self.attempt.sent_at, self.lasts.get(index)
        if self.result is SubmissionResult.REJECTED:
            return [Span("route", sent_at, self.ended_at)]
        if self.result is SubmissionResult.MOVED:
            return [Span("queue", sent_at, self.ended_at)]
        if last is not None and last.stages is not None:
            names = ["queue", *[STAGES[stage] for stage, _ in last.entered]]
            moments = [sent_at, *[sent_at + offset for _, offset in last.entered], sent_at + sum(last.stages)]
        elif index in self.begun:  # the gateway or the client ended it, its engine was lost, or is an older one
            queue_s, begun_at = self.begun[index]
            names, moments = ["queue", "prefill", "decode"], [sent_at, sent_at + queue_s, begun_at, ended_at]
        else:  # in its queue, or in a prefill
            names, moments = ["wait"], [sent_at, ended_at]
        return [Span(name, start, end) for name, start, end in zip(names, moments, moments[1:], strict=False)]


class Submissions:
    """All of one call, in the order in which they were sent.

    begun_at  when the call was first to be sent; None: not yet
    """

    __slots__ = ("_clock", "_closed_at", "_ended_at", "_failures", "_kept", "begun_at")

    def __init__(self, num_sequences: int, clock: Clock) -> None:
        self._clock = clock
        self._kept: list[Submission] = []
        self._ended_at = [NEVER] * num_sequences
        self._failures: dict[int, SubmissionResult] = {}
        self._closed_at = NEVER
        self.begun_at: float | None = None

    def begin(self) -> None:
        if self.begun_at is None:
            self.begun_at = self._clock()

    def add(self, submission: Submission) -> Submission:
        if len(self._kept) < MAX_SUBMISSIONS:
            self._kept.append(submission)
        return submission

    def end_sequence(self, index: int, finish: FinishReason | None) -> None:
        self._ended_at[index] = self._clock()
        if finish is not None and not finish.is_answer:
            self._failures[index] = SubmissionResult(finish)

    def result_of(self, indices: Iterable[int]) -> SubmissionResult:
        """Once all of these sequences have ended."""
        return next((self._failures[index] for index in indices if index in self._failures), SubmissionResult.ANSWERED)

    def close(self) -> None:
        """Nothing is submitted any more: perhaps a foreign server answers now."""
        self._closed_at = min(self._closed_at, self._clock())

    def handling(self) -> AnswerHandling:
        return AnswerHandling(self._attempts(), self._all_spans())

    def _attempts(self) -> list[AnswerAttempt]:
        return [
            AnswerAttempt(
                each.choice.replica_id,
                each.attempt.sent_at,
                min(each.ended_at, self._closed_at, max(self._ended_at[index] for index in each.indices)) - each.attempt.sent_at,
                each.choice.reason,
                tuple([Compared(one.replica_id, *one.cost, one.predicted_s, one.cached_tokens) for one in each.choice.figures]),
                each.result or "",
                each.detail,
                len(each.indices),
                each.choice.policy,
            )
            for each in self._kept
        ]

    def _all_spans(self) -> list[Span]:
        if self.begun_at is None:
            return []
        return [span for index, end in enumerate(self._ended_at) for span in self._spans(index, min(end, self._closed_at))]

    def _spans(self, index: int, ended_at: float) -> Sequence[Span]:
        assert self.begun_at is not None
        spans: list[Span] = []
        waits, since, is_waiting = "route", self.begun_at, True
        for each in self._kept:
            if index not in each.indices:
                continue
            spans.append(Span(waits, since, each.attempt.sent_at))
            spans += each.spans(index, min(each.ended_at, ended_at))
            waits, since = "resume" if each.result is SubmissionResult.LOST else "route", min(each.ended_at, ended_at)
            is_waiting = each.result in (SubmissionResult.LOST, SubmissionResult.MOVED, SubmissionResult.REJECTED)
        if is_waiting:
            spans.append(Span(waits, since, ended_at))
        return [span for span in spans if span.end > span.start]
