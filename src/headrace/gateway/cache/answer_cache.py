"""The response cache: whole answers by everything they depend on, and one computation (a `Flight`) at a time of each.

Which requests use it: `generation.stages.reuse`. A store that fails costs only the cache: equal requests still wait for one another.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.gateway.cache.config import CacheConfig
from headrace.gateway.cache.recorded_answer import WholeAnswer, decode_answer, encode_answer
from headrace.gateway.stores.guard import GuardedStore
from headrace.gateway.stores.open import Stores
from headrace.gateway.stores.store import Store, StoreFailed
from headrace.observe.cache_metrics import AnswerCacheMetrics, KeptAnswer


@dataclass(slots=True, eq=False)
class Flight:
    """One answer. answer: None until it is whole, and for ever where it failed;  ended: set once it is whole or has failed"""

    key: str
    answer: WholeAnswer | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Flights:
    """At most one flight per key. A flight stays after its end until its answer is in the store."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def find(self, key: str) -> Flight | None:
        return self._flights.get(key)

    def begin(self, key: str) -> Flight:
        """A flight that the caller has to `land`, whatever happens. For a key of which `find` knows none."""
        assert key not in self._flights
        flight = self._flights[key] = Flight(key)
        return flight

    def land(self, flight: Flight, answer: WholeAnswer | None) -> None:
        """Wake the requests that wait for the flight. answer: None where it failed"""
        flight.answer = answer
        flight.ended.set()
        if answer is None:
            self.forget(flight)

    def forget(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def check(self) -> None:
        """Assert that no request is open: nothing is being made."""
        assert all(flight.ended.is_set() for flight in self._flights.values()), "a flight was not ended"


ANSWERS = "answers"
"""Name of their part of the stores."""


def open_answer_store(config: CacheConfig, stores: Stores) -> Store:
    """Raises ConfigError."""
    return stores.open(ANSWERS, stores.limits(entry=config.max_entry_bytes, total=config.max_bytes))


FLIGHT_WAIT_S = 30.0
"""Seconds that a request waits for an equal one; then it is computed too."""


class AnswerCache:
    def __init__(self, store: GuardedStore, metrics: AnswerCacheMetrics, unix_time: Clock, *, max_entry_bytes: int) -> None:
        """store: closed by `close`"""
        self.max_entry_bytes = max_entry_bytes
        self._store = store
        self.metrics = metrics
        self._unix_time = unix_time
        self.flights = Flights()

    async def close(self) -> None:
        await self._store.close()

    def age_s(self, answer: WholeAnswer) -> float:
        """Never negative, whatever the clock did."""
        return max(0.0, self._unix_time() - answer.recorded_at)

    async def find(self, key: str, *, max_age_s: float | None) -> WholeAnswer | None:
        """The answer that is kept, no older than `max_age_s`; None too where the store fails."""
        try:
            value = await self._store.asked(lambda store: store.get(key))
        except StoreFailed:
            self.metrics.lookup_failed()
            return None
        answer = decode_answer(value)
        return None if answer is None or (max_age_s is not None and self.age_s(answer) > max_age_s) else answer

    async def wait(self, key: str) -> WholeAnswer | Flight | None:
        """The answer of an equal request, once it is whole; a flight that the caller has to end, where none is under way; None where one
        takes too long, so that this request is computed beside it."""
        try:
            async with asyncio.timeout(FLIGHT_WAIT_S):
                while (flight := self.flights.find(key)) is not None:
                    await flight.ended.wait()
                    if flight.answer is not None:
                        return flight.answer
        except TimeoutError:
            return None
        return self.flights.begin(key)

    def keep(self, key: str, answer: WholeAnswer, *, tenant: str, ttl_s: float, flight: Flight | None) -> None:
        """Write an answer, in the background. flight: lands with it"""
        value = encode_answer(answer)
        if flight is not None:
            self.flights.land(flight, answer)

        def ended(outcome: KeptAnswer) -> None:
            self.metrics.kept(outcome)
            if flight is not None:
                self.flights.forget(flight)

        if len(value) > self.max_entry_bytes:
            ended(KeptAnswer.TOO_LARGE)
        else:
            self._store.write(
                lambda store: store.put(key, value, tenant=tenant, ttl_s=ttl_s),
                len(value),
                lambda failure: ended(KeptAnswer.KEPT if failure is None else KeptAnswer.FAILED),
            )
