"""What was used, by tenant, user, key, model or day: sums over the records of usage.db."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from headrace.core.errors import InvalidRequest
from headrace.policy.limits.price import NANOS

GROUPS: Mapping[str, Mapping[str, str]] = {
    "tenant": {"tenant": "tenant"},
    "user": {"tenant": "tenant", "user": "user"},
    "key": {"tenant": "tenant", "key": "key_id"},
    "model": {"model": "model"},
    "day": {"day": "strftime('%Y-%m-%d', time_ms / 1000, 'unixepoch')"},
}
"""What usage may be grouped by -> the columns of its rows, and how SQL computes each. Two tenants may have users of one name."""

SUMS = {
    "requests": "count(*)",
    "prompt_tokens": "sum(prompt_tokens)",
    "cached_tokens": "sum(cached_tokens)",
    "completion_tokens": "sum(completion_tokens)",
    "cost_nanos": "sum(cost_nanos)",
}
COST = "cost"
_AGO = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
TIME_RULE = "a day (2026-11-30), a time in UTC (2026-11-30T12:00:00Z), or how long ago (90m, 24h, 7d)"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """
    by            keys of GROUPS, at least one
    since, until  Unix milliseconds of arrival: from, and before; None: from the first record, to the last
    tenant        of this one alone; None: of all
    max_rows      rows that are wanted at most; None: all
    """

    by: Sequence[str]
    since_ms: int | None = None
    until_ms: int | None = None
    tenant: str | None = None
    max_rows: int | None = None

    @property
    def columns(self) -> dict[str, str]:
        """Name of each column that groups -> how SQL computes it."""
        return {name: expression for group in self.by for name, expression in GROUPS[group].items()}

    @property
    def names(self) -> list[str]:
        """Keys of a row, in order."""
        return [*self.columns, *SUMS, COST]


def usage_rows(connection: sqlite3.Connection, query: UsageQuery) -> list[dict[str, object]]:
    """One row per group, ordered by what groups; `cost` is in the currency's unit. Raises sqlite3.Error."""
    limits = {"time_ms >= ?": query.since_ms, "time_ms < ?": query.until_ms, "tenant = ?": query.tenant}
    wanted = {condition: value for condition, value in limits.items() if value is not None}
    computed = ", ".join(f"{expression} AS {name}" for name, expression in (query.columns | SUMS).items())
    places = ", ".join(str(place + 1) for place in range(len(query.columns)))
    where = f" WHERE {' AND '.join(wanted)}" if wanted else ""
    text = f"SELECT {computed} FROM usage{where} GROUP BY {places} ORDER BY {places} LIMIT ?"
    found = connection.execute(text, (*wanted.values(), -1 if query.max_rows is None else query.max_rows))
    return [row | {COST: row["cost_nanos"] / NANOS} for row in (dict(zip(query.names, values, strict=False)) for values in found)]


def groups_of(words: Sequence[str]) -> list[str]:
    """Keys of GROUPS from words that may hold several, with commas between. Raises InvalidRequest."""
    found = [word.strip() for words_of_one in words for word in words_of_one.split(",")]
    for word in found:
        if word not in GROUPS:
            raise InvalidRequest("by", f"one or more of {', '.join(GROUPS)}", word)
    return list(dict.fromkeys(found))


def unix_ms_of(field: str, text: str, now: float) -> int:
    """A time as a command or a query gives it. now: Unix seconds. Raises InvalidRequest about `field`."""
    if ago := _AGO.fullmatch(text):
        return int((now - timedelta(**{_UNITS[ago[2]]: int(ago[1])}).total_seconds()) * 1000)
    try:
        time = datetime.fromisoformat(text)
        return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidRequest(field, TIME_RULE, text) from None
