"""Divides the time of a request into stages that do not overlap.

The gateway marks what it does: a mark ends the stage before it. While an answer is made, the stage is that of its sequences in their
engines, of which several may run at once. What neither covers belongs to no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ANSWER = "answer"
"""The gateway's stage that is divided further, by the spans of the sequences."""

DELIVER = "deliver"
"""From the last output that the gateway read to the last byte that it wrote."""

PRECEDENCE = ("decode", "prefill", "stalled", "preempted", "queue", "resume", "route", "stream", "wait")
"""The first of the stages that sequences are in at one moment is the request's: as a whole it is as far as its furthest sequence."""

LEAST_S = 20e-6
"""A shorter piece is left out, so that a request has as many rows as a person can read."""


class Span(NamedTuple):
    """Times on the gateway's clock."""

    name: str
    start: float
    end: float


class Stage(NamedTuple):
    """start_s: seconds after the arrival"""

    name: str
    start_s: float
    seconds: float


class Marks:
    """Append-only: the stages of the gateway in the order in which they were entered, each from a moment on."""

    __slots__ = ("entered",)

    def __init__(self, name: str, at: float) -> None:
        self.entered = [(name, at)]

    @property
    def current(self) -> str:
        return self.entered[-1][0]

    def enter(self, name: str, at: float) -> None:
        self.entered.append((name, at))

    def spans(self, end: float) -> list[Span]:
        ends = [at for _, at in self.entered[1:]] + [end]
        return [Span(name, start, until) for (name, start), until in zip(self.entered, ends, strict=True)]


def stages(marks: Marks, sequences: Iterable[Sequence[Span]], last_read: float | None, arrival: float, end: float) -> list[Stage]:
    """The stages of a request in order.

    sequences  spans of each sequence, in any order
    last_read  when the gateway read the last output; None: it read none
    """
    spans: list[Span] = []
    inner = flat([span for spans_of_one in sequences for span in spans_of_one])
    for span in marks.spans(end):
        if span.name != ANSWER:
            spans.append(span)
            continue
        within = [Span(name, max(start, span.start), min(until, span.end)) for name, start, until in inner]
        spans += [each for each in within if each.end > each.start]
        read = span.start if last_read is None else max(last_read, spans[-1].end if spans else span.start)
        if last_read is not None and read < span.end:
            spans.append(Span(DELIVER, read, span.end))
    return [Stage(name, start - arrival, until - start) for name, start, until in _joined(spans) if until - start >= LEAST_S]


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
