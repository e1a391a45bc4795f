"""Opens the stores of whole answers, each a part of its own: neither pushes out the other's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.core.clock import Clock
from headrace.gateway.cache.answer_cache import AnswerCache
from headrace.gateway.cache.config import CacheConfig, IdempotencyConfig
from headrace.gateway.cache.replays import Replays
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.guard import GuardedStore
from headrace.gateway.stores.open import open_part
from headrace.gateway.stores.store import Store, StoreLimits
from headrace.observe.cache_metrics import AnswerCacheMetrics, ReplayMetrics
from headrace.observe.metrics import Metrics

ANSWERS = "answers"
"""The part with cached answers."""

REPLAYS = "replays"
"""The part with answers under an Idempotency-Key."""


@asynccontextmanager
async def open_answer_cache(
    config: CacheConfig, stores: StoreConfig, state: str, share: Callable[[], float], metrics: Metrics, *, clock: Clock, unix_time: Clock
) -> AsyncIterator[AnswerCache]:
    """Raises ConfigError."""
    store = GuardedStore(open_answer_store(config, stores, state, share, unix_time), "cached answers", clock)
    cache = AnswerCache(store, AnswerCacheMetrics(metrics.registry), unix_time, max_entry_bytes=config.max_entry_bytes)
    try:
        yield cache
    finally:
        await cache.close()


@asynccontextmanager
async def open_replays(
    config: IdempotencyConfig,
    stores: StoreConfig,
    state: str,
    share: Callable[[], float],
    metrics: Metrics,
    *,
    clock: Clock,
    unix_time: Clock,
) -> AsyncIterator[Replays]:
    """Raises ConfigError."""
    store = GuardedStore(open_replay_store(config, stores, state, share, unix_time), "answers under an Idempotency-Key", clock)
    replays = Replays(store, ReplayMetrics(metrics.registry), limits=_limits(config, share))
    try:
        yield replays
    finally:
        await replays.close()


def open_answer_store(config: CacheConfig, stores: StoreConfig, state: str, share: Callable[[], float], unix_time: Clock) -> Store:
    """Raises ConfigError."""
    return open_part(ANSWERS, stores, state, _limits(config, share), unix_time)


def open_replay_store(config: IdempotencyConfig, stores: StoreConfig, state: str, share: Callable[[], float], unix_time: Clock) -> Store:
    """Raises ConfigError."""
    return open_part(REPLAYS, stores, state, _limits(config, share), unix_time)


def _limits(config: CacheConfig | IdempotencyConfig, share: Callable[[], float]) -> StoreLimits:
    return StoreLimits(entry=config.max_entry_bytes, total=config.max_bytes, tenant_share=share)
