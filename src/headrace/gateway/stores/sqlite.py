"""A store in one SQLite file, which all processes of a machine share, or in this process's memory.

One thread of its own does all the work, so that no call waits for the disk on the event loop. What has queued up meanwhile is one
transaction. Nothing is synced to the disk: entries need to survive this process, not the machine.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.gateway.stores.store import StoreFailed, StoreLimits

T = TypeVar("T")

IN_MEMORY = ":memory:"
SCHEMA_VERSION = 1
MAX_BATCH = 256
"""Calls in one transaction. A caller waits for the whole of it."""

BUSY_MS = 200
"""Milliseconds that a transaction waits for another process's."""

CLOSE_S = 2.0

BY_TENANT = "SELECT tenant, sum(size) FROM entries"
OPEN_TRIES, OPEN_RETRY_S = 20, 0.05
"""How often, and after how many seconds, a file is tried again that another process is just opening."""

SCHEMA = (
    "CREATE TABLE entries"
    " (key TEXT PRIMARY KEY, tenant TEXT NOT NULL, size INTEGER NOT NULL, expires_at REAL NOT NULL, value BLOB NOT NULL)",
    "CREATE INDEX entries_by_age ON entries (expires_at)",
    "CREATE INDEX entries_by_tenant ON entries (tenant, expires_at)",
    "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, size INTEGER NOT NULL)",
    "CREATE TRIGGER entry_added AFTER INSERT ON entries WHEN NEW.size > 0 BEGIN"
    " INSERT INTO tenants VALUES (NEW.tenant, NEW.size) ON CONFLICT (tenant) DO UPDATE SET size = size + NEW.size; END",
    "CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN"
    " UPDATE tenants SET size = size - OLD.size WHERE tenant = OLD.tenant;"
    " DELETE FROM tenants WHERE tenant = OLD.tenant AND size = 0; END",
)


class SqliteStore:
    """A `Store`. Made by `open`."""

    def __init__(self, connection: sqlite3.Connection, limits: StoreLimits, unix_time: Clock) -> None:
        self._connection = connection
        self._limits = limits
        self._unix_time = unix_time
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: str, limits: StoreLimits, unix_time: Clock) -> SqliteStore:
        """path: a file, made where it is not there yet, closed to other users; or IN_MEMORY. Raises ConfigError."""
        try:
            if path != IN_MEMORY:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # its companion files get the same mode
            return cls(_connected(path), limits, unix_time)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("store.path", f"{path} cannot be used as a store: {error}") from None

    async def put(self, key: str, value: bytes, *, tenant: str, ttl_s: float) -> None:
        self._limits.check(len(value))
        await self._call(lambda: self._put(key, value, tenant, ttl_s))

    async def get(self, key: str) -> bytes | None:
        return await self._call(lambda: self._get(key), is_read=True)

    async def swap(self, key: str, value: bytes, *, expected: bytes, tenant: str, ttl_s: float) -> bool:
        self._limits.check(len(value))
        return await self._call(lambda: self._swap(key, value, expected, tenant, ttl_s))

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._delete(key))

    async def check(self) -> None:
        """Assert that the sums by tenant are of the entries, and that the bounds hold."""
        sizes, sums = await self._call(lambda: (self._rows(f"{BY_TENANT} GROUP BY tenant"), self._rows("SELECT tenant, size FROM tenants")))
        by_tenant = {tenant: size for tenant, size in sizes if size}
        assert by_tenant == dict(sums), "each tenant's sum is of its entries"
        assert all(size <= self._limits.tenant for size in by_tenant.values())
        assert sum(by_tenant.values()) <= self._limits.total

    async def num_entries(self) -> int:
        return len(await self._call(lambda: self._rows("SELECT key FROM entries")))

    async def close(self) -> None:
        """Do what was asked for so far, as far as CLOSE_S allows."""
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    async def _call(self, work: Callable[[], T], *, is_read: bool = False) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._calls.put(_Call(work, loop, answer, is_read))
        return await answer

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._calls.get()]
            while len(batch) < MAX_BATCH and not self._calls.empty():
                batch.append(self._calls.get())
            is_open = None not in batch
            self._do([call for call in batch if call is not None])
        self._connection.close()

    def _do(self, calls: list[_Call]) -> None:
        """All calls in one transaction; where it fails, all of them have failed."""
        answers: list[Any] = []
        try:
            if all(call.is_read for call in calls):
                self._connection.execute("BEGIN")  # waits for no other process
            else:
                self._connection.execute("BEGIN IMMEDIATE")
                self._remove_expired()
            answers = [None if call.answer.cancelled() else call.work() for call in calls]
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            for call in calls:
                call.end(None, StoreFailed(f"the store's file: {error}"))
            return
        for call, answer in zip(calls, answers, strict=True):
            call.end(answer)

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(query).fetchall()

    def _put(self, key: str, value: bytes, tenant: str, ttl_s: float) -> None:
        self._delete(key)
        size, limits = len(value), self._limits
        self._make_room("SELECT size FROM tenants WHERE tenant = ?", (tenant,), limits.tenant - size, tenant=tenant)
        self._make_room("SELECT sum(size) FROM tenants", (), limits.total - size)
        row = (key, tenant, size, self._unix_time() + ttl_s, value)
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", row)

    def _make_room(self, held: str, parameters: tuple[str, ...], limit: int, *, tenant: str | None = None) -> None:
        """Remove the oldest entries, of a tenant or of all, until the bytes that the query `held` gives are within the limit."""
        where = "" if tenant is None else "WHERE tenant = ? "
        oldest = f"DELETE FROM entries WHERE rowid = (SELECT rowid FROM entries {where}ORDER BY expires_at LIMIT 1)"
        while ((self._connection.execute(held, parameters).fetchone() or (0,))[0] or 0) > limit:
            self._connection.execute(oldest, () if tenant is None else (tenant,))

    def _get(self, key: str) -> bytes | None:
        found = self._connection.execute("SELECT value FROM entries WHERE key = ? AND expires_at > ?", (key, self._unix_time())).fetchone()
        return None if found is None else bytes(found[0])

    def _swap(self, key: str, value: bytes, expected: bytes, tenant: str, ttl_s: float) -> bool:
        is_expected = self._get(key) == expected
        if is_expected:
            self._put(key, value, tenant, ttl_s)
        return is_expected

    def _delete(self, key: str) -> None:
        self._connection.execute("DELETE FROM entries WHERE key = ?", (key,))

    def _remove_expired(self) -> None:
        oldest = f"SELECT rowid FROM entries WHERE expires_at <= ? ORDER BY expires_at LIMIT {MAX_BATCH}"
        self._connection.execute(f"DELETE FROM entries WHERE rowid IN ({oldest})", (self._unix_time(),))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call from an event loop to the thread."""

    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    is_read: bool

    def end(self, answer: object, error: StoreFailed | None = None) -> None:
        """From the thread: the caller gets the answer, or the error."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._end, answer, error)

    def _end(self, answer: object, error: StoreFailed | None) -> None:
        if self.answer.done():  # cancelled
            return
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(answer)


def _connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000)
    for left in reversed(range(OPEN_TRIES)):
        try:
            _set_up(connection)
            return connection
        except sqlite3.OperationalError:  # SQLite does not wait for a lock in every case
            if not left:
                raise
            time.sleep(OPEN_RETRY_S)
    raise AssertionError("the last try returns or raises")


def _set_up(connection: sqlite3.Connection) -> None:
    """Make the tables, where this is the first of the processes that open the file."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
    if version not in (0, SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"it has form {version}, and this version reads form {SCHEMA_VERSION}")
