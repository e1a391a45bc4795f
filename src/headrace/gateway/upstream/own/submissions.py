"""Keeps what happened to one call at its replicas, for whoever asks afterwards where its time went (`observe.timeline`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.clock import Clock
from headrace.core.update import STAGES, SequenceUpdate
from headrace.gateway.upstream.own.replica_health import ReplicaAttempt
from headrace.observe.finished_request import MAX_DETAIL_CHARS, AnswerAttempt, AnswerHandling, Compared
from headrace.observe.timeline import Span
from headrace.policy.routing.choice import ReplicaChoice


class SubmissionResult(StrEnum):
    ANSWERED = "answered"
    REJECTED = "rejected"
    LOST = "lost"
    CANCELLED = "cancelled"


NEVER = 1e15
"""A moment after every other. JSON has no infinity."""

MAX_SUBMISSIONS = 64
"""Kept of one call."""


@dataclass(slots=True, eq=False)
class Submission:
    """Sequences that were sent together to one replica.

    lasts     by sequence: its last update
    ended_at  NEVER while it runs
    """

    indices: tuple[int, ...]
    choice: ReplicaChoice
    attempt: ReplicaAttempt
    queue_s: float | None = None
    lasts: dict[int, SequenceUpdate] = field(default_factory=dict)
    ended_at: float = NEVER
    result: SubmissionResult | None = None
    detail: str = ""

    def read(self, updates: Iterable[SequenceUpdate]) -> None:
        for update in updates:
            if update.queue_time_s is not None:
                self.queue_s = update.queue_time_s
            if update.entered:
                self.lasts[update.index] = update

    def end(self, at: float, result: SubmissionResult, error: Exception | None = None) -> None:
        if self.result is None:
            self.ended_at, self.result, self.detail = at, result, "" if error is None else str(error)[:MAX_DETAIL_CHARS]

    def spans(self, index: int, ended_at: float) -> list[Span]:
        """ended_at: when the sequence was read to its end, or the submission ended"""
        sent_at, last = self.attempt.sent_at, self.lasts.get(index)
        if self.result is SubmissionResult.REJECTED:
            return [Span("route", sent_at, self.ended_at)]
        if last is not None and last.stages is not None:
            names = ["queue", *[STAGES[stage] for stage, _ in last.entered]]
            moments = [sent_at, *[sent_at + offset for _, offset in last.entered], sent_at + sum(last.stages)]
        else:  # the gateway or the client ended it, its engine was lost, or is an older one
            begun_at = ended_at if self.attempt.begun_at is None else self.attempt.begun_at
            names = ["queue", "prefill", "decode"]
            moments = [sent_at, begun_at if self.queue_s is None else sent_at + self.queue_s, begun_at, ended_at]
        return [Span(name, start, end) for name, start, end in zip(names, moments, moments[1:], strict=False)]


class Submissions:
    """All of one call, in the order in which they were sent.

    begun_at  when the call was first to be sent; None: not yet
    """

    __slots__ = ("_clock", "_ended_at", "_kept", "begun_at")

    def __init__(self, num_sequences: int, clock: Clock) -> None:
        self._clock = clock
        self._kept: list[Submission] = []
        self._ended_at = [NEVER] * num_sequences
        self.begun_at: float | None = None

    def begin(self) -> None:
        if self.begun_at is None:
            self.begun_at = self._clock()

    def add(self, submission: Submission) -> Submission:
        if len(self._kept) < MAX_SUBMISSIONS:
            self._kept.append(submission)
        return submission

    def end_sequence(self, index: int) -> None:
        self._ended_at[index] = self._clock()

    def handling(self) -> AnswerHandling:
        return AnswerHandling(self._attempts(), self._all_spans())

    def _attempts(self) -> list[AnswerAttempt]:
        return [
            AnswerAttempt(
                each.choice.replica_id,
                each.attempt.sent_at,
                min(each.ended_at, max(self._ended_at[index] for index in each.indices)) - each.attempt.sent_at,
                each.choice.reason,
                tuple(
                    [
                        Compared(one.replica_id, one.cost.lacks_blocks, one.cost.outstanding, one.cost.fullness, one.predicted_s)
                        for one in each.choice.figures
                    ]
                ),
                each.result or "",
                each.detail,
                len(each.indices),
            )
            for each in self._kept
        ]

    def _all_spans(self) -> list[Span]:
        return [] if self.begun_at is None else [span for index, end in enumerate(self._ended_at) for span in self._spans(index, end)]

    def _spans(self, index: int, ended_at: float) -> Sequence[Span]:
        assert self.begun_at is not None
        spans: list[Span] = []
        waits, since = "route", self.begun_at
        for each in self._kept:
            if index not in each.indices:
                continue
            spans.append(Span(waits, since, each.attempt.sent_at))
            spans += each.spans(index, min(each.ended_at, ended_at))
            waits, since = "resume" if each.result is SubmissionResult.LOST else "route", min(each.ended_at, ended_at)
        if not self._kept or self._kept[-1].result in (SubmissionResult.LOST, SubmissionResult.REJECTED):
            spans.append(Span(waits, since, ended_at))
        return [span for span in spans if span.end > span.start]
