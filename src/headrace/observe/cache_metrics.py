"""Counts answers that were given again: from the response cache, and under an Idempotency-Key."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry

from headrace.observe.tally import CountCollector, OutcomeCounter


class CacheResult(StrEnum):
    """The result of the response cache for a request; also the value of the header x-headrace-cache."""

    HIT = "hit"
    MISS = "miss"
    OFF = "off"


class KeptAnswer(StrEnum):
    """The outcome for an answer that could be cached."""

    KEPT = "kept"
    TOO_LARGE = "too_large"
    FAILED = "failed"
    """The store was down or slow."""


class ReplayOutcome(StrEnum):
    """The outcome of a request with an Idempotency-Key."""

    FIRST = "first"
    REPLAYED = "replayed"
    RUNNING = "running"
    MISMATCH = "mismatch"
    TOO_LARGE = "too_large"
    """The first answer was too large to be kept."""
    FAILED = "failed"
    """The store was down or slow."""


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
