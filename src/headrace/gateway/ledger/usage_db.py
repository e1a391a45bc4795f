"""Keeps usage records in usage.db, the SQLite file to which every gateway of a machine ships. `usage_query` reads it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence

from msgspec import MsgspecError

from headrace.core.clock import Clock
from headrace.gateway.ledger.record import COLUMNS, SinkFailed, decode_record
from headrace.gateway.stores.sqlite_thread import SqliteForm, open_sqlite

log = logging.getLogger("headrace.usage")

DAY_MS = 86_400_000
SQL = "sql"
FILE = "usage.db"
_TYPES = {column.name: column.kind.sqlite for column in COLUMNS}
DAYS = "usage_days"
"""Sums over the records of a UTC day, kept by triggers, so that a question about a month reads few rows."""

_OF_DAY = f"tenant, time_ms / {DAY_MS}, user, key_id, model"
SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")

_OLD_DAY = f"tenant = OLD.tenant AND day = OLD.time_ms / {DAY_MS} AND user = OLD.user AND key_id = OLD.key_id AND model = OLD.model"


def _changes(row: str, sign: str) -> str:
    return ", ".join(f"{name} = {name} {sign} {row}.{name}" for name in SUMMED)


_MAKE_DAYS = (
    f"CREATE TABLE {DAYS} (tenant TEXT NOT NULL, day INTEGER NOT NULL, user TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL,"
    f" requests INTEGER NOT NULL, {', '.join(f'{name} INTEGER NOT NULL' for name in SUMMED)},"
    " PRIMARY KEY (tenant, day, user, key_id, model)) WITHOUT ROWID",
    f"INSERT INTO {DAYS} SELECT {_OF_DAY}, count(*), {', '.join(f'sum({name})' for name in SUMMED)} FROM usage GROUP BY {_OF_DAY}",
    "CREATE TRIGGER usage_added AFTER INSERT ON usage BEGIN"
    f" INSERT INTO {DAYS} VALUES (NEW.tenant, NEW.time_ms / {DAY_MS}, NEW.user, NEW.key_id, NEW.model, 1,"
    f" {', '.join(f'NEW.{name}' for name in SUMMED)})"
    f" ON CONFLICT DO UPDATE SET requests = requests + 1, {_changes('excluded', '+')}; END",
    "CREATE TRIGGER usage_removed AFTER DELETE ON usage BEGIN"
    f" UPDATE {DAYS} SET requests = requests - 1, {_changes('OLD', '-')} WHERE {_OLD_DAY};"
    f" DELETE FROM {DAYS} WHERE {_OLD_DAY} AND requests = 0; END",
)

USAGE = SqliteForm(
    version=1,
    synchronous="NORMAL",
    statements=(
        f"CREATE TABLE usage ({', '.join(f'{name} {kind}' for name, kind in _TYPES.items())}, PRIMARY KEY (request_id))",
        "CREATE INDEX usage_by_time ON usage (time_ms)",
        "CREATE INDEX usage_by_tenant ON usage (tenant, time_ms)",
    ),
    added={DAYS: _MAKE_DAYS},
    columns={"usage": _TYPES},
)

_INSERT = f"INSERT OR IGNORE INTO usage ({', '.join(_TYPES)}) VALUES ({', '.join('?' * len(_TYPES))})"
_DELETE = "DELETE FROM usage WHERE rowid IN (SELECT rowid FROM usage WHERE time_ms < ? ORDER BY time_ms LIMIT 1000)"
DELETE_EVERY_S = 10.0
"""A thousand records at most each time."""


class UsageDb:
    """A `Sink` in usage.db, a SQLite file. Shipping a record a second time changes nothing."""

    name = SQL

    def __init__(self, path: str, *, retention_days: int, unix_time: Clock) -> None:
        """Raises ConfigError."""
        self._connection = open_sqlite(path, USAGE)
        self.retention_days = retention_days
        self._unix_time = unix_time
        self._deleted_at = 0.0

    def ship(self, payloads: Sequence[bytes]) -> None:
        rows = list(filter(None, map(_row, payloads)))
        self._transact(lambda: self._connection.executemany(_INSERT, rows))

    def idle(self) -> None:
        now = self._unix_time()
        if abs(now - self._deleted_at) >= DELETE_EVERY_S:
            self._deleted_at = now
            self._transact(lambda: self._connection.execute(_DELETE, (int(now * 1000) - self.retention_days * DAY_MS,)))

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
    try:
        record = decode_record(payload)
    except MsgspecError:
        log.warning("usage: a record of another version cannot be kept in %s", FILE)
        return None
    return tuple([getattr(record, name) for name in _TYPES])
