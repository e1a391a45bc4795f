"""Removes what stores keep of one tenant, whether a server runs on them or not: `headrace cache purge` and `DELETE /cache/TENANT`.

Not a lock: what runs meanwhile is kept when it ends. Whoever removes a tenant revokes its keys first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headrace.core.clock import Clock
from headrace.gateway.access.administration import Administration
from headrace.gateway.cache.open import open_answer_store, open_replay_store
from headrace.gateway.config import GatewayConfig
from headrace.gateway.sessions.open import open_session_store
from headrace.gateway.site.memory import TenantShare
from headrace.gateway.stores.open import open_store
from headrace.gateway.stores.store import Store


def _answers(config: GatewayConfig, share: TenantShare, unix_time: Clock) -> list[Callable[[], Store]]:
    """Open what a request could be answered from."""
    place = config.store, config.state, share, unix_time
    return [partial(open_answer_store, config.cache, *place), partial(open_replay_store, config.idempotency, *place)]


def _conversations(config: GatewayConfig, share: TenantShare, unix_time: Clock) -> list[Callable[[], Store]]:
    """Open what a request could be continued from."""
    place = config.store, config.state, share, unix_time
    return [partial(open_session_store, config.sessions, *place), partial(open_store, *place)]


async def purge_answers(config: GatewayConfig, tenant: str, admin: Administration, unix_time: Clock) -> int:
    """Remove all answers of a tenant, and record it. Returns their number. Parameters and errors as of `purge_all`."""
    return await _purge(config, tenant, admin, unix_time, is_all=False)


async def purge_all(config: GatewayConfig, tenant: str, admin: Administration, unix_time: Clock) -> int:
    """Remove all answers, sessions and streams that could be continued of a tenant, and record it. Returns the number of entries.

    tenant  its name, or the id that it had before it was removed (the audit record of its removal has it)

    Raises ConfigError, and StoreFailed where a part of them may be left.
    """
    return await _purge(config, tenant, admin, unix_time, is_all=True)


async def _purge(config: GatewayConfig, tenant: str, admin: Administration, unix_time: Clock, *, is_all: bool) -> int:
    num_removed, share = 0, TenantShare(config)
    names = await admin.tenant_keys(tenant)
    openers = _answers(config, share, unix_time) + (_conversations(config, share, unix_time) if is_all else [])
    for opened in openers:
        store = opened()
        try:
            num_removed += sum([await store.purge(name) for name in names])
        finally:
            await store.close()
    await admin.record("cache.purge", tenant, {"removed": num_removed, **({"all": True} if is_all else {})})
    return num_removed
