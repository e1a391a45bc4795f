"""Removes what stores keep of one tenant, whether a server runs on them or not: `headrace cache purge` and `DELETE /cache/TENANT`.

Not a lock: what runs meanwhile is kept when it ends. Whoever removes a tenant revokes its keys first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.core.clock import Clock
from headrace.core.strict_decode import decode
from headrace.gateway.access.admin_requests import answered
from headrace.gateway.access.administration import Administration
from headrace.gateway.cache.answer_cache import open_answer_store
from headrace.gateway.cache.replays import open_replay_store
from headrace.gateway.config import GatewayConfig
from headrace.gateway.sessions.sessions import open_session_store
from headrace.gateway.site.memory import TenantShare
from headrace.gateway.stores.open import Stores
from headrace.gateway.stores.store import Store


async def purge(config: GatewayConfig, tenant: str, admin: Administration, unix_time: Clock, *, is_all: bool) -> int:
    """Remove all answers of a tenant, and record it. Returns the number of entries.

    tenant  its name, or the id that it had before it was removed (the audit record of its removal has it)
    is_all  sessions, and streams that could be continued, too

    Raises ConfigError, and StoreFailed where a part of them may be left.
    """
    num_removed, stores = 0, Stores(config.store, config.state, TenantShare(config), unix_time)
    names = await admin.tenant_keys(tenant)
    answers: list[Callable[[], Store]] = [
        partial(open_answer_store, config.cache, stores),
        partial(open_replay_store, config.idempotency, stores),
    ]
    conversations: list[Callable[[], Store]] = [partial(open_session_store, config.sessions, stores), stores.open_streams]
    for open_part in answers + (conversations if is_all else []):
        store = open_part()
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
        return await answered(lambda: self._purge(path[1], body, actor))

    async def _purge(self, tenant: str, body: Mapping[str, object], actor: str) -> object:
        is_all = decode(PurgeBody, body).all
        admin = self._open(f"{actor}, through the admin socket")
        try:
            return {"removed": await purge(self._config(), tenant, admin, self._unix_time, is_all=is_all)}
        finally:
            await admin.close()
