"""A SQLite file and the thread that works with it, so that no call waits for the disk on the event loop.

What has queued up while the thread worked becomes one transaction. Processes of one machine may share the file.
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
from typing import Any, Literal, TypeVar

from headrace.core.errors import ConfigError
from headrace.gateway.stores.store import StoreFailed

T = TypeVar("T")

IN_MEMORY = ":memory:"
MAX_BATCH = 256
"""Calls in one transaction. A caller waits for the whole of it."""

BUSY_MS = 200
"""Milliseconds that a transaction waits for another process's; then it fails."""

CLOSE_S = 2.0
"""Seconds that `close` waits for what was asked for; the rest is lost."""

OPEN_TRIES, OPEN_RETRY_S = 20, 0.05
"""How often, and after how many seconds, a file is tried again that another process is just opening."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteForm:
    """What a file holds.

    version      of the statements; a file of another version is refused
    statements   make the tables in an empty file
    synchronous  "OFF": a commit survives this process, not a power cut. "NORMAL": the file stays whole after one, the last commits may be
                 lost. "FULL": a commit is on the disk when its caller goes on
    """

    version: int
    statements: tuple[str, ...]
    synchronous: Literal["OFF", "NORMAL", "FULL"]


class SqliteThread:
    """Made by `open`. connection: for the work that `call` is given, which runs in the thread"""

    def __init__(self, connection: sqlite3.Connection, begin_write: Callable[[], None]) -> None:
        self.connection = connection
        self._begin_write = begin_write
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sqlite", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: str, form: SqliteForm, *, where: str, begin_write: Callable[[], None] = lambda: None) -> SqliteThread:
        """
        path         a file, made where it is not there yet, closed to other users; or IN_MEMORY
        where        the option that names the file, for errors
        begin_write  first work of each transaction that may write

        Raises ConfigError.
        """
        return cls(open_sqlite(path, form, where=where), begin_write)

    async def call(self, work: Callable[[], T], *, is_read: bool = False) -> T:
        """What `work` returns, done in the thread within a transaction. is_read: it writes nothing

        Raises StoreFailed where the transaction fails; then nothing of it was done.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._calls.put(_Call(work, loop, answer, is_read))
        return await answer

    async def close(self) -> None:
        """Do what was asked for so far, as far as CLOSE_S allows."""
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

    def _do(self, calls: list[_Call]) -> None:
        """All calls in one transaction; where it fails, all of them have failed."""
        answers: list[Any] = []
        try:
            if all(call.is_read for call in calls):
                self.connection.execute("BEGIN")  # waits for no other process
            else:
                self.connection.execute("BEGIN IMMEDIATE")
                self._begin_write()
            answers = [None if call.answer.cancelled() else call.work() for call in calls]
            self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            for call in calls:
                call.end(None, StoreFailed(f"the store's file: {error}"))
            return
        for call, answer in zip(calls, answers, strict=True):
            call.end(answer)


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


def open_sqlite(path: str, form: SqliteForm, *, where: str) -> sqlite3.Connection:
    """A connection for use in any thread, one at a time. Parameters and errors as `SqliteThread.open`."""
    try:
        if path != IN_MEMORY:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # its companion files get the same mode
        return _connected(path, form)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(where, f"{path} cannot be used as a store: {error}") from None


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
    """Make the tables, where this is the first of the processes that open the file."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {form.synchronous}")
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for statement in form.statements:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {form.version}")
    connection.execute("COMMIT")
    if version not in (0, form.version):
        raise sqlite3.DatabaseError(f"it has form {version}, and this version reads form {form.version}")
