"""Tests the thread of a SQLite file: a call that fails, fails alone, and no exception of a call ends the thread."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.gateway.stores.sqlite_thread import IN_MEMORY, SqliteForm, SqliteThread, open_sqlite
from headrace.gateway.stores.store import StoreFailed

pytestmark = pytest.mark.socket

NUMBERS = SqliteForm(version=1, statements=("CREATE TABLE numbers (number INTEGER UNIQUE)",), synchronous="OFF")
TOO_LARGE = 2**63
"""An integer that SQLite cannot hold: the connection raises OverflowError, which is no sqlite3.Error."""


@pytest.fixture
async def thread() -> AsyncIterator[SqliteThread]:
    opened = SqliteThread(open_sqlite(IN_MEMORY, NUMBERS))
    yield opened
    await opened.close()


async def add(thread: SqliteThread, number: int) -> None:
    await thread.call(lambda: thread.connection.execute("INSERT INTO numbers VALUES (?)", (number,)))


async def numbers(thread: SqliteThread) -> list[int]:
    rows = await thread.call(lambda: thread.connection.execute("SELECT number FROM numbers ORDER BY number").fetchall(), is_read=True)
    return [number for (number,) in rows]


async def test_an_error_of_python_fails_its_call_and_later_calls_go_on(thread: SqliteThread, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(StoreFailed, match="OverflowError"):
            await add(thread, TOO_LARGE)
        await add(thread, 1)
        assert await numbers(thread) == [1]
    assert "OverflowError" in caplog.text


@pytest.mark.parametrize("bad", [TOO_LARGE, 7], ids=["error of Python", "constraint"])
async def test_a_call_that_fails_takes_none_of_its_batch_along(thread: SqliteThread, bad: int) -> None:
    await add(thread, 7)
    async with held(thread):
        calls = [asyncio.create_task(add(thread, number)) for number in (1, bad, 2)]
        await asyncio.sleep(0)
    first, failed, second = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, second) == (None, None)
    assert isinstance(failed, StoreFailed)
    assert await numbers(thread) == [1, 2, 7]


async def test_where_the_file_fails_all_calls_of_the_batch_have_failed(thread: SqliteThread) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with held(thread):
        calls = [asyncio.create_task(add(thread, 1)), asyncio.create_task(thread.call(fail))]
        await asyncio.sleep(0)
    assert all(isinstance(ended, StoreFailed) for ended in await asyncio.gather(*calls, return_exceptions=True))
    assert await numbers(thread) == []


async def test_a_read_that_is_interrupted_fails_alone(thread: SqliteThread) -> None:
    def interrupted() -> None:
        raise sqlite3.OperationalError("interrupted")

    async with held(thread):
        failing = asyncio.create_task(thread.call(interrupted, is_read=True))
        reading = asyncio.create_task(numbers(thread))
        await asyncio.sleep(0)
    with pytest.raises(StoreFailed):
        await failing
    assert await reading == []


class held:
    """Calls made in this block queue up and are one batch."""

    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread
        self._released = threading.Event()

    async def __aenter__(self) -> None:
        running = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            loop.call_soon_threadsafe(running.set)
            self._released.wait(60)

        self._call = asyncio.create_task(self._thread.call(work, is_read=True))
        await running.wait()

    async def __aexit__(self, *error: object) -> None:
        self._released.set()
        await self._call


@pytest.mark.process
def test_another_process_that_closes_a_file_leaves_the_log_to_the_connections_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    first = open_sqlite(str(path), NUMBERS)
    second = open_sqlite(str(path), NUMBERS)
    log = path.with_name("shared.db-wal")
    node = log.stat().st_ino
    script = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('INSERT INTO numbers VALUES (1)'); c.commit(); c.close()"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert log.stat().st_ino == node, "it took itself for the last one that has the file open"
    assert first.execute("SELECT count(*) FROM numbers").fetchone() == second.execute("SELECT count(*) FROM numbers").fetchone() == (1,)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {each.name for each in tmp_path.iterdir()} == {"shared.db", "shared.db-wal", "shared.db-shm"}
    first.close()
    second.close()
