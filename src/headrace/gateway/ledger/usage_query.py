"""Asks a store for usage by tenant, user, key, model, adapter or day.

`usage_rows` asks usage.db, and reads whole days from its sums of days.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from headrace.core.errors import InvalidRequest
from headrace.core.money import NANOS
from headrace.gateway.ledger.usage_db import DAY_MS, DAYS, SUMMED
from headrace.gateway.stores.sqlite_thread import SqliteThread, has_table
from headrace.observe.finished_request import Outcome

T = TypeVar("T")

DAY, ADAPTER = "day", "adapter"
GROUPS: Mapping[str, Mapping[str, str]] = {
    "tenant": {"tenant": "tenant"},
    "user": {"tenant": "tenant", "user": "user"},
    "key": {"tenant": "tenant", "key": "key_id"},
    "model": {"model": "model"},
    ADAPTER: {"model": "model", ADAPTER: "adapter_id"},
    DAY: {DAY: "time_ms"},
}
"""A dialect makes a UTC day of time_ms. Two tenants may have users of one name."""

COST = "cost"
QUANTILES = (0.5, 0.99)
QUANTILES_OF = "quantiles_of"
"""The aggregate that connections to usage.db get: SQLite has none."""

_AGO = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
TIME_RULE = "a day (2026-11-30), a time in UTC (2026-11-30T12:00:00Z), or how long ago (90m, 24h, 7d)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlDialect:
    """table      the table, with whatever makes a twice shipped record count once
    value      name and value of a parameter -> its expression in a statement
    quantiles  field -> its QUANTILES over a group's rows, nulls left out, as an array or as JSON of one
    """

    table: str
    day: str
    value: Callable[[str, int | str], str]
    quantiles: Callable[[str], str]
    requests: str = "count(*)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """are_summed: the figures can also be computed from the sums of days"""

    names: Sequence[str]
    statement: Callable[[SqlDialect], Mapping[str, str]]
    values: Callable[[Sequence[Any]], Sequence[object]]
    are_summed: bool


USE = Figures(
    names=("requests", *SUMMED, COST),
    statement=lambda dialect: {"requests": dialect.requests, **{name: f"sum({name})" for name in SUMMED}},
    values=lambda figures: [*figures, figures[-1] / NANOS],
    are_summed=True,
)
"""Requests, tokens and money; `cost` is in the currency's unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """since_ms  Unix milliseconds of the earliest arrival, inclusive; None: no bound
    until_ms  Unix milliseconds of the latest arrival, exclusive; None: no bound
    """

    by: Sequence[str]
    figures: Figures = USE
    since_ms: int | None = None
    until_ms: int | None = None
    tenant: str | None = None
    max_rows: int | None = None

    @property
    def columns(self) -> dict[str, str]:
        return {name: field for group in self.by for name, field in GROUPS[group].items()}

    @property
    def values(self) -> dict[str, int | str]:
        given = {"since_ms": self.since_ms, "until_ms": self.until_ms, "tenant": self.tenant, "max_rows": self.max_rows}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def names(self) -> list[str]:
        return [*self.columns, *self.figures.names]


SQLITE = SqlDialect(
    table="usage",
    day="strftime('%Y-%m-%d', time_ms / 1000, 'unixepoch')",
    value=lambda name, _: f":{name}",
    quantiles=lambda field: f"{QUANTILES_OF}({field})",
)


def usage_statement(query: UsageQuery, dialect: SqlDialect) -> str:
    """The statement for one row per group: first the grouping columns, by which rows are ordered, then the expressions of the figures."""
    grouping = {name: dialect.day if name == DAY else field for name, field in query.columns.items()}
    computed = ", ".join(f"{expression} AS {name}" for name, expression in {**grouping, **query.figures.statement(dialect)}.items())
    limits = {"since_ms": "time_ms >= ", "until_ms": "time_ms < ", "tenant": "tenant = "}
    values = query.values
    where = " AND ".join(condition + dialect.value(name, values[name]) for name, condition in limits.items() if name in values)
    text = f"SELECT {computed} FROM {dialect.table}{f' WHERE {where}' if where else ''}"
    order = ", ".join(grouping)
    most = f" LIMIT {dialect.value('max_rows', values['max_rows'])}" if "max_rows" in values else ""
    return f"{text} GROUP BY {order} ORDER BY {order}{most}"


def explanation_statement(request_id: str, tenant: str | None, dialect: SqlDialect) -> tuple[str, dict[str, str]]:
    values = {"request_id": request_id} if tenant is None else {"request_id": request_id, "tenant": tenant}
    where = " AND ".join(f"{name} = {dialect.value(name, value)}" for name, value in values.items())
    return f"SELECT explain FROM {dialect.table} WHERE {where} LIMIT 1", values


def usage_rows(connection: sqlite3.Connection, query: UsageQuery) -> list[dict[str, object]]:
    has_days = query.figures.are_summed and ADAPTER not in query.by and has_table(connection, DAYS)
    dialect = replace(SQLITE, table=table_of_days(query), requests="sum(requests)") if has_days else SQLITE
    connection.create_aggregate(QUANTILES_OF, 1, QuantilesOfGroup)  # type: ignore[arg-type]  # typed as of whole numbers alone
    return rows_of(query, connection.execute(usage_statement(query, dialect), query.values))


def table_of_days(query: UsageQuery) -> str:
    """A day's row has the time at which the day begins."""
    first = None if query.since_ms is None else -(-query.since_ms // DAY_MS)
    end = None if query.until_ms is None else query.until_ms // DAY_MS
    if first is not None and end is not None and first >= end:
        return f"({_records(query.since_ms, query.until_ms, query.tenant)})"
    days = f"SELECT tenant, user, key_id, model, day * {DAY_MS} AS time_ms, requests, {', '.join(SUMMED)} FROM {DAYS}"
    parts = [_where(days, "day", first, end, query.tenant)]
    if first is not None:
        parts.append(_records(query.since_ms, first * DAY_MS, query.tenant))
    if end is not None:
        parts.append(_records(end * DAY_MS, query.until_ms, query.tenant))
    return f"({' UNION ALL '.join(parts)})"


def _records(since_ms: int | None, until_ms: int | None, tenant: str | None) -> str:
    text = f"SELECT tenant, user, key_id, model, time_ms, 1 AS requests, {', '.join(SUMMED)} FROM usage"
    return _where(text, "time_ms", since_ms, until_ms, tenant)


def _where(text: str, column: str, since: int | None, until: int | None, tenant: str | None) -> str:
    conditions = [] if tenant is None else ["tenant = :tenant"]
    conditions += [] if since is None else [f"{column} >= {since}"]
    conditions += [] if until is None else [f"{column} < {until}"]
    return f"{text} WHERE {' AND '.join(conditions)}" if conditions else text


def rows_of(query: UsageQuery, rows: Iterable[Sequence[Any]]) -> list[dict[str, object]]:
    first, values = len(query.columns), query.figures.values
    return [dict(zip(query.names, [*row[:first], *values(row[first:])], strict=True)) for row in rows]


class QuantilesOfGroup:
    """By the rule of ClickHouse's quantilesExact. Holds 8 bytes for each record."""

    def __init__(self) -> None:
        self._numbers = array("d")

    def step(self, number: float | None) -> None:
        if number is not None:
            self._numbers.append(number)

    def finalize(self) -> str | None:
        ranked = sorted(self._numbers)
        return json.dumps([ranked[int(level * len(ranked))] for level in QUANTILES]) if ranked else None


def groups_of(words: Sequence[str]) -> list[str]:
    """Raises InvalidRequest."""
    names = [word.strip() for words_of_one in words for word in words_of_one.split(",")]
    for word in names:
        if word not in GROUPS:
            raise InvalidRequest("by", f"one or more of {', '.join(GROUPS)}", word)
    return list(dict.fromkeys(names))


def unix_ms_of(field: str, text: str, now: float) -> int:
    """now: Unix seconds. Raises InvalidRequest about `field`."""
    if ago := _AGO.fullmatch(text):
        return int((now - timedelta(**{_UNITS[ago[2]]: int(ago[1])}).total_seconds()) * 1000)
    try:
        time = datetime.fromisoformat(text)
        return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidRequest(field, TIME_RULE, text) from None


class LocalUsage:
    def __init__(self, reader: SqliteThread) -> None:
        self._reader = reader

    async def rows(self, query: UsageQuery, timeout_s: float) -> list[dict[str, object]]:
        """Raises StoreFailed, also after `timeout_s`."""
        return await self._reader.call(lambda: self._rows_in_time(query, timeout_s), is_read=True)

    async def explanation(self, request_id: str, tenant: str | None, timeout_s: float) -> str | None:
        """None: no such record, or an older one. Raises StoreFailed."""
        statement = explanation_statement(request_id, tenant, SQLITE)
        return await self._reader.call(lambda: self._in_time(timeout_s, lambda db: first_value(db.execute(*statement))), is_read=True)

    async def close(self) -> None:
        await self._reader.close()

    def _rows_in_time(self, query: UsageQuery, timeout_s: float) -> list[dict[str, object]]:
        return self._in_time(timeout_s, lambda connection: usage_rows(connection, query))

    def _in_time(self, timeout_s: float, read: Callable[[sqlite3.Connection], T]) -> T:
        deadline = time.monotonic() + timeout_s
        connection = self._reader.connection
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            return read(connection)
        finally:
            connection.set_progress_handler(None, 0)


def first_value(rows: Iterable[Sequence[Any]]) -> str | None:
    return next((value for value, *_ in rows), None)


FROM_CACHE = "cache_tier IN ('response', 'idempotency')"
"""An answer that was there already is counted, and its times are those of no model."""

LATENCIES = ("ttft_ms", "tpot_ms", "queue_ms", "total_latency_ms")

COUNTED = {"completed": (Outcome.COMPLETED,), "cancelled": (Outcome.CANCELLED,), "failed": (Outcome.FAILED, Outcome.DEADLINE)}


def _statement(dialect: SqlDialect) -> Mapping[str, str]:
    return {
        "requests": dialect.requests,
        **{name: f"sum(CASE WHEN outcome IN ({_words(outcomes)}) THEN 1 ELSE 0 END)" for name, outcomes in COUNTED.items()},
        "from_cache": f"sum(CASE WHEN {FROM_CACHE} THEN 1 ELSE 0 END)",
        **{field: dialect.quantiles(f"CASE WHEN {FROM_CACHE} THEN NULL ELSE {field} END") for field in LATENCIES},
    }


def _words(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(f"'{outcome}'" for outcome in outcomes)


def _values(figures: Sequence[Any]) -> Sequence[object]:
    first = 2 + len(COUNTED)
    numbers: list[object] = list(figures[:first])
    for quantiles in figures[first:]:
        numbers += _numbers(quantiles)
    return numbers


def _numbers(quantiles: str | Sequence[float] | None) -> Sequence[float | None]:
    given = json.loads(quantiles) if isinstance(quantiles, str) else quantiles
    return [round(number, 3) for number in given] if given else [None] * len(QUANTILES)


LATENCY = Figures(
    names=("requests", *COUNTED, "from_cache", *(f"{field}_p{round(100 * level)}" for field in LATENCIES for level in QUANTILES)),
    statement=_statement,
    values=_values,
    are_summed=False,
)
"""In ms; answers from caches are counted, and left out of the times."""
