"""usage.db: usage records in SQLite, which every gateway of a machine ships to. It is read by `usage_query`."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence

from msgspec import MsgspecError

from headrace.core.clock import Clock
from headrace.gateway.ledger.record import UsageRecord, decode_record
from headrace.gateway.ledger.sink import SinkFailed
from headrace.gateway.stores.sqlite_thread import SqliteForm, open_sqlite

log = logging.getLogger("headrace.usage")

SQL = "sql"
FILE = "usage.db"
COLUMNS = tuple(UsageRecord.__struct_fields__)
_COUNTS = ("time_ms", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")


def _column(name: str) -> str:
    kind = "INTEGER NOT NULL" if name in _COUNTS else "REAL" if name.endswith("_ms") else "TEXT"
    return f"{name} {kind}{' PRIMARY KEY' if name == 'request_id' else ''}"


USAGE = SqliteForm(
    version=1,
    synchronous="NORMAL",
    statements=(
        f"CREATE TABLE usage ({', '.join(map(_column, COLUMNS))})",
        "CREATE INDEX usage_by_time ON usage (time_ms)",
        "CREATE INDEX usage_by_tenant ON usage (tenant, time_ms)",
    ),
)

_INSERT = f"INSERT OR IGNORE INTO usage ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
_DELETE = "DELETE FROM usage WHERE rowid IN (SELECT rowid FROM usage WHERE time_ms < ? ORDER BY time_ms LIMIT 1000)"
DAY_MS = 86_400_000
DELETE_EVERY_S = 10.0
"""Seconds between two deletions of records that are too old, a thousand at most each time."""


class UsageDb:
    """A `Sink`. A record that was shipped before changes nothing."""

    name = SQL

    def __init__(self, path: str, *, retention_days: int, unix_time: Clock) -> None:
        """Raises ConfigError."""
        self._connection = open_sqlite(path, USAGE, where="state")
        self._retention_ms = retention_days * DAY_MS
        self._unix_time = unix_time
        self._deleted_at = 0.0

    def ship(self, payloads: Sequence[bytes]) -> None:
        rows = list(filter(None, map(_row, payloads)))
        self._transact(lambda: self._connection.executemany(_INSERT, rows))

    def idle(self) -> None:
        """Forget what is too old."""
        now = self._unix_time()
        if abs(now - self._deleted_at) >= DELETE_EVERY_S:
            self._deleted_at = now
            self._transact(lambda: self._connection.execute(_DELETE, (int(now * 1000) - self._retention_ms,)))

    def interrupt(self) -> None:
        self._connection.interrupt()

    def close(self) -> None:
        self._connection.close()

    def _transact(self, work: Callable[[], object]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            work()
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise SinkFailed(f"{FILE}: {error}") from None


def _row(payload: bytes) -> tuple[object, ...] | None:
    """The columns of a record; None for one in a form that this version does not know."""
    try:
        record = decode_record(payload)
    except MsgspecError:
        log.warning("usage: a record of another version cannot be kept in %s", FILE)
        return None
    return tuple([getattr(record, name) for name in COLUMNS])
