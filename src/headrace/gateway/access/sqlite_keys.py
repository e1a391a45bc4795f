"""Keys and tenants in one SQLite file, which all processes of a machine share. A change is on the disk when `apply` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.gateway.access.key_store import AuditRecord, DirectoryChange, DirectoryState, KeyRecord, StoredKey, TenantRecord
from headrace.gateway.stores.sqlite_thread import SqliteForm, SqliteThread

T = TypeVar("T")

FILE = "keys.db"

KEYS = SqliteForm(
    version=1,
    synchronous="FULL",
    statements=(
        "CREATE TABLE directory (version INTEGER NOT NULL)",
        "INSERT INTO directory VALUES (0)",
        "CREATE TABLE keys (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, record BLOB NOT NULL)",
        "CREATE TABLE digests (sha256 TEXT PRIMARY KEY, key_id TEXT NOT NULL)",
        "CREATE TABLE tenants (name TEXT PRIMARY KEY, record BLOB NOT NULL)",
        "CREATE TABLE audit (number INTEGER PRIMARY KEY AUTOINCREMENT, record BLOB NOT NULL)",
    ),
)
FIND = (
    "SELECT keys.record, tenants.record FROM digests JOIN keys ON keys.id = digests.key_id JOIN tenants ON tenants.name = keys.tenant"
    " WHERE digests.sha256 = ?"
)


class SqliteKeys:
    """A `KeyStore`. Made by `open`."""

    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread
        self._connection = thread.connection
        self.progress = thread.progress

    @classmethod
    def open(cls, path: str) -> SqliteKeys:
        """Raises ConfigError."""
        return cls(SqliteThread.open(path, KEYS, where="state"))

    async def state(self) -> DirectoryState:
        return await self._read(lambda: DirectoryState(self._version(), bool(self._rows("SELECT 1 FROM keys LIMIT 1"))))

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        version, rows = await self._read(lambda: (self._version(), self._rows(FIND, sha256)))
        return version, StoredKey(_decoded(rows[0][0], KeyRecord), _decoded(rows[0][1], TenantRecord)) if rows else None

    async def key(self, key_id: str) -> KeyRecord | None:
        return next(iter(await self._records(KeyRecord, "SELECT record FROM keys WHERE id = ?", key_id)), None)

    async def keys(self) -> list[KeyRecord]:
        return await self._records(KeyRecord, "SELECT record FROM keys ORDER BY rowid")

    async def tenant(self, name: str) -> TenantRecord | None:
        return next(iter(await self._records(TenantRecord, "SELECT record FROM tenants WHERE name = ?", name)), None)

    async def tenants(self) -> list[TenantRecord]:
        return await self._records(TenantRecord, "SELECT record FROM tenants ORDER BY rowid")

    async def audit(self, limit: int) -> list[AuditRecord]:
        return await self._records(AuditRecord, "SELECT record FROM audit ORDER BY number DESC LIMIT ?", limit)

    async def apply(self, change: DirectoryChange) -> bool:
        return await self._thread.call(lambda: self._apply(change))

    async def close(self) -> None:
        await self._thread.close()

    async def _read(self, work: Callable[[], T]) -> T:
        return await self._thread.call(work, is_read=True)

    async def _records(self, kind: type[T], query: str, *parameters: str | int) -> list[T]:
        return [_decoded(record, kind) for (record,) in await self._read(lambda: self._rows(query, *parameters))]

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _rows(self, query: str, *parameters: str | int) -> list[tuple[bytes, ...]]:
        return self._connection.execute(query, parameters).fetchall()

    def _version(self) -> int:
        version: int = self._connection.execute("SELECT version FROM directory").fetchone()[0]
        return version

    def _apply(self, change: DirectoryChange) -> bool:
        if self._version() != change.expected:
            return False
        execute, encode = self._connection.execute, msgspec.json.encode
        execute("UPDATE directory SET version = ?", (change.version,))
        for digest in change.removed_digests:
            execute("DELETE FROM digests WHERE sha256 = ?", (digest,))
        for key in change.keys:
            row = (key.id, key.tenant, encode(key))
            execute("INSERT INTO keys VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record", row)
            for digest in key.digests:
                execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (digest, key.id))
        for name in change.removed_tenants:
            execute("DELETE FROM tenants WHERE name = ?", (name,))
        for tenant in change.tenants:
            named = (tenant.name, encode(tenant))
            execute("INSERT INTO tenants VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET record = excluded.record", named)
        execute("INSERT INTO audit (record) VALUES (?)", (encode(change.audit),))
        return True


def _decoded(record: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(record, type=kind)
