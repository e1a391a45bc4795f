"""Stores entries in one SQLite file, which all processes of a machine share, or in memory. Nothing is synced to the disk: entries need to
survive this process, not the machine.
"""

from __future__ import annotations

from typing import Any

from headrace.core.clock import Clock
from headrace.gateway.stores.sqlite_thread import MAX_BATCH, SqliteForm, SqliteThread, open_sqlite
from headrace.gateway.stores.store import StoreLimits

ENTRY_BYTES, KEY_COPIES = 500, 2
"""Overhead of an entry: bytes, and copies of its key. Files of 20,000 entries had 130 to 580 bytes."""

BY_TENANT = "SELECT tenant, sum(size) FROM entries"

ENTRIES = SqliteForm(
    version=2,
    synchronous="OFF",
    statements=(
        "CREATE TABLE entries"
        " (key TEXT PRIMARY KEY, tenant TEXT NOT NULL, size INTEGER NOT NULL, expires_at REAL NOT NULL, value BLOB NOT NULL)",
        "CREATE INDEX entries_by_age ON entries (expires_at)",
        "CREATE INDEX entries_by_tenant ON entries (tenant)",
        "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, size INTEGER NOT NULL)",
        "CREATE TRIGGER entry_added AFTER INSERT ON entries WHEN NEW.size > 0 BEGIN"
        " INSERT INTO tenants VALUES (NEW.tenant, NEW.size) ON CONFLICT (tenant) DO UPDATE SET size = size + NEW.size; END",
        "CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN"
        " UPDATE tenants SET size = size - OLD.size WHERE tenant = OLD.tenant;"
        " DELETE FROM tenants WHERE tenant = OLD.tenant AND size = 0; END",
    ),
)


class SqliteStore:
    def __init__(self, path: str, limits: StoreLimits, unix_time: Clock) -> None:
        """Raises ConfigError."""
        self._limits = limits
        self._unix_time = unix_time
        self._thread = SqliteThread(open_sqlite(path, ENTRIES), begin_write=self._remove_expired)
        self._connection = self._thread.connection
        self.progress = self._thread.progress

    async def put(self, key: str, value: bytes, *, tenant: str, ttl_s: float) -> None:
        self._limits.check(len(value), _size(key, value))
        await self._thread.call(lambda: self._put(key, value, tenant, ttl_s))

    async def get(self, key: str) -> bytes | None:
        return await self._thread.call(lambda: self._get(key), is_read=True)

    async def swap(self, key: str, value: bytes, *, expected: bytes | None, tenant: str, ttl_s: float) -> bool:
        self._limits.check(len(value), _size(key, value))
        return await self._thread.call(lambda: self._swap(key, value, expected, tenant, ttl_s))

    async def delete(self, key: str, *, expected: bytes | None = None) -> None:
        await self._thread.call(lambda: self._delete(key, expected))

    async def purge(self, tenant: str) -> int:
        num_removed = 0
        while count := await self._thread.call(lambda: self._remove_some("tenant = ?", tenant)):
            num_removed += count
        return num_removed

    async def check(self) -> None:
        queries = f"{BY_TENANT} GROUP BY tenant", "SELECT tenant, size FROM tenants"
        sizes, sums = await self._thread.call(lambda: [self._rows(query) for query in queries])
        by_tenant = {tenant: size for tenant, size in sizes if size}
        assert by_tenant == dict(sums), "each tenant's sum is of its entries"
        assert all(size <= self._limits.tenant for size in by_tenant.values())
        assert sum(by_tenant.values()) <= self._limits.total

    async def num_entries(self) -> int:
        return len(await self._thread.call(lambda: self._rows("SELECT key FROM entries")))

    async def close(self) -> None:
        await self._thread.close()

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(query).fetchall()

    def _put(self, key: str, value: bytes, tenant: str, ttl_s: float) -> None:
        self._delete(key)
        size, limits = _size(key, value), self._limits
        self._make_room("SELECT size FROM tenants WHERE tenant = ?", (tenant,), limits.tenant - size, tenant=tenant)
        self._make_room("SELECT sum(size) FROM tenants", (), limits.total - size)
        row = (key, tenant, size, self._unix_time() + ttl_s, value)
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", row)

    def _make_room(self, held: str, parameters: tuple[str, ...], limit: int, *, tenant: str | None = None) -> None:
        """Remove the oldest entries by rowid, which each write raises, until the bytes from the query `held` are within the limit."""
        where = "" if tenant is None else "WHERE tenant = ? "
        oldest = f"DELETE FROM entries WHERE rowid = (SELECT rowid FROM entries {where}ORDER BY rowid LIMIT 1)"
        while ((self._connection.execute(held, parameters).fetchone() or (0,))[0] or 0) > limit:
            self._connection.execute(oldest, () if tenant is None else (tenant,))

    def _get(self, key: str) -> bytes | None:
        row = self._connection.execute("SELECT value FROM entries WHERE key = ? AND expires_at > ?", (key, self._unix_time())).fetchone()
        return None if row is None else bytes(row[0])

    def _swap(self, key: str, value: bytes, expected: bytes | None, tenant: str, ttl_s: float) -> bool:
        is_expected = self._get(key) == expected
        if is_expected:
            self._put(key, value, tenant, ttl_s)
        return is_expected

    def _delete(self, key: str, expected: bytes | None = None) -> None:
        if expected is None or self._get(key) == expected:
            self._connection.execute("DELETE FROM entries WHERE key = ?", (key,))

    def _remove_expired(self) -> None:
        self._remove_some("expires_at <= ? ORDER BY expires_at", self._unix_time())

    def _remove_some(self, which: str, value: float | str) -> int:
        rows = f"SELECT rowid FROM entries WHERE {which} LIMIT {MAX_BATCH}"
        return self._connection.execute(f"DELETE FROM entries WHERE rowid IN ({rows})", (value,)).rowcount


def _size(key: str, value: bytes) -> int:
    return ENTRY_BYTES + KEY_COPIES * len(key.encode()) + len(value)
