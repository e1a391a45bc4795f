"""Counts what became of answers, turns and streams that stores keep. FAILED: the store was down or slow"""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry

from headrace.observe.tally import CountCollector, OutcomeCounter


class CacheResult(StrEnum):
    """Also the value of the header x-headrace-cache."""

    HIT = "hit"
    MISS = "miss"
    OFF = "off"


class KeptAnswer(StrEnum):
    KEPT = "kept"
    TOO_LARGE = "too_large"
    FAILED = "failed"


class ReplayOutcome(StrEnum):
    FIRST = "first"
    REPLAYED = "replayed"
    RUNNING = "running"
    MISMATCH = "mismatch"
    TOO_LARGE = "too_large"
    FAILED = "failed"


class AnswerCacheMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.request = OutcomeCounter(
            registry, "headrace_cache_requests", "Generating requests, by what the response cache did.", CacheResult, "result"
        )
        self.kept = OutcomeCounter(
            registry, "headrace_cache_answers", "Whole answers that could be cached, by what became of them.", KeptAnswer
        )
        failures = CountCollector("headrace_cache_lookup_failures", "Look-ups in a response cache that was down or slow.")
        registry.register(failures)
        self.lookup_failed = failures.labels().inc


class ReplayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.count = OutcomeCounter(
            registry, "headrace_idempotent_requests", "Requests with an Idempotency-Key, by outcome.", ReplayOutcome
        )


class TurnOutcome(StrEnum):
    KEPT = "kept"
    CONFLICT = "conflict"
    """Another request of the session was first."""
    TOO_LARGE = "too_large"
    FAILED = "failed"


class SessionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.turns = OutcomeCounter(registry, "headrace_session_turns", "Turns of sessions by what became of them.", TurnOutcome)


class KeepOutcome(StrEnum):
    KEPT = "kept"
    TOO_LARGE = "too_large"
    DROPPED = "dropped"
    FAILED = "failed"


class ContinueOutcome(StrEnum):
    CONTINUED = "continued"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    """Another request continues the stream."""
    REFUSED = "refused"
    """The request has another body, or the event is not of this stream."""
    FAILED = "failed"


class ResumeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.kept = OutcomeCounter(
            registry, "headrace_streams_kept", "Event streams at their end, for their clients to continue.", KeepOutcome
        )
        self.continued = OutcomeCounter(registry, "headrace_streams_continued", "Requests that continue an event stream.", ContinueOutcome)
