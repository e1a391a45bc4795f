"""Keeps keys and tenants in a SQLite file, which all processes of a machine share. A change is on the disk when `apply` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from headrace.gateway.access.key_records import AuditRecord, DirectoryChange, DirectoryState, KeyRecord, R, StoredKey, TenantRecord, decoded
from headrace.gateway.stores.sqlite_thread import SqliteForm, SqliteThread, open_sqlite

T = TypeVar("T")

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
TABLES: Mapping[type, tuple[str, str]] = {KeyRecord: ("keys", "id"), TenantRecord: ("tenants", "name")}
"""Kind of record -> its table and the column that names it."""

FIND_ROW = (
    "SELECT keys.record, tenants.record FROM digests JOIN keys ON keys.id = digests.key_id JOIN tenants ON tenants.name = keys.tenant"
    " WHERE digests.sha256 = ?"
)


class SqliteKeys:
    """A `KeyStore`."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._thread = SqliteThread(open_sqlite(path, KEYS))
        self._connection = self._thread.connection
        self.progress = self._thread.progress

    async def state(self) -> DirectoryState:
        return await self._read(lambda: DirectoryState(self._version(), bool(self._rows("SELECT 1 FROM keys LIMIT 1"))))

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        version, rows = await self._read(lambda: (self._version(), self._rows(FIND_ROW, sha256)))
        return version, StoredKey(decoded(rows[0][0], KeyRecord), decoded(rows[0][1], TenantRecord)) if rows else None

    async def record(self, kind: type[R], name: str) -> R | None:
        table, column = TABLES[kind]
        return next(iter(await self._records(kind, f"SELECT record FROM {table} WHERE {column} = ?", name)), None)

    async def records(self, kind: type[R]) -> list[R]:
        return await self._records(kind, f"SELECT record FROM {TABLES[kind][0]} ORDER BY rowid")

    async def audit(self, limit: int) -> list[AuditRecord]:
        return await self._records(AuditRecord, "SELECT record FROM audit ORDER BY number DESC LIMIT ?", limit)

    async def apply(self, change: DirectoryChange, *, expected: int, version: int) -> bool:
        return await self._thread.call(lambda: self._apply(change, expected, version))

    async def close(self) -> None:
        await self._thread.close()

    async def _read(self, work: Callable[[], T]) -> T:
        return await self._thread.call(work, is_read=True)

    async def _records(self, kind: type[T], query: str, *parameters: str | int) -> list[T]:
        return [decoded(record, kind) for (record,) in await self._read(lambda: self._rows(query, *parameters))]

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _rows(self, query: str, *parameters: str | int) -> list[tuple[bytes, ...]]:
        return self._connection.execute(query, parameters).fetchall()

    def _version(self) -> int:
        version: int = self._connection.execute("SELECT version FROM directory").fetchone()[0]
        return version

    def _apply(self, change: DirectoryChange, expected: int, version: int) -> bool:
        if self._version() != expected:
            return False
        execute, encode = self._connection.execute, msgspec.json.encode
        execute("UPDATE directory SET version = ?", (version,))
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
