"""The book of limits in one SQLite file, which all processes of a machine share, or in this process's memory.

Each call is part of one transaction, so two processes never both take what is left. A commit survives this process and, but for the last
ones, the machine (NORMAL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.core.clock import Clock
from headrace.gateway.limits.sqlite_rows import SqliteRows
from headrace.gateway.stores.sqlite_thread import SqliteForm, SqliteThread, open_sqlite
from headrace.policy.limits.book import Claim, Holder, LimitBook, TakeResult
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


class SqliteLimits:
    """A `LimitStore`."""

    def __init__(self, path: str, *, clock: Clock, unix_time: Clock) -> None:
        """path: as `SqliteThread.open` takes it; clock: monotonic seconds of the machine. Raises ConfigError."""
        self._clock, self._unix_time = clock, unix_time
        connection = open_sqlite(path, BOOK, where="state")
        self._rows = SqliteRows(connection)
        self._thread = SqliteThread(connection, begin_write=self._rows.begin, end_write=self._rows.write, write_failed=self._rows.failed)
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
