"""Decides which adapters have the places of an engine, and which requests wait for one.

A request holds its adapter's place from when it is granted until the request ends. A place that no request holds keeps its adapter until
another adapter needs one, the least recently held first. docs/adapters.md, "Where the weights are", has the rules.

No thread, no tensor, no clock: the caller has a lock and says the time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from itertools import islice
from typing import NamedTuple

from headrace.core.ids import PreparationId
from headrace.core.request import PriorityClass

FIRST_HOLD_S = 60.0
"""How long a request is taken to hold a place before the first one has ended."""

NUM_RECENT = 64

PATIENCE = 2.0
"""A request may wait this many times as long as the turnover of the places lets expect."""


class Granted(NamedTuple):
    place: int
    digest: str
    holder: PreparationId


class PlaceTurn(NamedTuple):
    priority: PriorityClass
    tenant: str


class AdapterPlaces:
    """The places 1 .. num_places of one engine. An adapter is a digest, a request its `PreparationId`. The engine's waiting
    queue bounds what waits.
    """

    def __init__(self, num_places: int, max_holders: int) -> None:
        self.adapters: list[str | None] = [None] * num_places
        """By place, the first one at 0."""
        self._max_holders = max_holders
        self._place_of: dict[str, int] = {}
        self._held: dict[int, int] = {}  # place -> requests that hold it, in the order of the grants
        self._idle: dict[int, None] = dict.fromkeys(range(1, num_places + 1))  # least recently held first
        self._holders: dict[PreparationId, tuple[int, float]] = {}  # in the order of the grants
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._waiting: dict[PreparationId, tuple[PlaceTurn, str]] = {}
        self._turns: OrderedDict[PlaceTurn, dict[PreparationId, str]] = OrderedDict()  # the next one first
        self._num_waiting: Counter[str] = Counter()  # by adapter

    # questions

    def has(self, digest: str) -> bool:
        return digest in self._place_of

    def is_waiting(self, holder: PreparationId) -> bool:
        return holder in self._waiting

    def wait_limit_s(self, now: float) -> float:
        """How long a request may wait that has just begun to."""
        return PATIENCE * self._expected_s(len(self._num_waiting), len(self._waiting), now)

    def _expected_s(self, num_adapters: int, num_requests: int, now: float) -> float:
        """Until as many have had their turns, if each holds its place as long as the longest of the recent requests."""
        oldest_s = next((now - since for _, since in self._holders.values()), 0.0)
        num_turns = max(-(-num_adapters // len(self.adapters)), -(-num_requests // self._max_holders))
        return num_turns * max(max(self._recent, default=FIRST_HOLD_S), oldest_s)

    def _closed(self) -> set[int]:
        num_closed = sum(digest not in self._place_of for digest in self._num_waiting)
        return set(islice(self._held, num_closed))

    # changes

    def ask(self, holder: PreparationId, digest: str, turn: PlaceTurn, now: float) -> int | None:
        """The place; None: the request waits until `end` grants it one."""
        if digest not in self._num_waiting and (place := self._open_place(digest, self._closed())) is not None:
            return self._hold(place, holder, digest, now)
        self._waiting[holder] = turn, digest
        self._turns.setdefault(turn, {})[holder] = digest
        self._num_waiting[digest] += 1
        return None

    def end(self, holder: PreparationId, now: float) -> list[Granted]:
        """Returns what others are granted."""
        if holder in self._waiting:
            self._leave(holder)
        else:
            self._release(holder, now)
        granted: list[Granted] = []
        while (chosen := self._next()) is not None:
            granted.append(self._admit(chosen, now))
        return granted

    def _open_place(self, digest: str, closed: set[int]) -> int | None:
        """The place that one more request for this adapter would hold now, which may be another adapter's still."""
        if len(self._holders) >= self._max_holders:
            return None
        place = self._place_of.get(digest)
        if place is not None:
            return None if place in closed else place
        return next(iter(self._idle), None)

    def _next(self) -> PreparationId | None:
        if len(self._holders) >= self._max_holders:
            return None
        closed = self._closed()
        for waiting in self._turns.values():
            for digest in dict.fromkeys(waiting.values()):
                if self._open_place(digest, closed) is not None:
                    return next(holder for holder, wanted in waiting.items() if wanted == digest)
        return None

    def _admit(self, holder: PreparationId, now: float) -> Granted:
        turn, digest = self._waiting[holder]
        place = self._open_place(digest, set())
        assert place is not None, "`_next` found it"
        self._leave(holder)
        if turn in self._turns:
            self._turns.move_to_end(turn)
        return Granted(self._hold(place, holder, digest, now), digest, holder)

    def _leave(self, holder: PreparationId) -> None:
        turn, digest = self._waiting.pop(holder)
        del self._turns[turn][holder]
        if not self._turns[turn]:
            del self._turns[turn]
        self._num_waiting[digest] -= 1
        if not self._num_waiting[digest]:
            del self._num_waiting[digest]

    def _release(self, holder: PreparationId, now: float) -> None:
        place, since = self._holders.pop(holder)
        self._recent.append(now - since)
        self._held[place] -= 1
        if not self._held[place]:
            del self._held[place]
            self._idle[place] = None

    def _hold(self, place: int, holder: PreparationId, digest: str, now: float) -> int:
        if (before := self.adapters[place - 1]) != digest:
            if before is not None:
                del self._place_of[before]
            self.adapters[place - 1] = digest
            self._place_of[digest] = place
        self._idle.pop(place, None)
        self._held[place] = self._held.get(place, 0) + 1
        self._holders[holder] = place, now
        return place

    # invariants

    def check(self) -> None:
        """Raise AssertionError unless places, holders and waiting requests agree."""
        assert sorted([*self._held, *self._idle]) == list(range(1, len(self.adapters) + 1)), "a place was lost"
        assert self._place_of == {digest: place for place, digest in enumerate(self.adapters, 1) if digest is not None}
        counts = [place for place, _ in self._holders.values()]
        assert self._held == {place: counts.count(place) for place in self._held}, "the holders of a place are miscounted"
        assert sum(self._held.values()) == len(counts) <= self._max_holders
        assert all(self.adapters[place - 1] is not None for place in self._held)
        assert self._next() is None, "a request waits that could have a place"
        assert self._num_waiting == Counter(digest for _, digest in self._waiting.values())
        in_turns = {holder: (turn, digest) for turn, waiting in self._turns.items() for holder, digest in waiting.items()}
        assert self._waiting == in_turns
        assert all(self._turns.values())
