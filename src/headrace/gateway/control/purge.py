"""Removes what stores keep of one tenant, whether a server runs on them or not: `headrace cache purge` and `DELETE /cache/TENANT`.

Not a lock: what runs meanwhile is kept when it ends. Whoever removes a tenant revokes its keys first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.gateway.access.administration import Administration
from headrace.gateway.cache.open import open_answer_store, open_replay_store
from headrace.gateway.config import GatewayConfig
from headrace.gateway.sessions.sessions import open_session_store
from headrace.gateway.site.memory import TenantShare
from headrace.gateway.stores.open import open_store
from headrace.gateway.stores.store import Store, StoreFailed


def _answers(config: GatewayConfig, share: TenantShare, unix_time: Clock) -> list[Callable[[], Store]]:
    """Open what a request could be answered from."""
    place = config.store, config.state, share, unix_time
    return [partial(open_answer_store, config.cache, *place), partial(open_replay_store, config.idempotency, *place)]


def _conversations(config: GatewayConfig, share: TenantShare, unix_time: Clock) -> list[Callable[[], Store]]:
    """Open what a request could be continued from."""
    place = config.store, config.state, share, unix_time
    return [partial(open_session_store, config.sessions, *place), partial(open_store, *place)]


async def purge(config: GatewayConfig, tenant: str, admin: Administration, unix_time: Clock, *, is_all: bool) -> int:
    """Remove all answers of a tenant, and record it. Returns the number of entries.

    tenant  its name, or the id that it had before it was removed (the audit record of its removal has it)
    is_all  sessions, and streams that could be continued, too

    Raises ConfigError, and StoreFailed where a part of them may be left.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeBody:
    """all: sessions, and streams that could be continued, too"""

    all: bool = False


class CacheRequests:
    """`DELETE /cache/TENANT` on the admin socket. A `fleet.admin.AdminRequests`."""

    def __init__(self, config: Callable[[], GatewayConfig], open_administration: Callable[[str], Administration], unix_time: Clock) -> None:
        """
        config               the one that holds now
        open_administration  for an actor; closed after each request
        """
        self._config = config
        self._open = open_administration
        self._unix_time = unix_time

    async def answer(
        self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, object], actor: str
    ) -> tuple[int, object] | None:
        """Status and JSON; None: no request of these. path: its parts"""
        if method != "DELETE" or len(path) != 2 or path[0] != "cache":
            return None
        try:
            is_all = decode(PurgeBody, body).all
            admin = self._open(f"{actor}, through the admin socket")
            try:
                return 200, {"removed": await purge(self._config(), path[1], admin, self._unix_time, is_all=is_all)}
            finally:
                await admin.close()
        except ConfigError as error:
            return 400, {"error": str(error)}
        except StoreFailed as error:
            return 503, {"error": str(error)}
