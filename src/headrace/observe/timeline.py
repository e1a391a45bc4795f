"""Divides the time of a request into stages that do not overlap.

The gateway marks what it does: a mark ends the stage before it. While an answer is made, the stage is that of its sequences in their
engines, of which several may run at once. What neither covers belongs to no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from headrace.core.clock import Clock

ADMIT = "admit"
"""The check of the key, the turn of the tenant, the limits on requests."""

READ = "read"
"""The body: its bytes and their parsing."""

ANSWER = "answer"
"""The gateway's stage that is divided further, by the spans of the sequences."""

DELIVER = "deliver"
"""From the end of the last sequence in its engine to the last byte that the gateway wrote."""

REPLAY = "replay"
"""A continued stream sends its client what it lacks."""

REST = "rest"
"""Stages in the engines of a request of many sequences: those after the last one that has a row of its own."""

CLOSE = "close"
"""After the last byte: limits are charged, a session is stored."""

PRECEDENCE = ("decode", "prefill", "stalled", "preempted", "queue", "resume", "route", "stream", "wait")
"""The first of the stages that sequences are in at one moment is the request's: as a whole it is as far as its furthest sequence."""

LEAST_S = 100e-6
"""A shorter piece is left out, so that a request has as many rows as a person can read."""


class Span(NamedTuple):
    """Times on the gateway's clock."""

    name: str
    start: float
    end: float


class TimedStage(NamedTuple):
    """start_s: seconds after the arrival"""

    name: str
    start_s: float
    seconds: float


class StageMarks:
    """The stages of the gateway in the order in which one request entered them, each from a moment on."""

    __slots__ = ("_clock", "entered")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.entered = [(ADMIT, clock())]

    def enter(self, name: str) -> None:
        self.entered.append((name, self._clock()))


def stages_of(entered: Sequence[tuple[str, float]], sequences: Sequence[Span], wall_s: float) -> tuple[TimedStage, ...]:
    """The stages of a request in order.

    entered    as `StageMarks` has them
    sequences  spans of all sequences, in any order
    """
    arrival = since = entered[0][1]
    spans: list[tuple[str, float, float]] = []
    current = ADMIT
    for name, at in (*entered[1:], ("", arrival + wall_s)):
        if current == ANSWER:
            within = [(each, max(begin, since), min(end, at)) for each, begin, end in flat(sequences) if begin < at and end > since]
            spans += within
            current, since = DELIVER, within[-1][2] if within else since
        if name != current:
            spans.append((current, since, at))
            current, since = name, at
    return tuple([TimedStage(name, start - arrival, end - start) for name, start, end in _joined(spans) if end - start >= LEAST_S])


def flat(spans: Sequence[Span]) -> Sequence[Span]:
    """Spans that may overlap as spans that do not: each moment has the span of the first name in PRECEDENCE."""
    if all(one[2] <= other[1] for one, other in pairwise(spans)):  # of one sequence
        return spans
    changes: list[tuple[float, int, int]] = []
    for name, start, end in spans:
        rank = PRECEDENCE.index(name)
        changes += [(start, rank, 1), (end, rank, -1)]
    changes.sort()
    made: list[Span] = []
    active = [0] * len(PRECEDENCE)
    since = 0.0
    for moment, rank, change in changes:
        if moment > since and any(active):
            made.append(Span(next(name for name, count in zip(PRECEDENCE, active, strict=True) if count), since, moment))
        active[rank] += change
        since = moment
    return _joined(made)


def _joined(spans: Iterable[tuple[str, float, float]]) -> list[Span]:
    """Neighbours of one name as one span."""
    made: list[Span] = []
    last_name, last_end = "", 0.0
    for name, start, end in spans:
        if name == last_name and start == last_end:
            made[-1] = Span(name, made[-1].start, end)
        else:
            made.append(Span(name, start, end))
        last_name, last_end = name, end
    return made
