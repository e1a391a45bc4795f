"""Divides the time of a request into stages that do not overlap.

The gateway marks what it does: a mark ends the stage before it. While an answer is made, the stage is that of its sequences in their
engines, of which several may run at once. What neither covers belongs to no stage.
"""

from __future__ import annotations

from collections.abc import Iterable
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

CLOSE = "close"
"""After the last byte: limits are charged, a session is stored."""

PRECEDENCE = ("decode", "prefill", "stalled", "preempted", "queue", "resume", "route", "stream", "wait")
"""The first of the stages that sequences are in at one moment is the request's: as a whole it is as far as its furthest sequence."""

LEAST_S = 20e-6
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

    def stages(self, sequences: Iterable[Span], wall_s: float) -> tuple[TimedStage, ...]:
        """In order. sequences: spans of all sequences, in any order"""
        arrival = self.entered[0][1]
        ends = [at for _, at in self.entered[1:]] + [arrival + wall_s]
        spans: list[Span] = []
        for (name, start), end in zip(self.entered, ends, strict=True):
            if name != ANSWER:
                spans.append(Span(name, start, end))
                continue
            within = [Span(each, max(begin, start), min(until, end)) for each, begin, until in flat(sequences)]
            spans += [each for each in within if each.end > each.start]
            read = spans[-1].end if within else start
            if read < end:
                spans.append(Span(DELIVER, read, end))
        return tuple([TimedStage(name, start - arrival, end - start) for name, start, end in _joined(spans) if end - start >= LEAST_S])


def flat(spans: Iterable[Span]) -> list[Span]:
    """Spans that may overlap as spans that do not: each moment has the span of the first name in PRECEDENCE."""
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


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one name as one span."""
    made: list[Span] = []
    for span in spans:
        if made and made[-1].name == span.name and made[-1].end == span.start:
            made[-1] = Span(span.name, made[-1].start, span.end)
        else:
            made.append(span)
    return made
