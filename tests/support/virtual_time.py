"""Runs an event loop on virtual time: when nothing is ready, its clock jumps to the next timer instead of waiting for it.

Every test of the kind `loop` runs on one. A promise in seconds is exact there, whatever the machine does meanwhile: time passes only while
everything waits. Threads and sockets cannot be waited for, since nothing says when they will be done. What the code gives to a thread
(`asyncio.to_thread`, a SQLite file) is done at once, on the loop, and the guard of the kinds refuses the rest. TCP servers and connections
of the loop are those of its own network (`loop_network`).
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar

import pytest
from loop_network import NetworkedLoop

from headrace.gateway.stores.sqlite_thread import SqliteThread, _Call

T = TypeVar("T")

START_S = 1_000.0
START_UNIX_S = 1_800_000_000.0


MAX_JUMPS = 500_000
"""Jumps of the clock in one test. Where timers tick and what the test waits for never comes, they would go on until its time limit."""


class NotVirtual(AssertionError):
    """The test waits for something else than time: a thread or a socket, or for nothing at all."""


class VirtualTimeLoop(NetworkedLoop):
    def __init__(self) -> None:
        self._now = START_S
        self._unix_change_s = 0.0
        self._owner = threading.get_ident()
        self._foreign_call = ""
        self._num_jumps = 0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now

    def unix_time(self) -> float:
        return START_UNIX_S + self._now - START_S + self._unix_change_s

    def change_unix_time(self, by_s: float) -> None:
        """The machine's clock is set anew, which the monotonic one does not notice."""
        self._unix_change_s += by_s

    def be_late(self, seconds: float) -> None:
        """The machine stands still: time passes, and nothing runs."""
        self._now += seconds

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        if threading.get_ident() != self._owner:
            self._foreign_call = f"the thread {threading.current_thread().name} called into a loop on virtual time: {callback}"
        return super().call_soon_threadsafe(callback, *args, context=context)

    def _jump(self, seconds: float | None) -> None:
        if self._foreign_call:
            raise NotVirtual(self._foreign_call)
        if seconds is None:
            raise NotVirtual("every task waits, and no timer is set: nothing could ever happen again")
        self._num_jumps += 1
        if self._num_jumps > MAX_JUMPS:
            waiting = sorted(f"{task.get_name()} in {getattr(task.get_coro(), '__qualname__', '?')}" for task in asyncio.all_tasks(self))
            raise NotVirtual(
                f"it is {self._now:.0f} s, and timers tick on; what does not come is waited for by one of: {'; '.join(waiting)}"
            )
        self._now += seconds


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


class _JumpingSelector(selectors.DefaultSelector):
    """Looks at once whether a descriptor is ready; if none is, the time that it was to wait has passed."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready and timeout != 0:
            self._jump(timeout)
        return ready


def do_sqlite_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of SQLite files are done at once, each in a transaction of its own, instead of in the file's thread."""

    async def call(self: SqliteThread, work: Callable[[], T], *, is_read: bool = False) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._do([_Call(work, loop, answer, is_read)])
        return await answer

    monkeypatch.setattr(SqliteThread, "call", call)
