"""Waits for what is sure to come: a condition is looked at again and again, and nothing is said of seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""What anything may take on a machine that is busy or stands still for a while; no test asserts less."""


def until(condition: Callable[[], object], within_s: float = PATIENCE_S, *, said: Callable[[], str] = str) -> None:
    """Wait, with the thread, for what another thread or process does. Raises AssertionError with what `said` returns then."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s {said()}"
        time.sleep(0.01)


async def eventually(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait while the event loop goes on, on virtual time too. Raises TimeoutError.

    Looks each 2 ms, and after a second at each five-hundredth of the wait: a minute of virtual time has 2,500 looks instead of 30,000.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(max(0.002, 0.002 * (clock() - began)))
