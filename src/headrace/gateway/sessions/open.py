"""The sessions of a gateway, from its configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.core.clock import Clock
from headrace.gateway.sessions.config import SessionConfig
from headrace.gateway.sessions.sessions import Sessions
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.guarded import GuardedStore
from headrace.gateway.stores.open import open_part
from headrace.gateway.stores.store import Store, StoreLimits
from headrace.observe.session_metrics import SessionMetrics

NAME = "sessions"
"""Name of their part of the store."""

ENTRY_MARGIN = 2
"""An entry may have N times the bytes of a session's messages: the answer of its last turn is not counted before it is given."""


@asynccontextmanager
async def open_sessions(
    config: SessionConfig,
    stores: StoreConfig,
    state: str,
    tenant_share: Callable[[], float],
    metrics: SessionMetrics,
    *,
    clock: Clock,
    unix_time: Clock,
) -> AsyncIterator[Sessions]:
    """Sessions in the file NAME.db of the state folder, or at `store.url`.

    tenant_share  part of all bytes that one tenant may fill

    Raises ConfigError.
    """
    store = GuardedStore(open_session_store(config, stores, state, tenant_share, unix_time), NAME, clock) if config.ttl_s else None
    sessions = Sessions(store, config, metrics=metrics, unix_time=unix_time)
    try:
        yield sessions
    finally:
        await sessions.close()


def open_session_store(
    config: SessionConfig, stores: StoreConfig, state: str, tenant_share: Callable[[], float], unix_time: Clock
) -> Store:
    """Raises ConfigError."""
    limits = StoreLimits(entry=ENTRY_MARGIN * config.max_session_bytes, total=config.max_bytes, tenant_share=tenant_share)
    return open_part(NAME, stores, state, limits, unix_time)
