"""Defines the protocol of a store of keys and tenants, which gateways read and administration changes.

A store is a directory of small records (`access.key_records`) with one version. Every change names the version that it was decided on, and
is refused if the directory has changed since. So the rules are written once (`access.administration`) for both stores: `access.sqlite_keys`
for one machine, `access.redis_keys` for several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from headrace.gateway.access.key_records import AuditRecord, DirectoryChange, DirectoryState, R, StoredKey
from headrace.gateway.access.redis_keys import RedisKeys
from headrace.gateway.access.sqlite_keys import SqliteKeys
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.redis import open_redis
from headrace.gateway.stores.store import StoreProgress


class KeyStore(Protocol):
    """Every method raises StoreFailed."""

    progress: StoreProgress

    async def state(self) -> DirectoryState: ...

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        """The directory's version, and the key with this digest in that version; None: it has no such key."""
        ...

    async def record(self, kind: type[R], name: str) -> R | None:
        """The record of a key by its id, or of a tenant by its name."""
        ...

    async def records(self, kind: type[R]) -> list[R]:
        """All records of a kind, oldest first."""
        ...

    async def audit(self, limit: int) -> list[AuditRecord]:
        """The newest changes, newest first."""
        ...

    async def apply(self, change: DirectoryChange, *, expected: int, version: int) -> bool:
        """Write the whole change. False: nothing was written, because the directory has another version than expected.

        expected  version of the directory that the change was decided on
        version   the directory's version after the change; the same as before for an audit record alone
        """
        ...

    async def close(self) -> None: ...


FILE = "keys.db"


def open_keys(state: str, store: StoreConfig) -> KeyStore | None:
    """
    state  existing folder of the embedded stores; empty: None is returned, for a gateway with only the keys of its configuration
    store  takes the place of the file where it has a url

    Raises ConfigError.
    """
    if store.url:
        return RedisKeys(open_redis(store.url, password=store.password()))
    return SqliteKeys(str(Path(state) / FILE)) if state else None
