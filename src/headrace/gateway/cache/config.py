"""Defines the options of the response cache."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    enabled: bool = option(False, "Answer equal deterministic requests from the response cache; a tenant's option `cache` counts more.")
    models: tuple[str, ...] = option((), "Names of the models whose answers are cached.", shown="all")
    ttl_s: float = option(3600.0, "Seconds that an answer is kept.", above=0.0)
