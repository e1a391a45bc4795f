"""Puts a `Store` behind a guard (`stores.guard`): bounds the calls that requests wait for, and writes in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import TypeVar

from headrace.core.clock import Clock
from headrace.gateway.stores.guard import NO_ANSWER, StoreGuard
from headrace.gateway.stores.store import EntryTooLarge, Store, StoreFailed

T = TypeVar("T")
Work = Callable[[Store], Awaitable[object]]
Ended = Callable[[StoreFailed | None], None]

WRITE_S = 5.0

WRITE_PAUSES_S = (0.1, 0.2, 0.4, 0.8)

MAX_WRITING_BYTES = 32 << 20

MAX_WRITES = 64


class TooMuchToWrite(StoreFailed):
    pass


class GuardedStore:
    """A failed write is tried again."""

    def __init__(self, store: Store, name: str, clock: Clock = time.monotonic) -> None:
        self.store = store
        self.guard = StoreGuard(name, store.progress, clock)
        self._writes: set[asyncio.Task[None]] = set()
        self._writing_bytes = 0
        self._turns = asyncio.Semaphore(MAX_WRITES)
        self._is_closing = False

    async def asked(self, work: Callable[[Store], Awaitable[T]]) -> T:
        async with self.guard.waiting():
            return await work(self.store)

    async def tried(self, work: Work, within_s: float) -> None:
        """A failure is only logged, since the caller repeats the work."""
        try:
            async with asyncio.timeout(within_s):
                await work(self.store)
        except (StoreFailed, TimeoutError) as error:
            self.guard.warn(_as_failure(error))

    def write(self, work: Work, num_bytes: int, ended: Ended, *, within_s: float | None = None) -> None:
        """ended: called once, with None after success, else with the failure"""
        if self._writing_bytes + num_bytes > MAX_WRITING_BYTES:
            ended(self._not_written(TooMuchToWrite(f"more than {MAX_WRITING_BYTES} bytes wait to be written")))
            return
        self._writing_bytes += num_bytes
        write = asyncio.create_task(self._written(work, num_bytes, ended, WRITE_S if within_s is None else within_s))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)

    @property
    def num_writing(self) -> int:
        return len(self._writes)

    async def close(self) -> None:
        """Finishes the running writes within WRITE_S, without repeating failed ones."""
        self._is_closing = True
        if self._writes:
            await asyncio.wait(self._writes, timeout=WRITE_S)
        for write in list(self._writes):
            write.cancel()
        await self.store.close()

    async def _written(self, work: Work, num_bytes: int, ended: Ended, within_s: float) -> None:
        failure: StoreFailed | None = StoreFailed("the gateway ended first")
        try:
            async with asyncio.timeout(within_s):
                for pause_s in chain(WRITE_PAUSES_S, repeat(WRITE_PAUSES_S[-1])):
                    if await self._is_written(work):
                        break
                    await asyncio.sleep(pause_s)
            failure = None
        except (StoreFailed, TimeoutError) as error:
            failure = self._not_written(_as_failure(error))
        finally:
            self._writing_bytes -= num_bytes
            ended(failure)

    async def _is_written(self, work: Work) -> bool:
        """False: it failed and may be repeated. Raises StoreFailed if it must not be repeated."""
        async with self._turns:
            try:
                await work(self.store)
            except StoreFailed as error:
                if self._is_closing or isinstance(error, EntryTooLarge):
                    raise
                self.guard.warn(f"something was not written yet: {error}")
                return False
        return True

    def _not_written(self, failure: StoreFailed) -> StoreFailed:
        self.guard.warn(f"something was not written: {failure}")
        return failure


def _as_failure(error: StoreFailed | TimeoutError) -> StoreFailed:
    return error if isinstance(error, StoreFailed) else StoreFailed(NO_ANSWER)
