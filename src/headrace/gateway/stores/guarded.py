"""A store that no request waits for longer than a quarter of a second, and which is left alone for a moment after each failure.

Reads are awaited. Writes run in the background, bounded in number and bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from headrace.gateway.stores.store import EntryTooLarge, Store, StoreFailed

log = logging.getLogger("headrace.gateway")

T = TypeVar("T")

REQUEST_WAIT_S = 0.25
"""Seconds that a request waits for the store in all."""

RETRY_S = 1.0
"""After a failure the store is asked again when this many seconds have passed; calls in between fail at once."""

WRITE_S = 5.0
"""Seconds that a write in the background may take; then it is given up."""

MAX_WRITING_BYTES = 32 << 20
"""Bytes of values that are being written in the background. A write beyond them is given up: the store is slower than answers come."""

MAX_WRITES = 64
"""Writes in the background at a time."""

LOG_EVERY_S = 10.0
"""Least seconds between two warnings about one store."""


class GuardedStore:
    """store: closed by `close`;  name: of what is kept, for the log"""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self._name = name
        self._writes: set[asyncio.Task[None]] = set()
        self._writing_bytes = 0
        self._turns = asyncio.Semaphore(MAX_WRITES)
        self._retry_at = 0.0
        self._next_log_at = 0.0

    async def asked(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """What `work` gets from the store. Raises StoreFailed within REQUEST_WAIT_S, and EntryTooLarge."""
        now = _now()
        if now < self._retry_at:
            raise StoreFailed("the store failed a moment ago")
        try:
            async with asyncio.timeout(REQUEST_WAIT_S):
                return await work(self.store)
        except EntryTooLarge:
            raise
        except (StoreFailed, TimeoutError) as error:
            self._retry_at = _now() + RETRY_S
            failed = StoreFailed("the store does not answer in time") if isinstance(error, TimeoutError) else error
            self._warn(failed)
            raise failed from None

    def write(self, work: Callable[[Store], Coroutine[Any, Any, object]], num_bytes: int, ended: Callable[[bool], None]) -> None:
        """Do `work` in the background. ended: called once, with whether it was done"""
        if self._writing_bytes + num_bytes > MAX_WRITING_BYTES:
            self._warn(StoreFailed(f"more than {MAX_WRITING_BYTES} bytes wait to be written"))
            ended(False)
            return
        self._writing_bytes += num_bytes
        write = asyncio.create_task(self._written(work, num_bytes, ended))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)

    async def close(self) -> None:
        """Finish what is being written, as far as WRITE_S allows."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=WRITE_S)
        for write in list(self._writes):
            write.cancel()
        await self.store.close()

    async def _written(self, work: Callable[[Store], Awaitable[object]], num_bytes: int, ended: Callable[[bool], None]) -> None:
        is_done = False
        try:
            async with self._turns, asyncio.timeout(WRITE_S):
                await work(self.store)
            is_done = True
        except (StoreFailed, TimeoutError) as error:
            self._warn(error)
        finally:
            self._writing_bytes -= num_bytes
            ended(is_done)

    def _warn(self, error: BaseException) -> None:
        now = _now()
        if now >= self._next_log_at:
            self._next_log_at = now + LOG_EVERY_S
            reason = "it does not answer in time" if isinstance(error, TimeoutError) else error
            log.warning("the store of %s: %s (at most one such line in %g s; /metrics counts all)", self._name, reason, LOG_EVERY_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
