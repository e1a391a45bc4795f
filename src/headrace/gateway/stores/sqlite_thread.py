"""A thread that runs all work on one SQLite connection, so that the event loop never waits for the disk.

Calls that were queued while the thread was busy share one transaction; if all only read, each has its own, so that a failed read affects no
other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from headrace.core.errors import ConfigError
from headrace.gateway.stores.store import StoreFailed, StoreProgress

log = logging.getLogger("headrace.gateway")

T = TypeVar("T")

IN_MEMORY = ":memory:"
MAX_BATCH = 256

BUSY_MS = 200
"""A transaction that waits longer for the lock of another process fails."""

CLOSE_S = 2.0
"""Calls that `close` still finds queued after this time are lost."""

OPEN_TRIES, OPEN_RETRY_S = 240, 0.05
"""One minute with BUSY_MS, since adding a table to a large file takes about five seconds per million records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteForm:
    """version      version of the schema (`user_version`); a file of another version is refused
    added        table -> SQL that adds the table to an older file of the same version; older programs ignore such a table
    synchronous  SQLite's pragma. "OFF": a commit survives the end of the process, not a power cut. "NORMAL": after a power cut the file is
                 intact, but the last commits may be lost. "FULL": a commit is on disk before its caller continues
    """

    version: int
    statements: tuple[str, ...]
    added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    synchronous: Literal["OFF", "NORMAL", "FULL"]


def _nothing() -> None:
    pass


class SqliteThread:
    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        begin_write: Callable[[], None] = _nothing,
        end_write: Callable[[], None] = _nothing,
        write_failed: Callable[[], None] = _nothing,
    ) -> None:
        """end_write: called in the thread before the commit of a transaction that may write"""
        self.connection = connection
        self._begin_write, self._end_write, self._write_failed = begin_write, end_write, write_failed
        self.progress = StoreProgress()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sqlite", daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[], T], *, is_read: bool = False) -> T:
        """`work` may run twice: when another call of its transaction fails, each call runs again in one of its own. Raises StoreFailed when
        the transaction fails or `work` raises; nothing is stored then.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._calls.put(_Call(work, loop, answer, is_read))
        return await answer

    async def close(self) -> None:
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._calls.get()]
            while len(batch) < MAX_BATCH and not self._calls.empty():
                batch.append(self._calls.get())
            is_open = None not in batch
            self._do([call for call in batch if call is not None])
        self.connection.close()

    def _do(self, calls: Sequence[_Call]) -> None:
        if all(call.is_read for call in calls):
            for call in calls:
                self._transact([call])
        else:
            self._transact(calls)

    def _transact(self, calls: Sequence[_Call]) -> None:
        """An error of the file fails all calls, an error of one call's work that call alone."""
        is_read = all(call.is_read for call in calls)
        try:
            self._begin(is_read=is_read)
            answers = [self._done(call) for call in calls]
            if not is_read:
                self._end_write()
            self.connection.execute("COMMIT")
        except Exception as error:  # this thread's outermost loop: a bug in one call's work must not end the store
            self._roll_back()
            if not is_read:
                self._write_failed()
            if len(calls) > 1 and not isinstance(error, sqlite3.OperationalError):
                for call in calls:
                    self._transact([call])
                return
            if not isinstance(error, sqlite3.Error):
                log.exception("the store's file: a call failed")
            failed = f"the store's file: {error if isinstance(error, sqlite3.Error) else type(error).__name__}"
            for call in calls:
                call.end(None, StoreFailed(failed))
            return
        for call, answer in zip(calls, answers, strict=True):
            call.end(answer)

    def _done(self, call: _Call) -> object:
        answer = None if call.answer.cancelled() else call.work()
        self.progress.num_answers += 1  # also where the transaction then fails: the thread gets on
        return answer

    def _begin(self, *, is_read: bool) -> None:
        if is_read:
            self.connection.execute("BEGIN")  # waits for no other process
        else:
            self.connection.execute("BEGIN IMMEDIATE")
            self._begin_write()

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    is_read: bool

    def end(self, answer: object, error: StoreFailed | None = None) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing waits for the answer
            self.loop.call_soon_threadsafe(self._end, answer, error)

    def _end(self, answer: object, error: StoreFailed | None) -> None:
        if self.answer.done():  # cancelled
            return
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(answer)


def open_sqlite(path: str, form: SqliteForm) -> sqlite3.Connection:
    """For use in any thread, by one thread at a time. A missing file is made with mode 0600. Raises ConfigError."""
    try:
        if path != IN_MEMORY:
            _make_private(path)
        return _connected(path, form)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError("state", f"{path} cannot be used as a store: {error}") from None


def _make_private(path: str) -> None:
    """An existing file is not opened: closing any descriptor of it would drop the POSIX locks of this process's other connections
    (https://sqlite.org/howtocorrupt.html, 2.2).
    """
    if os.path.exists(path):
        return
    descriptor, made = tempfile.mkstemp(prefix=os.path.basename(path), dir=os.path.dirname(path) or ".")  # mode 0600
    os.close(descriptor)
    try:
        with suppress(FileExistsError):  # another process was faster
            os.link(made, path)
    finally:
        os.unlink(made)


def _connected(path: str, form: SqliteForm) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000)
    for left in reversed(range(OPEN_TRIES)):
        try:
            _set_up(connection, form)
            return connection
        except sqlite3.OperationalError:  # SQLite does not wait for a lock in every case
            if not left:
                raise
            time.sleep(OPEN_RETRY_S)
    raise AssertionError("the last try returns or raises")


def _set_up(connection: sqlite3.Connection, form: SqliteForm) -> None:
    """Raises sqlite3.Error; DatabaseError for a file of another schema version."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {form.synchronous}")
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for statement in form.statements:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {form.version}")
    if version in (0, form.version):
        for table, columns in form.columns.items():
            there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            for name in [name for name in columns if name not in there]:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")
        for table, statements in form.added.items():
            if not has_table(connection, table):
                for statement in statements:
                    connection.execute(statement)
    connection.execute("COMMIT")
    if version not in (0, form.version):
        raise sqlite3.DatabaseError(f"it has form {version}, and this version reads form {form.version}")


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone() is not None
