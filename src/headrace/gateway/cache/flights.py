"""Answers that are being made in this gateway, so that equal requests wait for one of them instead of making it again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headrace.gateway.cache.recorded_answer import WholeAnswer


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
