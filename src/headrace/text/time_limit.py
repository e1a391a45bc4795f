"""A bound on how long a chat template may run: its loops are Python, so an exception can be put into the thread that runs them.

It ends Python code only: one long call into C (a string of gigabytes) runs to its end. The template belongs to the operator's model, so
this guards against mistakes and careless downloads; text that clients send is data to it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.05


class TimedOut(Exception):
    """Raised inside a `time_limit` block whose time is over."""


class _TakenBack(Exception):
    """Takes the place of a TimedOut that was still on its way."""


def _raise_in(thread: int, error: type[Exception]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _take_back(thread: int) -> None:
    """Called by `thread` itself: whatever was to be raised in it will not be.

    Not by setting no exception at all: CPython (3.11) would go on looking for one before every call and jump of every thread, for good,
    and never return from the first call that a tracer or debugger watches.
    """
    try:
        _raise_in(thread, _TakenBack)
        while True:
            time.sleep(0)
    except _TakenBack:
        pass


class _Watchdog:
    """One thread that looks at all running blocks. It sleeps while there are none."""

    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}
        self._interrupted: set[int] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def enter(self, thread: int, deadline: float) -> None:
        with self._changed:
            self._deadlines[thread] = deadline
            if self._thread is None or not self._thread.is_alive():  # a fork leaves threads behind
                self._thread = threading.Thread(target=self._run, name="template time limit", daemon=True)
                self._thread.start()
            self._changed.notify()

    def leave(self, thread: int) -> None:
        """After this nothing is raised any more, not even what was on its way."""
        with self._changed:
            self._deadlines.pop(thread, None)
            if thread in self._interrupted:
                self._interrupted.discard(thread)
                _take_back(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._deadlines:
                    self._changed.wait()
                now = time.monotonic()
                for thread in [thread for thread, deadline in self._deadlines.items() if deadline <= now]:
                    del self._deadlines[thread]
                    self._interrupted.add(thread)
                    _raise_in(thread, TimedOut)
            time.sleep(TICK_S)


_WATCHDOG = _Watchdog()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimedOut in this thread when the block runs longer than `seconds` (looked at every TICK_S). Not to be nested."""
    thread = threading.get_ident()
    _WATCHDOG.enter(thread, time.monotonic() + seconds)
    try:
        yield
    finally:
        _WATCHDOG.leave(thread)
