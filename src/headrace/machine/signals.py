"""Turns SIGTERM and SIGINT into futures, the same in every process of a deployment, and handles SIGHUP.

A process that was started with SIGHUP ignored (nohup) goes on ignoring it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

DUPLICATE_SIGNAL_S = 0.5
"""Signals this close together count as one: a terminal and a wrapper (make, a shell) may both deliver one Ctrl-C."""


class StopSignals:
    """The first signal asks for a drain, a later one for an end at once. Use with `with`, inside a running loop on the main thread.

    soft  done, with the reason, at the first signal or call of `ask`
    hard  done at the second one
    """

    def __init__(self, *, duplicate_signal_s: float = DUPLICATE_SIGNAL_S) -> None:
        """duplicate_signal_s: 0 under a supervisor, which sends no duplicates."""
        self._duplicate_signal_s = duplicate_signal_s
        self._loop = loop = asyncio.get_running_loop()
        self._asked_s = 0.0
        self.soft: asyncio.Future[str] = loop.create_future()
        self.hard: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, f"stopped by {number.name}")

    def ask(self, reason: str) -> None:
        now = self._loop.time()
        if not self.soft.done():
            self._asked_s = now
            self.soft.set_result(reason)
        elif not self.hard.done() and now - self._asked_s > self._duplicate_signal_s:
            self.hard.set_result(None)

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the signals' default action. After a first signal they are ignored instead: the process is ending, and a later signal
        must not change its exit status.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
            if self.soft.done():
                signal.signal(number, signal.SIG_IGN)


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Cancels no future and raises no future's error."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """In the block SIGINT only waits; its handler is called at the end. In other threads than the main one, where none runs, this does
    nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[0])


@contextmanager
def on_hangup(reload: Callable[[], None] | None, stop: StopSignals) -> Iterator[None]:
    """In the block SIGHUP calls `reload`, or drains when `reload` is None or the terminal is gone. After the block SIGHUP is ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    had_terminal = _has_terminal()

    def take() -> None:
        if reload is not None and _has_terminal() == had_terminal:
            reload()
        else:
            stop.ask("stopped by SIGHUP")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # a signal that came during the start is handled now
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a late one must not end the process before its children have left


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
