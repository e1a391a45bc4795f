"""Caches the keys that one gateway has looked up in the store, until the directory of keys changes.

The directory's version is read every POLL_S.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from headrace.core.clock import Clock, SteadyUnixTime
from headrace.core.errors import Unavailable
from headrace.gateway.access.key_store import DirectoryState, KeyRecord, KeyStore, StoredKey, TenantRecord
from headrace.gateway.access.open_requests import KeyUses
from headrace.gateway.stores.guard import StoreGuard
from headrace.gateway.stores.store import StoreFailed, StoreProgress, drop_error

MAX_FIRST_LOOKUPS = 4
"""For keys that were not found before: half of a Redis client's connections."""

MAX_FIRST_WAITING = 512

LookUp = Callable[[bytes, str], Awaitable[StoredKey | None]]


class KeyLookups:
    """Requests for the same key share one look-up. A flood of invented keys leaves connections for known keys. A request that stops waiting
    does not cancel its look-up: the Redis client would close the connection.
    """

    def __init__(self, look_up: LookUp, guard: StoreGuard) -> None:
        """guard: for keys that were found before, so that invented keys cannot trip it"""
        self._look_up = look_up
        self._guard = guard
        self._first_progress = StoreProgress()
        self._first_guard = StoreGuard("keys not seen before", self._first_progress, guard.clock)
        self._running: set[asyncio.Task[StoredKey | None]] = set()
        self._shared: dict[bytes, asyncio.Task[StoredKey | None]] = {}
        self._first_turns = asyncio.Semaphore(MAX_FIRST_LOOKUPS)
        self._num_first = 0

    async def find(self, blinded: bytes, sha256: str, *, was_found: bool) -> StoredKey | None:
        """Raises Unavailable, also when the request's waiting time is over."""
        lookup: asyncio.Task[StoredKey | None] | None = None
        try:
            async with (self._guard if was_found else self._first_guard).waiting():
                lookup = self._shared.get(blinded) or self._start(blinded, sha256, was_found=was_found)
                return await asyncio.shield(lookup)
        except StoreFailed:
            self._drop(blinded, lookup)
            raise unavailable() from None

    def forget(self) -> None:
        """A look-up in flight may have read the directory before a change."""
        self._shared.clear()

    async def close(self) -> None:
        for lookup in list(self._running):
            lookup.cancel()
            with suppress(asyncio.CancelledError, StoreFailed):
                await lookup

    def _start(self, blinded: bytes, sha256: str, *, was_found: bool) -> asyncio.Task[StoredKey | None]:
        """Raises Unavailable when too many look-ups of unknown keys wait already."""
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
        if lookup is not None and self._shared.get(blinded) is lookup:
            del self._shared[blinded]


def unavailable() -> Unavailable:
    return Unavailable("API keys cannot be checked at the moment; try again.", retry_after_s=1.0)


T = TypeVar("T")
K = TypeVar("K")

POLL_S = 0.5

ANSWER_S = 1.0

OUTDATED_S = 0.4
"""For keys found before a change that cannot be looked up again. With POLL_S and ANSWER_S it is less than the two seconds that a change
has.
"""

OUTAGE_S = 30.0
"""After the last answer of the store."""

OPEN_S = 0.05
"""An open server wants keys this soon after the first one was created."""

ABSENT_S = 2.0

MAX_FOUND, MAX_ABSENT = 16_384, 16_384

NUM_CHECKS = 2
"""After a change: a request whose key was just being looked up may be open from then on only."""

MAX_CHANGES = 64
"""Keys that were found before an older change are looked up before they are valid again."""


