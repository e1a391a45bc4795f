"""The book of limits in one SQLite file, which all processes of a machine share, or in this process's memory.

Each call is part of one transaction, so two processes never both take what is left. A commit survives this process and, but for the last
ones, the machine (NORMAL).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from headrace.core.clock import Clock
from headrace.gateway.limits.sqlite_rows import SqliteRows
from headrace.gateway.stores.sqlite_thread import SqliteForm, SqliteThread, open_sqlite
from headrace.policy.limits.book import NO_CHARGES, Charges, Claim, Holder, LimitBook, TakeResult
from headrace.policy.limits.counters import Amounts, Moment, Window, bucket_of

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
    """Charges that were asked for and that no transaction has written yet, by reservation.

    Callers add, the thread makes them at the beginning of each transaction. So one that fails, or whose caller has gone before it began,
    leaves its charges to the next.
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
        """What the transaction that begins now has to charge: besides what was added, all of the last one if that has failed."""
        if not self._has_failed:
            self._running.clear()
        self._has_failed = False
        with self._lock:
            self._running.update(self._added)
            self._added.clear()
        return self._running

    def failed(self) -> None:
        """The last transaction was rolled back, or could not begin."""
        self._has_failed = True


class SqliteLimits:
    """A `LimitStore`."""

    is_in_order = True
    """The calls of a process are done one after the other, and each transaction begins with the charges that were asked for before it."""

    def __init__(self, path: str, *, clock: Clock, unix_time: Clock) -> None:
        """path: as `SqliteThread.open` takes it; clock: monotonic seconds of the machine. Raises ConfigError."""
        self._clock, self._unix_time = clock, unix_time
        connection = open_sqlite(path, BOOK, where="state")
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
        await self._thread.call(lambda: None)  # its transaction begins with them

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
