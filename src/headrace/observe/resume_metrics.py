"""Counts streams that are kept for their clients to continue, and requests that continue one."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry

from headrace.observe.tally import OutcomeCounter


class KeepOutcome(StrEnum):
    """The outcome of keeping a stream."""

    KEPT = "kept"
    TOO_LARGE = "too_large"
    DROPPED = "dropped"
    """Too much was waiting to be written."""
    FAILED = "failed"
    """The store was down or slow."""


class ContinueOutcome(StrEnum):
    """The outcome of a request with Last-Event-ID."""

    CONTINUED = "continued"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    """Another request continues the stream."""
    REFUSED = "refused"
    """The request has another body, or the event is not of this stream."""
    FAILED = "failed"
    """The store was down or slow."""


class ResumeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.kept = OutcomeCounter(
            registry, "headrace_streams_kept", "Event streams at their end, for their clients to continue.", KeepOutcome
        )
        self.continued = OutcomeCounter(registry, "headrace_streams_continued", "Requests that continue an event stream.", ContinueOutcome)
