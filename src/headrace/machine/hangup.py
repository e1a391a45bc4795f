"""Handles SIGHUP: the process reads its configuration again, or drains and ends where it has no reload or its terminal was closed.

A process that was started with SIGHUP ignored (nohup) goes on ignoring it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.machine.stop_signals import StopSignals


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
