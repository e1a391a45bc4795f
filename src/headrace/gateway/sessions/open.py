"""The sessions of a gateway, from its configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.core.clock import Clock
from headrace.gateway.config import GatewayConfig
from headrace.gateway.sessions.sessions import Sessions
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
    config: GatewayConfig, tenant_share: Callable[[], float], metrics: SessionMetrics, *, clock: Clock, unix_time: Clock
) -> AsyncIterator[Sessions]:
    """Sessions in the file NAME.db of the state folder, or at `store.url`.

    tenant_share  part of all bytes that one tenant may fill

    Raises ConfigError.
    """
    own = config.sessions
    store = GuardedStore(open_session_store(config, tenant_share, unix_time), NAME, clock) if own.ttl_s else None
    sessions = Sessions(store, own, metrics=metrics, unix_time=unix_time)
    try:
        yield sessions
    finally:
        await sessions.close()


def open_session_store(config: GatewayConfig, tenant_share: Callable[[], float], unix_time: Clock) -> Store:
    """Raises ConfigError."""
    own = config.sessions
    limits = StoreLimits(entry=ENTRY_MARGIN * own.max_session_bytes, total=own.max_bytes, tenant_share=tenant_share)
    return open_part(NAME, config.store, config.state, limits, unix_time)
