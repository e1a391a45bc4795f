"""Opens the stores of whole answers, each a part of its own: neither pushes out the other's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.clock import Clock
from headrace.gateway.cache.answer_cache import AnswerCache
from headrace.gateway.cache.replays import Replays
from headrace.gateway.config import GatewayConfig
from headrace.gateway.memory import TenantShare
from headrace.gateway.stores.guarded import GuardedStore
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
    config: GatewayConfig, share: TenantShare, metrics: Metrics, *, clock: Clock, unix_time: Clock
) -> AsyncIterator[AnswerCache]:
    """Raises ConfigError."""
    store = GuardedStore(open_answer_store(config, share, unix_time), "cached answers", clock)
    cache = AnswerCache(store, AnswerCacheMetrics(metrics.registry), unix_time, max_entry_bytes=config.cache.max_entry_bytes)
    try:
        yield cache
    finally:
        await cache.close()


@asynccontextmanager
async def open_replays(
    config: GatewayConfig, share: TenantShare, metrics: Metrics, *, clock: Clock, unix_time: Clock
) -> AsyncIterator[Replays]:
    """Raises ConfigError."""
    store = GuardedStore(open_replay_store(config, share, unix_time), "answers under an Idempotency-Key", clock)
    replays = Replays(store, ReplayMetrics(metrics.registry), limits=_replay_limits(config, share))
    try:
        yield replays
    finally:
        await replays.close()


def open_answer_store(config: GatewayConfig, share: TenantShare, unix_time: Clock) -> Store:
    """Raises ConfigError."""
    return open_part(ANSWERS, config.store, config.state, _answer_limits(config, share), unix_time)


def open_replay_store(config: GatewayConfig, share: TenantShare, unix_time: Clock) -> Store:
    """Raises ConfigError."""
    return open_part(REPLAYS, config.store, config.state, _replay_limits(config, share), unix_time)


def _answer_limits(config: GatewayConfig, share: TenantShare) -> StoreLimits:
    return StoreLimits(entry=config.cache.max_entry_bytes, total=config.cache.max_bytes, tenant_share=share)


def _replay_limits(config: GatewayConfig, share: TenantShare) -> StoreLimits:
    return StoreLimits(entry=config.idempotency.max_entry_bytes, total=config.idempotency.max_bytes, tenant_share=share)
