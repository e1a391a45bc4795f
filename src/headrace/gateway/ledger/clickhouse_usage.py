"""Usage of a whole site, asked of ClickHouse: the same rows as `usage_query.usage_rows` gives of one machine.

Asking is a connection per question, in threads of its own: a server that hangs keeps nothing waiting but the questions.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from headrace.gateway.ledger.clickhouse import UNKNOWN_DATABASE, UNKNOWN_TABLE, ClickHouseRefused, ClickHouseSink
from headrace.gateway.ledger.config import ClickHouseConfig
from headrace.gateway.ledger.usage_query import QUANTILES, SqlDialect, UsageQuery, rows_of, usage_statement

MAX_QUESTIONS = 2
"""Questions that are with the server at a time; a further one waits for one of these to end."""

DAY = "toString(toDate(intDiv(time_ms, 86400000)))"
"""A number is a day since 1970 for toDate; the server's time zone has no part in it."""


def clickhouse_dialect(config: ClickHouseConfig) -> SqlDialect:
    """Rows that were shipped twice and are not merged yet are one row by FINAL."""
    return SqlDialect(
        table=f"{config.database}.{config.table} FINAL",
        day=DAY,
        value=lambda _, value: _literal(value),
        quantiles=_quantiles,
    )


def clickhouse_rows(config: ClickHouseConfig, query: UsageQuery, *, timeout_s: float) -> list[dict[str, object]]:
    """None where nothing was ever shipped. Raises SinkFailed and ConfigError."""
    client = ClickHouseSink(config, answer_s=timeout_s)
    statement = f"{usage_statement(query, clickhouse_dialect(config))} FORMAT JSONCompact"
    try:
        answer = client.query(statement, settings={"max_execution_time": timeout_s, "output_format_json_quote_64bit_integers": 0})
    except ClickHouseRefused as refused:
        if refused.code in (UNKNOWN_TABLE, UNKNOWN_DATABASE):
            return []
        raise
    finally:
        client.close()
    return rows_of(query, json.loads(answer)["data"])


class ClickHouseUsage:
    """A `ledger.UsageSource`."""

    def __init__(self, config: ClickHouseConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(MAX_QUESTIONS, thread_name_prefix="usage-read")

    async def rows(self, query: UsageQuery, timeout_s: float) -> list[dict[str, object]]:
        """Raises SinkFailed and TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            return await loop.run_in_executor(self._threads, lambda: clickhouse_rows(self._config, query, timeout_s=timeout_s))

    def close(self) -> None:
        """Questions that were asked before are answered still."""
        self._threads.shutdown(wait=False)


def _quantiles(field: str) -> str:
    """An empty array where no record of the group has the field: of no numbers ClickHouse gives zeros, or no numbers, by its version."""
    found = f"quantilesExact({', '.join(map(str, QUANTILES))})({field})"
    return f"arraySlice({found}, 1, if(count({field}) = 0, 0, {len(QUANTILES)}))"


def _literal(value: int | str) -> str:
    """Parameters of statements are newer than the oldest server that is asked here."""
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
