"""The book of limits in one SQLite file, which all processes of a machine share, or in this process's memory.

Each call is part of one transaction, so two processes never both take what is left. A commit survives this process and, but for the last
ones, the machine (NORMAL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.core.clock import Clock
from headrace.gateway.stores.sqlite_thread import SqliteForm, SqliteThread
from headrace.policy.limits.book import LATE_MS, Claim, Holder, LimitBook, Reservation, Taken, TakeResult
from headrace.policy.limits.counters import Amounts, Moment, Window, bucket_of

BOOK = SqliteForm(
    version=1,
    synchronous="NORMAL",
    statements=(
        "CREATE TABLE used (counter TEXT NOT NULL, bucket INTEGER NOT NULL, window TEXT NOT NULL, used INTEGER NOT NULL,"
        " PRIMARY KEY (counter, bucket)) WITHOUT ROWID",
        "CREATE INDEX used_by_minute ON used (bucket) WHERE window = 'minute'",
        "CREATE TABLE reservations (id TEXT PRIMARY KEY, gateway TEXT NOT NULL, beat INTEGER NOT NULL,"
        " saved BLOB NOT NULL, taken BLOB NOT NULL, expired_ms INTEGER)",
        "CREATE INDEX reservations_by_gateway ON reservations (gateway, beat)",
        "CREATE INDEX reservations_by_expiry ON reservations (expired_ms) WHERE expired_ms IS NOT NULL",
        "CREATE TABLE gateways (gateway TEXT PRIMARY KEY, beat INTEGER NOT NULL)",
    ),
)

MAX_MINUTES_REMOVED = 256
"""Buckets of past minutes that one `renew` removes at most. They are left by users and keys that send no more requests."""

_encode = msgspec.msgpack.encode
_taken_decoder = msgspec.msgpack.Decoder(tuple[Taken, ...])
_amounts_decoder = msgspec.msgpack.Decoder(Amounts)


class SqliteLimits:
    """A `LimitStore`."""

    def __init__(self, path: str, *, clock: Clock, unix_time: Clock) -> None:
        """path: as `SqliteThread.open` takes it; clock: monotonic seconds of the machine. Raises ConfigError."""
        self._clock, self._unix_time = clock, unix_time
        self._thread = SqliteThread.open(path, BOOK, where="state")
        self._rows = SqliteRows(self._thread.connection)
        self._book = LimitBook(self._rows)

    async def take(self, holder: Holder | None, claims: Sequence[Claim]) -> TakeResult:
        return await self._thread.call(lambda: self._book.take(holder, claims, self._now()))

    async def charge(self, gateway: str, used: Mapping[str, Amounts]) -> None:
        await self._thread.call(lambda: [self._book.charge(reservation_id, amounts) for reservation_id, amounts in used.items()])

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        return await self._thread.call(lambda: self._renew(gateway, beat, saved))

    async def expire(self, gateway: str, beat: int) -> int:
        return await self._thread.call(lambda: self._book.expire(gateway, beat, self._now()))

    async def close(self) -> None:
        await self._thread.close()

    def _now(self) -> Moment:
        return Moment(int(1000 * self._clock()), int(1000 * self._unix_time()))

    def _renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        now = self._now()
        self._rows.remove_minutes(bucket_of(Window.MINUTE, now))
        return self._book.renew(gateway, beat, saved, now)


class SqliteRows:
    """`BookRows` in tables. Used in the thread, within a transaction."""

    def __init__(self, connection: Any) -> None:
        self._execute = connection.execute
        self._executemany = connection.executemany

    def used(self, counter: str, bucket: int) -> int | None:
        found = self._execute("SELECT used FROM used WHERE counter = ? AND bucket = ?", (counter, bucket)).fetchone()
        return None if found is None else int(found[0])

    def buckets(self, counter: str) -> list[int]:
        return [bucket for (bucket,) in self._execute("SELECT bucket FROM used WHERE counter = ?", (counter,))]

    def set_used(self, counter: str, window: Window, bucket: int, used: int) -> None:
        self._execute("INSERT OR REPLACE INTO used VALUES (?, ?, ?, ?)", (counter, bucket, window.value, used))

    def remove_bucket(self, counter: str, bucket: int) -> None:
        self._execute("DELETE FROM used WHERE counter = ? AND bucket = ?", (counter, bucket))

    def add_used(self, counter: str, bucket: int, amount: int) -> None:
        self._execute("UPDATE used SET used = max(0, used + ?) WHERE counter = ? AND bucket = ?", (amount, counter, bucket))

    def reservation(self, reservation_id: str) -> Reservation | None:
        found = self._execute("SELECT * FROM reservations WHERE id = ?", (reservation_id,)).fetchone()
        return None if found is None else _reservation(found)

    def put_reservation(self, reservation: Reservation) -> None:
        row = (
            reservation.id,
            reservation.gateway,
            reservation.beat,
            _encode(reservation.saved),
            _encode(reservation.taken),
            reservation.expired_ms,
        )
        self._execute("INSERT OR REPLACE INTO reservations VALUES (?, ?, ?, ?, ?, ?)", row)

    def remove_reservation(self, reservation_id: str) -> None:
        self._execute("DELETE FROM reservations WHERE id = ?", (reservation_id,))

    def save(self, gateway: str, saved: Mapping[str, Amounts]) -> None:
        rows = [(_encode(amounts), reservation_id, gateway) for reservation_id, amounts in saved.items()]
        self._executemany("UPDATE reservations SET saved = ? WHERE id = ? AND gateway = ?", rows)

    def reservations_of(self, gateway: str, *, until_beat: int | None = None) -> list[Reservation]:
        query, parameters = "SELECT * FROM reservations WHERE gateway = ?", (gateway,)
        if until_beat is None:
            return [_reservation(row) for row in self._execute(query, parameters)]
        return [_reservation(row) for row in self._execute(f"{query} AND beat <= ?", (*parameters, until_beat))]

    def remove_expired(self, now_ms: int, limit: int) -> None:
        oldest = "SELECT id FROM reservations WHERE expired_ms <= ? OR expired_ms > ? ORDER BY expired_ms, id LIMIT ?"
        self._execute(f"DELETE FROM reservations WHERE id IN ({oldest})", (now_ms - LATE_MS, now_ms, limit))

    def remove_minutes(self, running: int) -> None:
        """Remove buckets of minutes that do not count: past ones, and those from before the machine was started again.

        running  number of the running minute's bucket
        """
        unread = f"window = 'minute' AND (bucket < ? OR bucket > ?) LIMIT {MAX_MINUTES_REMOVED}"
        self._execute(
            f"DELETE FROM used WHERE (counter, bucket) IN (SELECT counter, bucket FROM used WHERE {unread})", (running - 1, running)
        )

    def beats(self) -> dict[str, int]:
        return dict(self._execute("SELECT gateway, beat FROM gateways"))

    def set_beat(self, gateway: str, beat: int) -> None:
        self._execute("INSERT OR REPLACE INTO gateways VALUES (?, ?)", (gateway, beat))

    def remove_gateway(self, gateway: str) -> None:
        self._execute("DELETE FROM gateways WHERE gateway = ?", (gateway,))


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
