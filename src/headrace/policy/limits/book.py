"""Takes amounts for a request if every limit allows them, and later replaces them by what was used, exactly once: the book of limits.

    take -> (save, every second) -> charge          the gateway lives
    take -> (save, every second) -> expire -> (charge, if the gateway was only slow)

A reservation belongs to one gateway. Each gateway has a beat, a number that `renew` raises; a gateway whose beat stands still is dead
(`PeerWatch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple, Protocol

from headrace.policy.limits.counters import KEPT_BUCKETS, Amounts, Moment, Unit, Window, bucket_of, used_of

UNNAMED_BEATS = 10

LATE_MS = 3_600_000
"""Milliseconds for which an expired reservation still waits for a charge: its gateway may have been slow, not dead."""

MAX_LATE_REMOVED = 256


class Claim(NamedTuple):
    counter: str
    window: Window
    unit: Unit
    limit: int
    amount: int | None


class Taken(NamedTuple):
    counter: str
    bucket: int
    unit: Unit
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """gateway     the process that charges the reservation; "" once that process was found dead
    saved       the amounts to charge if the gateway dies
    """

    id: str
    gateway: str
    beat: int
    saved: Amounts
    taken: tuple[Taken, ...] = ()
    expired_ms: int | None = None


class ClaimReading(NamedTuple):
    current: int
    previous: int


@dataclass(frozen=True, slots=True)
class TakeResult:
    is_admitted: bool
    now: Moment
    readings: tuple[ClaimReading, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    id: str
    gateway: str
    beat: int
    saved: Amounts


class Charges(NamedTuple):
    gateway: str
    used: Mapping[str, Amounts]


NO_CHARGES = Charges("", {})


class BookRows(Protocol):
    def used(self, counter: str, bucket: int) -> int | None: ...
    def buckets(self, counter: str) -> list[int]: ...
    def set_used(self, counter: str, window: Window, bucket: int, used: int) -> None: ...
    def remove_bucket(self, counter: str, bucket: int) -> None: ...
    def add_used(self, counter: str, bucket: int, amount: int) -> None:
        """Change an existing bucket, to no less than 0."""
        ...

    def reservation(self, reservation_id: str) -> Reservation | None: ...
    def put_reservation(self, reservation: Reservation) -> None: ...
    def remove_reservation(self, reservation_id: str) -> None: ...
    def save(self, gateway: str, saved: Mapping[str, Amounts]) -> None: ...
    def reservations_of(self, gateway: str, *, until_beat: int | None = None) -> list[Reservation]: ...
    def remove_expired(self, now_ms: int, limit: int) -> None:
        """Also removes those that expire after `now_ms`: they are from before the last restart of the machine."""
        ...

    def beats(self) -> dict[str, int]: ...
    def set_beat(self, gateway: str, beat: int) -> None: ...
    def remove_gateway(self, gateway: str) -> None: ...


class LimitBook:
    def __init__(self, rows: BookRows) -> None:
        self.rows = rows

    def take(self, holder: Holder | None, claims: Sequence[Claim], now: Moment, charges: Charges = NO_CHARGES) -> TakeResult:
        """Take all amounts, or none if one limit would be exceeded.

        holder   the reservation to record the amounts in; None if they are never corrected
        charges  applied first, whether the amounts are then taken or not
        """
        for reservation_id, used in charges.used.items():
            self.charge(reservation_id, used)
        buckets = [bucket_of(claim.window, now) for claim in claims]
        readings = tuple(map(self._reading, claims, buckets))
        is_admitted = not any(map(is_over, claims, readings, repeat(now)))
        if is_admitted:
            self._take(holder, claims, buckets)
        return TakeResult(is_admitted, now, readings)

    def read(self, claim: Claim, now: Moment) -> ClaimReading:
        return self._reading(claim, bucket_of(claim.window, now))

    def _reading(self, claim: Claim, bucket: int) -> ClaimReading:
        previous = self.rows.used(claim.counter, bucket - 1) if claim.window is Window.MINUTE else 0
        return ClaimReading(self.rows.used(claim.counter, bucket) or 0, previous or 0)

    def charge(self, reservation_id: str, used: Amounts) -> bool:
        """False: there is none (any more)."""
        reservation = self.rows.reservation(reservation_id)
        if reservation is None:
            return False
        self._replace(reservation, used)
        self.rows.remove_reservation(reservation_id)
        return True

    def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts], now: Moment) -> dict[str, int]:
        """Show that a gateway lives, and save what its requests have used so far.

        saved  amounts by reservation, for every reservation that the gateway has or may have. Its other reservations are charged as unused,
               UNNAMED_BEATS after they were made
        """
        self.rows.set_beat(gateway, beat)
        self.rows.save(gateway, saved)
        for reservation in self.rows.reservations_of(gateway, until_beat=beat - UNNAMED_BEATS):
            if reservation.id not in saved:
                self.charge(reservation.id, Amounts(requests=1))
        self.rows.remove_expired(now.steady_ms, MAX_LATE_REMOVED)
        return self.rows.beats()

    def expire(self, gateway: str, beat: int, now: Moment) -> int:
        """Returns their number; 0 if the beat has moved on."""
        if self.rows.beats().get(gateway) != beat:
            return 0
        reservations = self.rows.reservations_of(gateway)
        for reservation in reservations:
            taken = self._replace(reservation, reservation.saved)
            self.rows.put_reservation(replace(reservation, gateway="", taken=taken, expired_ms=now.steady_ms))
        self.rows.remove_gateway(gateway)
        return len(reservations)

    def _take(self, holder: Holder | None, claims: Sequence[Claim], buckets: Sequence[int]) -> None:
        taken: list[Taken] = []
        for claim, bucket in zip(claims, buckets, strict=True):
            if claim.amount is not None:
                self._add(claim.counter, claim.window, bucket, claim.amount)
                taken.append(Taken(claim.counter, bucket, claim.unit, claim.amount))
        if holder is None:
            return
        made = self.rows.reservation(holder.id)
        beat, before = (holder.beat, ()) if made is None else (made.beat, made.taken)
        gateway = holder.gateway if made is None else made.gateway
        expired_ms = None if made is None else made.expired_ms
        self.rows.put_reservation(
            Reservation(id=holder.id, gateway=gateway, beat=beat, saved=holder.saved, taken=(*before, *taken), expired_ms=expired_ms)
        )
        if holder.gateway not in self.rows.beats():
            self.rows.set_beat(holder.gateway, holder.beat)

    def _add(self, counter: str, window: Window, bucket: int, amount: int) -> None:
        used = self.rows.used(counter, bucket)
        if used is None and len(buckets := self.rows.buckets(counter)) >= KEPT_BUCKETS:
            self.rows.remove_bucket(counter, min(buckets))
        self.rows.set_used(counter, window, bucket, (used or 0) + amount)

    def _replace(self, reservation: Reservation, used: Amounts) -> tuple[Taken, ...]:
        charged: set[str] = set()
        corrected: list[Taken] = []
        for taken in reservation.taken:
            amount = 0 if taken.counter in charged else used[taken.unit]
            charged.add(taken.counter)
            self.rows.add_used(taken.counter, taken.bucket, amount - taken.amount)
            corrected.append(taken._replace(amount=amount))
        return tuple(corrected)


def is_over(claim: Claim, reading: ClaimReading, now: Moment) -> bool:
    return bool(claim.amount) and used_of(claim.window, now, *reading) + (claim.amount or 0) > claim.limit


LEASE_S = 5.0
"""A gateway whose beat stands still for longer counts as dead."""


class PeerWatch:
    """No two clocks are compared, so neither a jump nor a difference declares a living gateway dead."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._seen: dict[str, tuple[int, float]] = {}

    def dead(self, beats: Mapping[str, int], now: float) -> list[tuple[str, int]]:
        seen: dict[str, tuple[int, float]] = {}
        for gateway, beat in beats.items():
            before = self._seen.get(gateway)
            seen[gateway] = before if before is not None and before[0] == beat else (beat, now)
        self._seen = seen
        return [(gateway, beat) for gateway, (beat, since) in seen.items() if gateway != self._own and now - since >= LEASE_S]
