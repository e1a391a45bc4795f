"""Opens the stores of whole answers, each a part of its own: neither pushes out the other's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.core.clock import Clock
from headrace.gateway.access.administration import Administration
from headrace.gateway.cache.answer_cache import AnswerCache
from headrace.gateway.cache.replays import Replays
from headrace.gateway.config import GatewayConfig
from headrace.gateway.memory import TenantShare
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
async def open_answer_cache(config: GatewayConfig, share: TenantShare, metrics: Metrics, unix_time: Clock) -> AsyncIterator[AnswerCache]:
    """Raises ConfigError."""
    store = GuardedStore(open_part(ANSWERS, config.store, config.state, _answer_limits(config, share), unix_time), "cached answers")
    cache = AnswerCache(store, AnswerCacheMetrics(metrics.registry), unix_time, max_entry_bytes=config.cache.max_entry_bytes)
    try:
        yield cache
    finally:
        await cache.close()


@asynccontextmanager
async def open_replays(config: GatewayConfig, share: TenantShare, metrics: Metrics, unix_time: Clock) -> AsyncIterator[Replays]:
    """Raises ConfigError."""
    limits = _replay_limits(config, share)
    store = GuardedStore(open_part(REPLAYS, config.store, config.state, limits, unix_time), "answers under an Idempotency-Key")
    replays = Replays(store, ReplayMetrics(metrics.registry), limits=limits)
    try:
        yield replays
    finally:
        await replays.close()


async def purge_answers(config: GatewayConfig, tenant: str, admin: Administration, unix_time: Clock) -> int:
    """Remove all answers of a tenant, whether a server runs on these stores or not, and record it. Returns their number.

    tenant  its name, or the id that it had before it was removed (the audit record of its removal has it)

    Raises ConfigError, and StoreFailed where a part of them may be left.
    """
    num_removed, share = 0, TenantShare(config)
    names = await admin.tenant_keys(tenant)
    for part, limits in ((ANSWERS, _answer_limits(config, share)), (REPLAYS, _replay_limits(config, share))):
        store = open_part(part, config.store, config.state, limits, unix_time)
        try:
            num_removed += sum([await store.purge(name) for name in names])
        finally:
            await store.close()
    await admin.record("cache.purge", tenant, {"removed": num_removed})
    return num_removed


def _answer_limits(config: GatewayConfig, share: TenantShare) -> StoreLimits:
    return StoreLimits(entry=config.cache.max_entry_bytes, total=config.cache.max_bytes, tenant_share=share)


def _replay_limits(config: GatewayConfig, share: TenantShare) -> StoreLimits:
    return StoreLimits(entry=config.idempotency.max_entry_bytes, total=config.idempotency.max_bytes, tenant_share=share)
