"""Decides which adapters have the places of an engine, and which requests wait for one.

A request holds its adapter's place from when it is granted until the request ends. A place that no request holds keeps its adapter until
another adapter needs one, the least recently held first. Where all are held, requests wait: adapters take turns by tenant, first come,
first served within a tenant. For each adapter that waits without a place, one more place is closed, the one granted longest ago first: new
requests for its adapter wait too, so that it is given on once those that hold it have ended, and no adapter waits forever.

No thread, no tensor, no clock: the caller has a lock and says the time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from typing import NamedTuple

from headrace.core.errors import Overloaded
from headrace.core.ids import PreparationId

FIRST_HOLD_S = 60.0
"""How long a request is taken to hold a place before the first one has ended."""

NUM_RECENT = 64

PATIENCE = 2.0
"""A request may wait this many times as long as the turnover of the places lets expect."""

MAX_WAITING_ADAPTERS = 256
"""Bounds a tenant's adapters. Its requests are bounded by the waiting queue."""


class Granted(NamedTuple):
    place: int
    digest: str
    holders: tuple[PreparationId, ...]


class AdapterPlaces:
    """The places 1 .. num_places of one engine. An adapter is a digest, a request its `PreparationId`."""

    def __init__(self, num_places: int) -> None:
        self.adapters: list[str | None] = [None] * num_places
        """By place, the first one at 0."""
        self._place_of: dict[str, int] = {}
        self._held: dict[int, int] = {}  # place -> requests that hold it, in the order of the grants
        self._idle: dict[int, None] = dict.fromkeys(range(1, num_places + 1))  # least recently held first
        self._holders: dict[PreparationId, tuple[int, float]] = {}  # in the order of the grants
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._waiting: dict[str, dict[PreparationId, str]] = {}
        self._turns: OrderedDict[str, dict[str, None]] = OrderedDict()  # tenant -> its waiting adapters
        self._digest_of_waiting: dict[PreparationId, str] = {}

    # questions

    def has(self, digest: str) -> bool:
        return digest in self._place_of

    def is_waiting(self, holder: PreparationId) -> bool:
        return holder in self._digest_of_waiting

    def wait_limit_s(self, now: float) -> float:
        """How long a request may wait that has just begun to."""
        return PATIENCE * self._expected_s(len(self._waiting), now)

    def _expected_s(self, num_adapters: int, now: float) -> float:
        """Until as many adapters have had their turns, if each place is held as long as the longest of the recent requests."""
        oldest_s = next((now - since for _, since in self._holders.values()), 0.0)
        return -(-num_adapters // len(self.adapters)) * max(max(self._recent, default=FIRST_HOLD_S), oldest_s)

    def _is_closed(self, place: int) -> bool:
        num_closed = sum(digest not in self._place_of for digest in self._waiting)
        return place in islice(self._held, num_closed)

    # changes

    def ask(self, holder: PreparationId, digest: str, tenant: str, now: float) -> int | None:
        """The place; None: the request waits until `end` grants it one. Raises Overloaded."""
        place = self._place_of.get(digest)
        if digest not in self._waiting and place is not None and not self._is_closed(place):
            return self._hold(place, holder, now)
        if place is None and self._idle:
            return self._hold(self._take_idle(digest), holder, now)
        turns = self._turns.get(tenant, {})
        if digest not in turns and len(turns) >= MAX_WAITING_ADAPTERS:
            wait_s = self._expected_s(len(turns), now)
            raise Overloaded(f"requests of this tenant wait for {len(turns)} adapters already", retry_after_s=wait_s)
        self._turns.setdefault(tenant, {})[digest] = None
        self._waiting.setdefault(digest, {})[holder] = tenant
        self._digest_of_waiting[holder] = digest
        return None

    def end(self, holder: PreparationId, now: float) -> list[Granted]:
        """The request has ended, whether it holds a place or waits. Returns what others are granted."""
        if (digest := self._digest_of_waiting.pop(holder, None)) is not None:
            self._leave(holder, digest)
        else:
            self._release(holder, now)
        return self._grant(now)

    def _leave(self, holder: PreparationId, digest: str) -> None:
        tenant = self._waiting[digest].pop(holder)
        if tenant not in self._waiting[digest].values():
            self._leave_turn(tenant, digest)
        if not self._waiting[digest]:
            del self._waiting[digest]

    def _leave_turn(self, tenant: str, digest: str) -> None:
        del self._turns[tenant][digest]
        if not self._turns[tenant]:
            del self._turns[tenant]

    def _release(self, holder: PreparationId, now: float) -> None:
        place, since = self._holders.pop(holder)
        self._recent.append(now - since)
        self._held[place] -= 1
        if not self._held[place]:
            del self._held[place]
            self._idle[place] = None

    def _hold(self, place: int, holder: PreparationId, now: float) -> int:
        self._idle.pop(place, None)
        self._held[place] = self._held.get(place, 0) + 1
        self._holders[holder] = place, now
        return place

    def _take_idle(self, digest: str) -> int:
        place = next(iter(self._idle))
        if (before := self.adapters[place - 1]) is not None:
            del self._place_of[before]
        self.adapters[place - 1] = digest
        self._place_of[digest] = place
        return place

    def _grant(self, now: float) -> list[Granted]:
        granted: list[Granted] = []
        while self._idle and self._turns:
            granted.append(self._take_turn(now))
        for digest in list(self._waiting):  # places that have opened, since fewer adapters wait
            if digest in self._place_of and not self._is_closed(self._place_of[digest]):
                granted.append(self._admit(digest, now))
        return granted

    def _take_turn(self, now: float) -> Granted:
        tenant, digests = next(iter(self._turns.items()))
        self._turns.move_to_end(tenant)
        return self._admit(next(iter(digests)), now)

    def _admit(self, digest: str, now: float) -> Granted:
        """All that wait for an adapter are granted its place at once, which counts as a new grant of it."""
        place = self._place_of.get(digest) or self._take_idle(digest)
        if (num_holders := self._held.pop(place, None)) is not None:
            self._held[place] = num_holders
        waiting = self._waiting.pop(digest)
        for tenant in dict.fromkeys(waiting.values()):
            self._leave_turn(tenant, digest)
        for holder in waiting:
            del self._digest_of_waiting[holder]
            self._hold(place, holder, now)
        return Granted(place, digest, tuple(waiting))

    # invariants

    def check(self) -> None:
        """Raise AssertionError unless places, holders and waiting requests agree."""
        assert sorted([*self._held, *self._idle]) == list(range(1, len(self.adapters) + 1)), "a place was lost"
        assert self._place_of == {digest: place for place, digest in enumerate(self.adapters, 1) if digest is not None}
        counts = [place for place, _ in self._holders.values()]
        assert self._held == {place: counts.count(place) for place in self._held}, "the holders of a place are miscounted"
        assert sum(self._held.values()) == len(counts)
        assert all(self.adapters[place - 1] is not None for place in self._held)
        assert not (self._waiting and self._idle), "an adapter waits beside a place that is not held"
        for digest, holders in self._waiting.items():
            assert holders
            assert digest not in self._place_of or self._is_closed(self._place_of[digest]), "it waits for a place that is open"
            for tenant in holders.values():
                assert digest in self._turns[tenant], "no turn will come"
        assert self._digest_of_waiting == {holder: digest for digest, holders in self._waiting.items() for holder in holders}
        assert all(1 <= len(turns) <= MAX_WAITING_ADAPTERS for turns in self._turns.values())
        assert all(tenant in self._waiting[digest].values() for tenant, turns in self._turns.items() for digest in turns)
