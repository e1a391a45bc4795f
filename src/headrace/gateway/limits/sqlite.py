"""Keeps the book of limits in one SQLite file, which all processes of a machine share, or in memory. The last commits may be lost
when the machine fails (synchronous = NORMAL).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec

from headrace.core.clock import Clock
from headrace.gateway.stores.sqlite_thread import SqliteForm, SqliteThread, open_sqlite
from headrace.policy.limits.book import LATE_MS, NO_CHARGES, Charges, Claim, Holder, LimitBook, Reservation, Taken, TakeResult
from headrace.policy.limits.counters import Amounts, Moment, Window, bucket_of

MAX_MINUTES_REMOVED = 256
"""Users and keys that send no more requests leave such buckets."""

MAX_ROWS = 500
"""SQLite takes 32,766 values in one statement."""

PUT_USED = "INSERT INTO used VALUES {} ON CONFLICT (counter, bucket) DO UPDATE SET used = excluded.used"
"""REPLACE would write the page of its index, too."""

REMOVE_USED = "DELETE FROM used WHERE (counter, bucket) IN (VALUES {})"
PUT_RESERVATIONS = "INSERT OR REPLACE INTO reservations VALUES {}"
REMOVE_RESERVATIONS = "DELETE FROM reservations WHERE id IN (VALUES {})"

MAX_STATEMENTS = 128

_encode = msgspec.msgpack.encode
_taken_decoder = msgspec.msgpack.Decoder(tuple[Taken, ...])
_amounts_decoder = msgspec.msgpack.Decoder(Amounts)


@dataclass(slots=True)
class _Counter:
    window: str = ""
    buckets: dict[int, int] = field(default_factory=dict)


class SqliteRows:
    """The `BookRows` of one SQLite connection. Used in its thread, within a transaction.

    Each statement of Python's sqlite3 gives up the interpreter's lock and waits up to 5 ms to get it back where the event loop is
    busy. So rows change in memory, and `write` puts all of them into the file in four statements.
    """

    def __init__(self, connection: Any) -> None:
        self._execute = connection.execute
        self._version: int | None = None
        self._forget()

    # -- transactions ----------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        (version,) = self._execute("PRAGMA data_version").fetchone()  # another one once another process has written
        if version != self._version:
            self._forget()
        self._version = version

    def write(self) -> None:
        self._write(PUT_USED, self._used_rows())
        removed = [place for place in self._changed_used if place[1] not in self._counters[place[0]].buckets]
        self._write(REMOVE_USED, removed)
        held = [_row(self._reservations[name]) for name in self._changed_reservations if name in self._reservations]
        self._write(PUT_RESERVATIONS, held)
        ended = [(name,) for name in self._changed_reservations if name not in self._reservations]
        self._write(REMOVE_RESERVATIONS, ended)
        self._changed_used.clear()
        self._changed_reservations.clear()

    def failed(self) -> None:
        self._version = None

    def _used_rows(self) -> list[tuple[object, ...]]:
        places = [(name, bucket, self._counters[name]) for name, bucket in self._changed_used]
        return [(name, bucket, counter.window, counter.buckets[bucket]) for name, bucket, counter in places if bucket in counter.buckets]

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        for first in range(0, len(rows), MAX_ROWS):
            part = rows[first : first + MAX_ROWS]
            self._execute(_statement(statement, len(part[0]), len(part)), [value for row in part for value in row])

    def _forget(self) -> None:
        self._counters: dict[str, _Counter] = {}
        self._beats: dict[str, int] | None = None
        self._reservations: dict[str, Reservation] = {}
        self._has_all = False  # every reservation of the file is in memory
        self._changed_used: dict[tuple[str, int], None] = {}
        self._changed_reservations: dict[str, None] = {}

    # -- counters --------------------------------------------------------------------------------------------------------------------

    def used(self, counter: str, bucket: int) -> int | None:
        return self._counter(counter).buckets.get(bucket)

    def buckets(self, counter: str) -> list[int]:
        return list(self._counter(counter).buckets)

    def set_used(self, counter: str, window: Window, bucket: int, used: int) -> None:
        held = self._counter(counter)
        held.window, held.buckets[bucket] = window.value, used
        self._changed_used[counter, bucket] = None

    def remove_bucket(self, counter: str, bucket: int) -> None:
        del self._counter(counter).buckets[bucket]
        self._changed_used[counter, bucket] = None

    def add_used(self, counter: str, bucket: int, amount: int) -> None:
        buckets = self._counter(counter).buckets
        if bucket in buckets:
            buckets[bucket] = max(0, buckets[bucket] + amount)
            self._changed_used[counter, bucket] = None

    def remove_minutes(self, running: int) -> None:
        """All counters are dropped from memory too, since some are of clients that send no more requests."""
        self.write()
        unread = f"window = 'minute' AND (bucket < ? OR bucket > ?) LIMIT {MAX_MINUTES_REMOVED}"
        self._execute(
            f"DELETE FROM used WHERE (counter, bucket) IN (SELECT counter, bucket FROM used WHERE {unread})", (running - 1, running)
        )
        self._counters.clear()

    def _counter(self, name: str) -> _Counter:
        if (counter := self._counters.get(name)) is None:
            counter = self._counters[name] = _Counter()
            for bucket, counter.window, used in self._execute("SELECT bucket, window, used FROM used WHERE counter = ?", (name,)):
                counter.buckets[bucket] = used
        return counter

    # -- reservations ----------------------------------------------------------------------------------------------------------------

    def reservation(self, reservation_id: str) -> Reservation | None:
        reservation = self._reservations.get(reservation_id)
        if reservation is None and not self._has_all and reservation_id not in self._changed_reservations:
            row = self._execute("SELECT * FROM reservations WHERE id = ?", (reservation_id,)).fetchone()
            if row is not None:
                reservation = self._reservations[reservation_id] = _reservation(row)
        return reservation

    def put_reservation(self, reservation: Reservation) -> None:
        self._reservations[reservation.id] = reservation
        self._changed_reservations[reservation.id] = None

    def remove_reservation(self, reservation_id: str) -> None:
        self._reservations.pop(reservation_id, None)
        self._changed_reservations[reservation_id] = None

    def save(self, gateway: str, saved: Mapping[str, Amounts]) -> None:
        for one in self.reservations_of(gateway):
            if saved.get(one.id, one.saved) != one.saved:
                self.put_reservation(replace(one, saved=saved[one.id]))

    def reservations_of(self, gateway: str, *, until_beat: int | None = None) -> list[Reservation]:
        of_gateway = [one for one in self._all() if one.gateway == gateway]
        return [one for one in of_gateway if until_beat is None or one.beat <= until_beat]

    def remove_expired(self, now_ms: int, limit: int) -> None:
        over = [(ms, one.id) for one in self._all() if (ms := one.expired_ms) is not None and not 0 <= now_ms - ms < LATE_MS]
        for _, reservation_id in sorted(over)[:limit]:
            self.remove_reservation(reservation_id)

    def _all(self) -> list[Reservation]:
        if not self._has_all:
            self.write()
            self._reservations = {row[0]: _reservation(row) for row in self._execute("SELECT * FROM reservations")}
            self._has_all = True
        return list(self._reservations.values())

    # -- gateways --------------------------------------------------------------------------------------------------------------------

    def beats(self) -> dict[str, int]:
        if self._beats is None:
            self._beats = dict(self._execute("SELECT gateway, beat FROM gateways"))
        return dict(self._beats)

    def set_beat(self, gateway: str, beat: int) -> None:
        self._execute("INSERT OR REPLACE INTO gateways VALUES (?, ?)", (gateway, beat))
        self._beats = None

    def remove_gateway(self, gateway: str) -> None:
        self._execute("DELETE FROM gateways WHERE gateway = ?", (gateway,))
        self._beats = None


@lru_cache(maxsize=MAX_STATEMENTS)
def _statement(statement: str, num_columns: int, num_rows: int) -> str:
    marks = f"({', '.join('?' * num_columns)})"
    return statement.format(", ".join([marks] * num_rows))


def _row(reservation: Reservation) -> tuple[object, ...]:
    one = reservation
    return (one.id, one.gateway, one.beat, _encode(one.saved), _encode(one.taken), one.expired_ms)


def _reservation(row: tuple[Any, ...]) -> Reservation:
    reservation_id, gateway, beat, saved, taken, expired_ms = row
    return Reservation(
        id=reservation_id,
        gateway=gateway,
        beat=beat,
        saved=_amounts_decoder.decode(saved),
        taken=_taken_decoder.decode(taken),
        expired_ms=expired_ms,
    )


# Each index is a page more that each transaction writes: reservations are found by id, and all are read once to be found otherwise. Files
# that earlier programs made have two indexes of reservations, which nothing needs.
BOOK = SqliteForm(
    version=1,
    synchronous="NORMAL",
    statements=(
        "CREATE TABLE used (counter TEXT NOT NULL, bucket INTEGER NOT NULL, window TEXT NOT NULL, used INTEGER NOT NULL,"
        " PRIMARY KEY (counter, bucket)) WITHOUT ROWID",
        "CREATE INDEX used_by_minute ON used (bucket) WHERE window = 'minute'",
        "CREATE TABLE reservations (id TEXT PRIMARY KEY NOT NULL, gateway TEXT NOT NULL, beat INTEGER NOT NULL,"
        " saved BLOB NOT NULL, taken BLOB NOT NULL, expired_ms INTEGER) WITHOUT ROWID",
        "CREATE TABLE gateways (gateway TEXT PRIMARY KEY, beat INTEGER NOT NULL)",
    ),
)


class _OwedCharges:
    """Charges that no transaction has written yet. Callers add charges; the thread makes them at the beginning of each transaction. One
    that fails, or whose caller is cancelled before it begins, leaves its charges to the next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: dict[str, Amounts] = {}
        self._running: dict[str, Amounts] = {}
        self._has_failed = False

    def add(self, charges: Charges) -> None:
        if charges.used:
            with self._lock:
                self._added.update(charges.used)

    def begin(self) -> Mapping[str, Amounts]:
        if not self._has_failed:
            self._running.clear()
        self._has_failed = False
        with self._lock:
            self._running.update(self._added)
            self._added.clear()
        return self._running

    def failed(self) -> None:
        self._has_failed = True


