"""Looks keys up in their store. Keys that this gateway has not found before get only a few look-ups at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress

from headrace.core.errors import Unavailable
from headrace.gateway.access.key_records import StoredKey
from headrace.gateway.stores.guard import StoreGuard
from headrace.gateway.stores.store import StoreFailed, StoreProgress

MAX_FIRST_LOOKUPS = 4
"""Look-ups of keys that were not found before, that the store works on at a time: half of a Redis client's connections."""

MAX_FIRST_WAITING = 512
"""Such look-ups in flight, with the ones that wait for their turn. A further key is refused at once, as the store has no time for it."""

LookUp = Callable[[bytes, str], Awaitable[StoredKey | None]]


class KeyLookups:
    """Look-ups of keys in their store. Requests that wait for the same key share one look-up.

    Few look-ups at a time are of keys that this gateway has not found before, so that a flood of invented keys leaves connections for
    known keys. A request that stops waiting does not cancel its look-up: the Redis client would close the look-up's connection.
    """

    def __init__(self, look_up: LookUp, guard: StoreGuard) -> None:
        """
        look_up  asks the store for a key, given by its blinded digest and its SHA-256 in hex; bounds its own time. Raises StoreFailed
        guard    of the store, for keys that were found before. Other keys have their own guard, so that invented keys cannot trip this one
        """
        self._look_up = look_up
        self._guard = guard
        self._first_progress = StoreProgress()
        self._first_guard = StoreGuard("keys not seen before", self._first_progress, guard.clock)
        self._running: set[asyncio.Task[StoredKey | None]] = set()
        self._shared: dict[bytes, asyncio.Task[StoredKey | None]] = {}
        self._first_turns = asyncio.Semaphore(MAX_FIRST_LOOKUPS)
        self._num_first = 0

    async def find(self, blinded: bytes, sha256: str, *, was_found: bool) -> StoredKey | None:
        """The key in the store. was_found: it was found before. Raises Unavailable, also when the request's waiting time is over."""
        lookup: asyncio.Task[StoredKey | None] | None = None
        try:
            async with (self._guard if was_found else self._first_guard).waiting():
                lookup = self._shared.get(blinded) or self._start(blinded, sha256, was_found=was_found)
                return await asyncio.shield(lookup)
        except StoreFailed:
            self._drop(blinded, lookup)
            raise unavailable() from None

    def forget(self) -> None:
        """Start new look-ups for later requests: one in flight may have read the directory before a change."""
        self._shared.clear()

    async def close(self) -> None:
        for lookup in list(self._running):
            lookup.cancel()
            with suppress(asyncio.CancelledError, StoreFailed):
                await lookup

    def _start(self, blinded: bytes, sha256: str, *, was_found: bool) -> asyncio.Task[StoredKey | None]:
        """Start a look-up. Raises Unavailable when too many look-ups of unknown keys wait already."""
        if not was_found:
            if self._num_first >= MAX_FIRST_WAITING:
                raise unavailable()
            self._num_first += 1
        lookup = asyncio.create_task(self._in_turn(blinded, sha256, was_found=was_found), name="key looked up")
        self._running.add(lookup)
        self._shared[blinded] = lookup
        lookup.add_done_callback(lambda ended: self._end(blinded, ended, was_found=was_found))
        return lookup

    async def _in_turn(self, blinded: bytes, sha256: str, *, was_found: bool) -> StoredKey | None:
        async with nullcontext() if was_found else self._first_turns:
            return await self._look_up(blinded, sha256)

    def _end(self, blinded: bytes, lookup: asyncio.Task[StoredKey | None], *, was_found: bool) -> None:
        self._running.discard(lookup)
        self._num_first -= not was_found
        self._drop(blinded, lookup)
        if not lookup.cancelled() and lookup.exception() is None:  # asked for here, since asyncio would log it
            self._first_progress.num_answers += not was_found

    def _drop(self, blinded: bytes, lookup: asyncio.Task[StoredKey | None] | None) -> None:
        """Stop sharing a look-up, which may hang, with later requests."""
        if lookup is not None and self._shared.get(blinded) is lookup:
            del self._shared[blinded]


def unavailable() -> Unavailable:
    return Unavailable("API keys cannot be checked at the moment; try again.", retry_after_s=1.0)
