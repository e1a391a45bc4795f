"""Counts of streams that are kept for their clients to continue, and of requests that continue one."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter


class KeepOutcome(StrEnum):
    """What became of a stream that could be kept."""

    KEPT = "kept"
    TOO_LARGE = "too_large"
    DROPPED = "dropped"
    """Too much waited to be written."""
    FAILED = "failed"
    """The store was down or slow."""


class ContinueOutcome(StrEnum):
    """What became of a request with Last-Event-ID."""

    CONTINUED = "continued"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    """Another request continues the stream."""
    REFUSED = "refused"
    """Its body is another one, or the event is not of this stream."""
    FAILED = "failed"
    """The store was down or slow."""


class ResumeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._kept = Counter(
            "headrace_streams_kept", "Event streams at their end, for their clients to continue.", ("outcome",), registry=registry
        )
        self._continued = Counter("headrace_streams_continued", "Requests that continue an event stream.", ("outcome",), registry=registry)
        for keep in KeepOutcome:
            self._kept.labels(keep.value)
        for outcome in ContinueOutcome:
            self._continued.labels(outcome.value)

    def kept(self, outcome: KeepOutcome) -> None:
        self._kept.labels(outcome.value).inc()

    def continued(self, outcome: ContinueOutcome) -> None:
        self._continued.labels(outcome.value).inc()
