"""Defines the options of the response cache and of the answers that are kept for an Idempotency-Key."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The response cache."""

    enabled: bool = option(False, "Answer equal deterministic requests from the response cache; a tenant's option `cache` counts more.")
    models: tuple[str, ...] = option((), "Names of the models whose answers are cached.", shown="all")
    ttl_s: float = option(3600.0, "Seconds that an answer is kept.", above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyConfig:
    """Answers to requests with an Idempotency-Key."""

    ttl_s: float = option(
        86400.0, "Seconds that the answer to a request with an `Idempotency-Key` is kept for retries; 0: the header has no effect.", low=0.0
    )