class SqliteLimits:
    is_in_order = True
    """Calls of a process run one after the other, and each transaction begins with the charges that were asked for before it."""

    def __init__(self, path: str, *, clock: Clock, unix_time: Clock) -> None:
        """clock: monotonic seconds of the machine. Raises ConfigError."""
        self._clock, self._unix_time = clock, unix_time
        connection = open_sqlite(path, BOOK)
        self._rows = SqliteRows(connection)
        self._owed = _OwedCharges()
        self._book = LimitBook(self._rows)
        self._thread = SqliteThread(connection, begin_write=self._begin, end_write=self._rows.write, write_failed=self._failed)
        self.progress = self._thread.progress

    async def take(self, holder: Holder | None, claims: Sequence[Claim], charges: Charges = NO_CHARGES) -> TakeResult:
        self._owed.add(charges)
        return await self._thread.call(lambda: self._book.take(holder, claims, self._now()))

    async def charge(self, charges: Charges) -> None:
        self._owed.add(charges)
        await self._thread.call(lambda: None)  # an empty transaction, which makes the charges at its beginning

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        return await self._thread.call(lambda: self._renew(gateway, beat, saved))

    async def expire(self, gateway: str, beat: int) -> int:
        return await self._thread.call(lambda: self._book.expire(gateway, beat, self._now()))

    async def close(self) -> None:
        await self._thread.close()

    def _now(self) -> Moment:
        return Moment(int(1000 * self._clock()), int(1000 * self._unix_time()))

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._rows.begin()
        for reservation_id, used in self._owed.begin().items():
            self._book.charge(reservation_id, used)

    def _failed(self) -> None:
        self._rows.failed()
        self._owed.failed()

    def _renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        now = self._now()
        self._rows.remove_minutes(bucket_of(Window.MINUTE, now))
        return self._book.renew(gateway, beat, saved, now)
