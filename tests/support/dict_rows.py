"""Keeps rows of the book of limits in a dict: the plain model that the rows of stores are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.policy.limits.book import LATE_MS, Reservation
from headrace.policy.limits.counters import KEPT_BUCKETS, Amounts, Window


@dataclass(slots=True)
class DictRows:
    """As `policy.limits.book.BookRows` says."""

    counters: dict[str, dict[int, int]] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    gateways: dict[str, int] = field(default_factory=dict)

    def used(self, counter: str, bucket: int) -> int | None:
        return self.counters.get(counter, {}).get(bucket)

    def buckets(self, counter: str) -> list[int]:
        return list(self.counters.get(counter, {}))

    def set_used(self, counter: str, window: Window, bucket: int, used: int) -> None:
        self.counters.setdefault(counter, {})[bucket] = used
        self.windows[counter] = window

    def remove_bucket(self, counter: str, bucket: int) -> None:
        del self.counters[counter][bucket]

    def add_used(self, counter: str, bucket: int, amount: int) -> None:
        if self.used(counter, bucket) is not None:
            self.counters[counter][bucket] = max(0, self.counters[counter][bucket] + amount)

    def reservation(self, reservation_id: str) -> Reservation | None:
        return self.reservations.get(reservation_id)

    def put_reservation(self, reservation: Reservation) -> None:
        self.reservations[reservation.id] = reservation

    def remove_reservation(self, reservation_id: str) -> None:
        del self.reservations[reservation_id]

    def save(self, gateway: str, saved: Mapping[str, Amounts]) -> None:
        for reservation_id, amounts in saved.items():
            found = self.reservations.get(reservation_id)
            if found is not None and found.gateway == gateway:
                self.reservations[reservation_id] = replace(found, saved=amounts)

    def reservations_of(self, gateway: str, *, until_beat: int | None = None) -> list[Reservation]:
        of_gateway = [one for one in self.reservations.values() if one.gateway == gateway]
        return [one for one in of_gateway if until_beat is None or one.beat <= until_beat]

    def remove_expired(self, now_ms: int, limit: int) -> None:
        over = [(ms, one.id) for one in self.reservations.values() if (ms := one.expired_ms) is not None and not 0 <= now_ms - ms < LATE_MS]
        for _, reservation_id in sorted(over)[:limit]:
            del self.reservations[reservation_id]

    def beats(self) -> dict[str, int]:
        return dict(self.gateways)

    def set_beat(self, gateway: str, beat: int) -> None:
        self.gateways[gateway] = beat

    def remove_gateway(self, gateway: str) -> None:
        self.gateways.pop(gateway, None)

    def check(self) -> None:
        """Assert that each counter holds at least what its reservations took, and that open requests are exactly those that hold one."""
        held: dict[tuple[str, int], int] = {}
        for reservation in self.reservations.values():
            assert (reservation.gateway == "") == (reservation.expired_ms is not None)
            for taken in reservation.taken:
                place = (taken.counter, taken.bucket)
                held[place] = held.get(place, 0) + taken.amount
        for (counter, bucket), amount in held.items():
            assert (used := self.used(counter, bucket)) is None or used >= amount >= 0
        for counter, buckets in self.counters.items():
            assert len(buckets) <= KEPT_BUCKETS
            if self.windows[counter] is Window.OPEN:
                assert buckets[0] == held.get((counter, 0), 0)
