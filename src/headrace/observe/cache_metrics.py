"""Counts of answers that were given again: by the response cache, and under an Idempotency-Key."""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter

from headrace.observe.tally import CountCollector


class CacheResult(StrEnum):
    """What the response cache did for a request; also the value of the header x-headrace-cache."""

    HIT = "hit"
    MISS = "miss"
    OFF = "off"


class KeptAnswer(StrEnum):
    """What became of an answer that could be cached."""

    KEPT = "kept"
    TOO_LARGE = "too_large"
    FAILED = "failed"
    """The store was down or slow."""


class ReplayOutcome(StrEnum):
    """What became of a request with an Idempotency-Key."""

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
        requests = CountCollector("headrace_cache_requests", "Generating requests, by what the response cache did.", ("result",))
        registry.register(requests)
        answers = Counter(
            "headrace_cache_answers", "Whole answers that could be cached, by what became of them.", ("outcome",), registry=registry
        )
        self._failed = Counter("headrace_cache_lookup_failures", "Look-ups in a response cache that was down or slow.", registry=registry)
        self._requests = {result: requests.labels(result.value) for result in CacheResult}
        self._answers = {outcome: answers.labels(outcome.value) for outcome in KeptAnswer}

    def request(self, result: CacheResult) -> None:
        self._requests[result].inc()

    def kept(self, outcome: KeptAnswer) -> None:
        self._answers[outcome].inc()

    def lookup_failed(self) -> None:
        self._failed.inc()


class ReplayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        replays = Counter("headrace_idempotent_requests", "Requests with an Idempotency-Key, by outcome.", ("outcome",), registry=registry)
        self._outcomes = {outcome: replays.labels(outcome.value) for outcome in ReplayOutcome}

    def count(self, outcome: ReplayOutcome) -> None:
        self._outcomes[outcome].inc()
