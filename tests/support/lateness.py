"""By how much this process's event loop is late, for tests of promises in seconds: a busy machine makes all of them later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICK_S = 0.01


class LoopLateness:
    def __init__(self) -> None:
        self._late_s = 0.0
        self._due = float("inf")
        """When the loop is to be looked at again."""

    @property
    def late_s(self) -> float:
        """Seconds by which the loop has been late since the block began, what it is late right now included."""
        late_s = time.monotonic() - self._due
        return self._late_s + (late_s if late_s > TICK_S else 0.0)

    async def watch(self) -> None:
        while True:
            self._due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_s = self.late_s

    def end(self) -> None:
        self._late_s, self._due = self.late_s, float("inf")


@asynccontextmanager
async def loop_lateness() -> AsyncIterator[LoopLateness]:
    """While inside, by how much the loop that runs it is late."""
    lateness = LoopLateness()
    watching = asyncio.create_task(lateness.watch())
    await asyncio.sleep(0)  # it looks from now on
    try:
        yield lateness
    finally:
        lateness.end()
        watching.cancel()
