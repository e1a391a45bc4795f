"""Caches the keys that one gateway has looked up in the store. An answer of the store holds until the directory of keys changes.

The directory's version is read every POLL_S. After a new version each key is looked up again (`KeyLookups`), so that a revoked,
rotated or changed key stops on every gateway within two seconds. Where that look-up fails, the earlier answer holds until these two seconds
are over. While the store does not answer, keys that were found stay good for OUTAGE_S. A key that was not found is refused with 503
meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.core.steady_time import SteadyUnixTime
from headrace.gateway.access.key_records import DirectoryState, KeyRecord, StoredKey, TenantRecord
from headrace.gateway.access.key_store import KeyStore
from headrace.gateway.access.open_requests import KeyUses
from headrace.gateway.stores.guard import StoreGuard
from headrace.gateway.stores.store import StoreFailed, StoreProgress, drop_error

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


T = TypeVar("T")
K = TypeVar("K")

POLL_S = 0.5
"""Seconds between two reads of the directory's version."""

ANSWER_S = 1.0
"""Seconds that such a read, and the look-up of a key, may take."""

OUTDATED_S = 0.4
"""Seconds after a change was seen for which keys that were found before it stay valid where they cannot be looked up again. With POLL_S and
ANSWER_S it is less than the two seconds that a change has."""

OUTAGE_S = 30.0
"""Seconds after the last answer of the store in which keys that it had found stay valid."""

OPEN_S = 0.05
"""Seconds for which "there is no key" holds: an open server wants keys this soon after the first one was created."""

ABSENT_S = 2.0
"""Seconds for which a key that is in no store is refused without asking again."""

MAX_FOUND, MAX_ABSENT = 16_384, 16_384
"""Keys that are remembered as found, and as absent. Beyond them the oldest are forgotten, and the store is asked again."""

NUM_CHECKS = 2
"""How often open requests are checked after a change: a request whose key was just being looked up may be open from then on only."""

MAX_CHANGES = 64
"""Changes of which the time is remembered. Keys that were found before an older one are looked up before they are valid again."""


def blinding() -> Callable[[bytes], bytes]:
    """A keyed hash for a table of digests, so that the time of a lookup leaks nothing about the stored digests (double HMAC).

    Its secret is drawn here, so a client can neither compute nor choose the hashed values that are compared. Unlike a comparison with every
    digest in constant time, the cost does not grow with the number of entries.
    """
    secret = secrets.token_bytes(32)
    return lambda digest: hashlib.blake2b(digest, key=secret, digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class _Found:
    """A key as it was in the directory of `version`."""

    key: StoredKey
    version: int


class StoredKeys:
    """The keys of one store, cached. Use with `async with`, on one event loop.

    uses  the open requests of each key; a request ends within two seconds of its key's revocation
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
        """Whether this gateway knows that the store has or had a key."""
        return self._state is not None and self._state.has_keys

    def on_first_key(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the first key is seen, or at once if a key was seen before."""
        self._on_first_key = callback
        if self.has_seen_keys:
            callback()

    async def has_keys(self) -> bool:
        """Whether a key was ever created. Stays true once a key was seen, even if the store loses it.

        Raises Unavailable while no key was seen and the store does not answer.
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
        known = self._found.get(blinded)
        if known is not None and known.version == self._version and self._is_recent:
            found: StoredKey | None = known.key
        elif self._absent.get(blinded, float("-inf")) > self._clock():
            return None
        else:
            found = await self._looked_up(blinded, sha256, known)
        return found if found is not None and found.key.is_valid(sha256, self._now()) else None

    async def tenant(self, name: str) -> TenantRecord | None:
        """The record of a configured key's tenant. None: the store has no such record, or has not answered yet.

        A configured key is valid without the store, so only the first request of a tenant waits for the record. Later reads run in the
        background after each change of the directory; while the store does not answer, the last record stays.
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
        """The key from the store. While the store fails, `known` from before a change holds for OUTDATED_S. Raises Unavailable."""
        try:
            return await self._lookups.find(blinded, sha256, was_found=known is not None)
        except Unavailable:
            if known is not None and self._is_recent and self._clock() < self._outdated_at.get(known.version, float("-inf")) + OUTDATED_S:
                return known.key
            raise

    async def _ask(self, blinded: bytes, sha256: str) -> StoredKey | None:
        """Raises StoreFailed."""
        version, found = await self._answer(self._store.find(sha256))
        if self._state is not None and version < self._state.version:
            return found  # read before a change that is known by now: not remembered
        self._saw(DirectoryState(version, found is not None or self.has_seen_keys))
        if found is not None:
            remember(self._found, blinded, _Found(found, version), MAX_FOUND)
        else:
            self._found.pop(blinded, None)
            remember(self._absent, blinded, self._clock() + ABSENT_S, MAX_ABSENT)
        return found

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
        """Read again every tenant that was asked for, from the directory of this version or a later one. Raises StoreFailed."""
        for name in list(self._tenants):
            self._tenants[name] = await self._store.record(TenantRecord, name)
        self._tenants_version = version

    async def _read_state(self) -> None:
        """Read the directory's version; concurrent callers share one read. Raises Unavailable."""
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
        """The result of a call of the store within ANSWER_S, which may be longer than a request waits. Raises StoreFailed."""
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await call
        except TimeoutError:
            raise StoreFailed(f"nothing within {ANSWER_S:g} s") from None
        self._answered_at = self._clock()
        self._guard.answered()
        return answer


def remember(table: dict[K, T], key: K, value: T, most: int) -> None:
    """Put a value into a table of at most `most` entries. A full table drops its oldest entry first."""
    table.pop(key, None)
    while len(table) >= most:
        del table[next(iter(table))]
    table[key] = value
