"""Opens the stores of whole answers, each a part of its own: neither pushes out the other's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.clock import Clock
from headrace.gateway.cache.answer_cache import AnswerCache
from headrace.gateway.cache.replays import Replays
from headrace.gateway.config import GatewayConfig
from headrace.gateway.memory import tenant_share
from headrace.gateway.stores.guarded import GuardedStore
from headrace.gateway.stores.open import open_part
from headrace.gateway.stores.store import StoreLimits
from headrace.observe.cache_metrics import AnswerCacheMetrics, ReplayMetrics
from headrace.observe.metrics import Metrics

ANSWERS = "answers"
"""The part with cached answers."""

REPLAYS = "replays"
"""The part with answers under an Idempotency-Key."""


@asynccontextmanager
async def open_answer_cache(config: GatewayConfig, metrics: Metrics, unix_time: Clock) -> AsyncIterator[AnswerCache]:
    """Raises ConfigError."""
    store = GuardedStore(open_part(ANSWERS, config.store, config.state, _answer_limits(config), unix_time), "cached answers")
    cache = AnswerCache(store, AnswerCacheMetrics(metrics.registry), unix_time, max_entry_bytes=config.cache.max_entry_bytes)
    try:
        yield cache
    finally:
        await cache.close()


@asynccontextmanager
async def open_replays(config: GatewayConfig, metrics: Metrics, unix_time: Clock) -> AsyncIterator[Replays]:
    """Raises ConfigError."""
    limits = _replay_limits(config)
    store = GuardedStore(open_part(REPLAYS, config.store, config.state, limits, unix_time), "answers under an Idempotency-Key")
    replays = Replays(store, ReplayMetrics(metrics.registry), max_entry_bytes=min(limits.entry, limits.tenant))
    try:
        yield replays
    finally:
        await replays.close()


async def purge_answers(config: GatewayConfig, tenant: str, unix_time: Clock) -> int:
    """Remove all answers of a tenant, whether a server runs on these stores or not. Returns their number.

    Raises ConfigError, and StoreFailed where a part of them may be left.
    """
    num_removed = 0
    for part, limits in ((ANSWERS, _answer_limits(config)), (REPLAYS, _replay_limits(config))):
        store = open_part(part, config.store, config.state, limits, unix_time)
        try:
            num_removed += await store.purge(tenant)
        finally:
            await store.close()
    return num_removed


def _answer_limits(config: GatewayConfig) -> StoreLimits:
    return _limits(config, config.cache.max_bytes, config.cache.max_entry_bytes)


def _replay_limits(config: GatewayConfig) -> StoreLimits:
    return _limits(config, config.idempotency.max_bytes, config.idempotency.max_entry_bytes)


def _limits(config: GatewayConfig, max_bytes: int, max_entry_bytes: int) -> StoreLimits:
    return StoreLimits(entry=max_entry_bytes, tenant=int(max_bytes * tenant_share(config)), total=max_bytes)
