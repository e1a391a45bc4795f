"""SIGTERM and SIGINT as futures, the same in every process of a deployment, and the wait for whichever comes first."""

from __future__ import annotations

import asyncio
import signal
from typing import Any


class StopSignals:
    """The first signal asks for a drain, the second one means now. Made inside a running loop on the main thread.

    soft  done with the reason when somebody asked for a drain
    hard  done when somebody asked twice
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.soft: asyncio.Future[str] = loop.create_future()
        self.hard: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, f"stopped by {number.name}")

    def ask(self, reason: str) -> None:
        if not self.soft.done():
            self.soft.set_result(reason)
        elif not self.hard.done():
            self.hard.set_result(None)

    def close(self) -> None:
        """Gives the signals back their default meaning."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Returns when one of them is done, or after `timeout_s`; cancels none and raises nothing of theirs."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