def blinding() -> Callable[[bytes], bytes]:
    """A keyed hash for a table of digests, so that the time of a lookup leaks nothing about the stored digests (double HMAC). Its random
    secret keeps clients from choosing the values that are compared.
    """
    secret = secrets.token_bytes(32)
    return lambda digest: hashlib.blake2b(digest, key=secret, digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class _Found:
    key: StoredKey
    version: int


class StoredKeys:
    """The keys of one store, cached for this gateway. Use with `async with`, on one event loop. uses: a request ends within two seconds of
    its key's revocation
    """

    def __init__(self, store: KeyStore, *, clock: Clock, unix_time: Clock) -> None:
        self._on_first_key: Callable[[], None] = lambda: None
        self._store = store
        self._clock = clock
        self._now = SteadyUnixTime(unix_time, clock)
        self._blind = blinding()
        self._state: DirectoryState | None = None
        self._answered_at = float("-inf")
        self._guard = StoreGuard("keys", store.progress, clock)
        self._is_closing = asyncio.Event()
        self._found: dict[bytes, _Found] = {}
        self._absent: dict[bytes, float] = {}
        self._outdated_at: dict[int, float] = {}
        self._lookups = KeyLookups(self._ask, self._guard)
        self._tenants: dict[str, TenantRecord | None] = {}
        self._tenants_version: int | None = None
        self.uses = KeyUses()
        self._checks_left = 0
        self._reading: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StoredKeys:
        with suppress(Unavailable):
            await self._read_state()
        self._polling = asyncio.create_task(self._poll(), name="keys polled")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_closing.set()
        for task in (self._polling, self._reading):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, StoreFailed):
                    await task
        await self._lookups.close()
        await self._store.close()

    @property
    def has_seen_keys(self) -> bool:
        return self._state is not None and self._state.has_keys

    def on_first_key(self, callback: Callable[[], None]) -> None:
        """At once if a key was seen before."""
        self._on_first_key = callback
        if self.has_seen_keys:
            callback()

    async def has_keys(self) -> bool:
        """Stays true once a key was seen, even if the store loses it. Raises Unavailable while no key was seen and the store does not
        answer.
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
        """None: the key may not be used now. Raises Unavailable where the store is needed and does not answer."""
        blinded, sha256 = self._blind(digest), digest.hex()
        known = self._found.get(blinded)
        if known is not None and known.version == self._version and self._is_recent:
            stored: StoredKey | None = known.key
        elif self._absent.get(blinded, float("-inf")) > self._clock():
            return None
        else:
            stored = await self._looked_up(blinded, sha256, known)
        return stored if stored is not None and stored.key.is_valid(sha256, self._now()) else None

    async def tenant(self, name: str) -> TenantRecord | None:
        """A configured key is valid without the store, so only the first request of a tenant waits for the record; later reads run in the
        background after a change of the directory.
        """
        if name not in self._tenants:
            try:
                async with self._guard.waiting():
                    self._tenants[name] = await self._store.record(TenantRecord, name)
            except StoreFailed:
                return None
        return self._tenants[name]

    @property
    def _is_recent(self) -> bool:
        return self._clock() - self._answered_at <= OUTAGE_S

    @property
    def _version(self) -> int | None:
        return None if self._state is None else self._state.version

    async def _looked_up(self, blinded: bytes, sha256: str, known: _Found | None) -> StoredKey | None:
        """Raises Unavailable."""
        try:
            return await self._lookups.find(blinded, sha256, was_found=known is not None)
        except Unavailable:
            if known is not None and self._is_recent and self._clock() < self._outdated_at.get(known.version, float("-inf")) + OUTDATED_S:
                return known.key
            raise

    async def _ask(self, blinded: bytes, sha256: str) -> StoredKey | None:
        """Raises StoreFailed."""
        version, stored = await self._answer(self._store.find(sha256))
        if self._state is not None and version < self._state.version:
            return stored  # read before a change that is known by now: not remembered
        self._saw(DirectoryState(version, stored is not None or self.has_seen_keys))
        if stored is not None:
            remember(self._found, blinded, _Found(stored, version), MAX_FOUND)
        else:
            self._found.pop(blinded, None)
            remember(self._absent, blinded, self._clock() + ABSENT_S, MAX_ABSENT)
        return stored

    async def _poll(self) -> None:
        while not self._is_closing.is_set():
            await asyncio.sleep(POLL_S)
            with suppress(Unavailable, StoreFailed):
                await self._read_state()
                if self._state is not None and self._state.version != self._tenants_version:
                    await self._answer(self._read_tenants(self._state.version))
                if self._checks_left:
                    await self.uses.end_revoked(lambda key_id: self._answer(self._store.record(KeyRecord, key_id)))
                    self._checks_left -= 1

    async def _read_tenants(self, version: int) -> None:
        for name in list(self._tenants):
            self._tenants[name] = await self._store.record(TenantRecord, name)
        self._tenants_version = version

    async def _read_state(self) -> None:
        """Raises Unavailable."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_once(), name="keys' version")
            self._reading.add_done_callback(drop_error)
        try:
            async with self._guard.waiting():
                await asyncio.shield(self._reading)
        except StoreFailed:
            raise unavailable() from None

    async def _read_once(self) -> None:
        """Raises StoreFailed."""
        self._saw(await self._answer(self._store.state()))

    def _saw(self, state: DirectoryState) -> None:
        if self._state is not None and state.version != self._state.version:
            remember(self._outdated_at, self._state.version, self._clock(), MAX_CHANGES)
            self._absent.clear()
            self._lookups.forget()
            self._checks_left = NUM_CHECKS
        had_keys = self.has_seen_keys
        self._state = DirectoryState(state.version, state.has_keys or had_keys)
        if self.has_seen_keys and not had_keys:
            self._on_first_key()

    async def _answer(self, call: Awaitable[T]) -> T:
        """ANSWER_S may be longer than a request waits. Raises StoreFailed."""
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await call
        except TimeoutError:
            raise StoreFailed(f"nothing within {ANSWER_S:g} s") from None
        self._answered_at = self._clock()
        self._guard.answered()
        return answer


def remember(table: dict[K, T], key: K, value: T, most: int) -> None:
    table.pop(key, None)
    while len(table) >= most:
        del table[next(iter(table))]
    table[key] = value
