"""How many requests use something, so that it is closed when none does any more."""

from __future__ import annotations

import asyncio


class UseCount:
    """Lives on one event loop. num_users: requests that have entered and not left"""

    __slots__ = ("_unused", "num_users")

    def __init__(self) -> None:
        self.num_users = 0
        self._unused: asyncio.Event | None = None

    def enter(self) -> None:
        self.num_users += 1

    def leave(self) -> None:
        assert self.num_users > 0, "left without having entered"
        self.num_users -= 1
        if self._unused is not None and not self.num_users:
            self._unused.set()

    async def wait_unused(self) -> None:
        """Return at a moment without users. The caller makes sure that none enters later."""
        while self.num_users:
            self._unused = self._unused or asyncio.Event()
            self._unused.clear()
            await self._unused.wait()
