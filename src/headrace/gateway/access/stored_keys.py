"""What this gateway knows of stored keys: answers of the store, for as long as the directory does not change.

The directory's version is read every POLL_S. A new version forgets every answer, so that a key that was revoked, rotated or changed
stops on every gateway within two seconds. While the store does not answer, keys that were found stay good for OUTAGE_S; a key that was not
found is refused with 503 and never passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.core.steady_time import SteadyUnixTime
from headrace.gateway.access.blinding import Blinding
from headrace.gateway.access.key_records import StoredKey
from headrace.gateway.access.key_store import DirectoryState, KeyStore
from headrace.gateway.stores.store import StoreFailed

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between two reads of the directory's version."""

ANSWER_S = 1.0
"""Seconds that such a read may take. With POLL_S it is less than the two seconds that a change has."""

STORE_S = 0.25
"""Seconds that a request waits for the store."""

OUTAGE_S = 30.0
"""Seconds after the last answer of the store in which keys that it had found stay valid."""

OPEN_S = 0.05
"""Seconds for which "there is no key" holds: an open server wants keys this soon after the first one was created."""

ABSENT_S = 2.0
"""Seconds for which a key that is in no store is refused without asking again."""

MAX_FOUND, MAX_ABSENT = 16_384, 16_384
"""Keys that are remembered as found, and as absent. Beyond them the oldest are forgotten, and the store is asked again."""

LOG_EVERY_S = 10.0
"""Least seconds between two log lines about a store that does not answer."""


class StoredKeys:
    """Lives on one event loop, for as long as its `async with` block."""

    def __init__(self, store: KeyStore, *, clock: Clock, unix_time: Clock) -> None:
        self._on_first_key: Callable[[], None] = lambda: None
        self._store = store
        self._clock = clock
        self._now = SteadyUnixTime(unix_time, clock)
        self._blind = Blinding()
        self._state: DirectoryState | None = None
        self._answered_at = float("-inf")
        self._logged_at = float("-inf")
        self._found: dict[bytes, StoredKey] = {}
        self._absent: dict[bytes, float] = {}
        self._reading: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StoredKeys:
        with suppress(Unavailable):
            await self._read_state()
        self._polling = asyncio.create_task(self._poll(), name="keys polled")
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in (self._polling, self._reading):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, Unavailable):
                    await task
        await self._store.close()

    @property
    def has_seen_keys(self) -> bool:
        """Whether the store has had a key, as far as this gateway knows."""
        return self._state is not None and self._state.has_keys

    def on_first_key(self, callback: Callable[[], None]) -> None:
        """Call `callback` once a key is seen; at once if one was."""
        self._on_first_key = callback
        if self.has_seen_keys:
            callback()

    async def has_keys(self) -> bool:
        """Whether a key was ever created. Once seen that holds for good, whatever becomes of the store.

        Raises Unavailable where it cannot be known.
        """
        if self.has_seen_keys:
            return True
        if self._clock() - self._answered_at > OPEN_S:
            with suppress(Unavailable):
                await self._read_state()
        if self._state is None or not (self._state.has_keys or self._is_recent):
            raise unavailable()
        return self._state.has_keys

    async def find(self, digest: bytes) -> StoredKey | None:
        """The key with this SHA-256 digest if it may be used now. Raises Unavailable where the store is needed and does not answer."""
        blinded, sha256 = self._blind(digest), digest.hex()
        found = self._found.get(blinded)
        if found is None or not self._is_recent:
            if self._absent.get(blinded, float("-inf")) > self._clock():
                return None
            found = await self._ask(blinded, sha256)
        return found if found is not None and found.key.is_valid(sha256, self._now()) else None

    @property
    def _is_recent(self) -> bool:
        return self._clock() - self._answered_at <= OUTAGE_S

    async def _ask(self, blinded: bytes, sha256: str) -> StoredKey | None:
        version, found = await self._answer(self._store.find(sha256))
        if self._state is not None and version < self._state.version:
            return found  # read before a change that is known by now: not remembered
        self._saw(DirectoryState(version, found is not None or self.has_seen_keys))
        if found is not None:
            _remember(self._found, blinded, found, MAX_FOUND)
        else:
            _remember(self._absent, blinded, self._clock() + ABSENT_S, MAX_ABSENT)
        return found

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            with suppress(Unavailable):
                await self._read_state()

    async def _read_state(self) -> None:
        """Read the directory's version, once for all that ask at a time. Raises Unavailable, after STORE_S at the latest."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_once(), name="keys' version")
            self._reading.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(STORE_S):
                await asyncio.shield(self._reading)
        except TimeoutError:
            raise unavailable() from None

    async def _read_once(self) -> None:
        self._saw(await self._answer(self._store.state(), ANSWER_S))

    def _saw(self, state: DirectoryState) -> None:
        if self._state is None or state.version != self._state.version:
            self._found.clear()
            self._absent.clear()
        had_keys = self.has_seen_keys
        self._state = DirectoryState(state.version, state.has_keys or had_keys)
        if self.has_seen_keys and not had_keys:
            self._on_first_key()

    async def _answer(self, call: Awaitable[T], timeout_s: float = STORE_S) -> T:
        """What the store says. Raises Unavailable after `timeout_s`, or where it fails."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call
        except (StoreFailed, TimeoutError) as error:
            self._log(str(error) or f"nothing within {timeout_s:g} s")
            raise unavailable() from error
        self._answered_at = self._clock()
        return answer

    def _log(self, reason: str) -> None:
        now = self._clock()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning("the store of keys does not answer: %s", reason)


def unavailable() -> Unavailable:
    return Unavailable("API keys cannot be checked at the moment; try again.", retry_after_s=1.0)


def _remember(table: dict[bytes, T], key: bytes, value: T, most: int) -> None:
    while len(table) >= most:
        del table[next(iter(table))]
    table[key] = value


def _retrieve(task: asyncio.Task[None]) -> None:
    """Take a failed task's error, which asyncio would log where all that waited for it were cancelled."""
    if not task.cancelled():
        task.exception()
