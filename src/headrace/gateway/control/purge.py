"""Removes one tenant's entries from the stores; no server need run. A running request still writes its entry when it ends, so the keys of a
removed tenant must be revoked before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.strict_decode import decode
from headrace.gateway.access.admin_requests import AdminCall, Handlers
from headrace.gateway.access.administration import Administration
from headrace.gateway.cache.answer_cache import open_answer_store
from headrace.gateway.cache.replays import open_replay_store
from headrace.gateway.sessions.sessions import open_session_store
from headrace.gateway.stores.config import StoreConfig, Stores
from headrace.gateway.stores.store import Store


class StoreSections(Protocol):
    @property
    def store(self) -> StoreConfig: ...
    @property
    def state(self) -> str: ...


async def purge(config: StoreSections, tenant: str, admin: Administration, unix_time: Clock, *, is_all: bool) -> int:
    """tenant: for a removed tenant its id, which the audit record of the removal has; is_all: sessions and resumable streams, too. Raises
    ConfigError, and StoreFailed, after which some entries may be left.
    """
    stores = Stores(config.store, config.state, lambda: 1.0, unix_time)  # nothing is written, so no share is asked for
    num_removed = 0
    names = await admin.tenant_keys(tenant)
    answers: list[Callable[[], Store]] = [partial(open_answer_store, stores), partial(open_replay_store, stores)]
    conversations: list[Callable[[], Store]] = [partial(open_session_store, stores), stores.open_streams]
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
    all: bool = False


def cache_requests(config: Callable[[], StoreSections], unix_time: Clock) -> Handlers:
    async def remove(call: AdminCall) -> object:
        is_all = decode(PurgeBody, call.body).all
        return {"removed": await purge(config(), call.name, call.admin, unix_time, is_all=is_all)}

    return {("DELETE", "cache", "NAME"): remove}
