"""Writes usage records to ClickHouse (18.16 or later) over its HTTP interface, and reads the usage of a whole site from there. No client
package is used: those know newer servers only.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlencode

from headrace.gateway.ledger.config import ClickHouseConfig
from headrace.gateway.ledger.record import COLUMNS, SinkFailed
from headrace.gateway.ledger.usage_query import (
    QUANTILES,
    SqlDialect,
    UsageQuery,
    explanation_statement,
    first_value,
    rows_of,
    usage_statement,
)
from headrace.machine.private_files import read_token

log = logging.getLogger("headrace.usage")

T = TypeVar("T")

CLICKHOUSE = "clickhouse"
ANSWER_S = 30.0

INSERT_SETTINGS = {"input_format_skip_unknown_fields": 1}

UNKNOWN_TABLE, UNKNOWN_DATABASE = 60, 81
_CODE = re.compile(r"Code: (\d+)")
MAX_MESSAGE_CHARS = 200


class ClickHouseRefused(SinkFailed):
    """code: ClickHouse's error number; 0: the answer has none"""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(f"clickhouse: {message[:MAX_MESSAGE_CHARS]}")


class ClickHouseSink:
    """A record that is shipped twice becomes one row when ClickHouse merges, or at once for a query with FINAL."""

    name = CLICKHOUSE

    def __init__(self, config: ClickHouseConfig, *, answer_s: float = ANSWER_S) -> None:
        """Connects at the first call. Raises ConfigError."""
        self._config = config
        self._answer_s = answer_s
        self._headers = _headers(config)
        self._tls = _tls(config)
        self._connection: http.client.HTTPConnection | None = None
        self._has_columns = False

    def ship(self, payloads: Sequence[bytes]) -> None:
        statement = f"INSERT INTO {self._config.full_table} FORMAT JSONEachRow"
        rows = b"\n".join(payloads)
        try:
            self._add_columns()
            self.query(statement, rows)
        except ClickHouseRefused as refused:
            if refused.code not in (UNKNOWN_TABLE, UNKNOWN_DATABASE):
                raise
            self.create()
            self.query(statement, rows)

    def _add_columns(self) -> None:
        """Where the user may not add columns, rows lack them."""
        if self._has_columns:
            return
        table = self._config.full_table
        try:
            there = {line.split(b"\t")[0].decode() for line in self.query(f"DESCRIBE TABLE {table} FORMAT TabSeparated").splitlines()}
            for column in [column for column in COLUMNS if column.name not in there]:
                self.query(f"ALTER TABLE {table} ADD COLUMN {column.name} {column.kind.clickhouse}")
        except ClickHouseRefused as refused:
            if refused.code in (UNKNOWN_TABLE, UNKNOWN_DATABASE):
                raise
            log.warning("usage: a column that %s lacks was not added: %s", table, refused)
        self._has_columns = True

    def create(self) -> None:
        """Raises SinkFailed."""
        self.query(f"CREATE DATABASE IF NOT EXISTS {self._config.full_table.partition('.')[0]}")
        self.query(create_table(self._config))

    def query(self, statement: str, body: bytes = b"", *, settings: Mapping[str, float] = INSERT_SETTINGS) -> bytes:
        """body: rows sent after the statement. Raises SinkFailed."""
        path = "/?" + urlencode({"query": statement, **settings})
        is_kept = self._connection is not None
        try:
            return self._ask(path, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            # A server closes connections that were idle; what was inserted twice is one row again.
            if not is_kept or isinstance(error, TimeoutError):
                raise SinkFailed(f"clickhouse: {error or type(error).__name__}") from None
        return self.query(statement, body, settings=settings)

    def idle(self) -> None:
        return

    def interrupt(self) -> None:
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # the connection is already closed
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, path: str, body: bytes) -> bytes:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request("POST", path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            text = answer.decode("utf-8", "replace")
            code = _CODE.search(text)
            raise ClickHouseRefused(int(code[1]) if code else 0, f"{response.status} {text}")
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        address = self._config.address
        host = address.hostname or ""
        if self._tls is not None:
            return http.client.HTTPSConnection(host, address.port or 8443, timeout=self._answer_s, context=self._tls)
        return http.client.HTTPConnection(host, address.port or 8123, timeout=self._answer_s)


def create_table(config: ClickHouseConfig) -> str:
    """Rows with one tenant, time and request id are one row."""
    columns = ", ".join([*(f"{column.name} {column.kind.clickhouse}" for column in COLUMNS), _TIME])
    order = "(tenant, time_ms, request_id)"
    engine = f"ENGINE = ReplacingMergeTree PARTITION BY toYYYYMM(time) ORDER BY {order}"
    return f"CREATE TABLE IF NOT EXISTS {config.full_table} ({columns}) {engine}"


_TIME = "time DateTime MATERIALIZED toDateTime(intDiv(time_ms, 1000))"


def _headers(config: ClickHouseConfig) -> dict[str, str]:
    if not config.user:
        return {}
    password = read_token("usage.clickhouse.password_file", config.password_file)
    return {"X-ClickHouse-User": config.user, "X-ClickHouse-Key": password}


def _tls(config: ClickHouseConfig) -> ssl.SSLContext | None:
    if config.address.scheme != "https":
        return None
    return ssl.create_default_context()


MAX_QUESTIONS = 2

DAY = "toString(toDate(intDiv(time_ms, 86400000)))"
"""A number is a day since 1970 for toDate; the server's time zone has no part in it."""


def clickhouse_dialect(config: ClickHouseConfig) -> SqlDialect:
    """FINAL counts a record once that was shipped twice and is not merged yet."""
    return SqlDialect(
        table=f"{config.full_table} FINAL",
        day=DAY,
        value=lambda _, value: _literal(value),
        quantiles=_quantiles,
    )


def clickhouse_rows(config: ClickHouseConfig, query: UsageQuery, *, timeout_s: float) -> list[dict[str, object]]:
    """Empty if nothing was ever shipped. Raises SinkFailed and ConfigError."""
    return rows_of(query, _data(config, usage_statement(query, clickhouse_dialect(config)), timeout_s))


def _data(config: ClickHouseConfig, statement: str, timeout_s: float) -> list[list[Any]]:
    client = ClickHouseSink(config, answer_s=timeout_s)
    statement = f"{statement} FORMAT JSONCompact"
    try:
        answer = client.query(statement, settings={"max_execution_time": timeout_s, "output_format_json_quote_64bit_integers": 0})
    except ClickHouseRefused as refused:
        if refused.code in (UNKNOWN_TABLE, UNKNOWN_DATABASE):
            return []
        raise
    finally:
        client.close()
    data: list[list[Any]] = json.loads(answer)["data"]
    return data


class ClickHouseUsage:
    def __init__(self, config: ClickHouseConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(MAX_QUESTIONS, thread_name_prefix="usage-read")

    async def rows(self, query: UsageQuery, timeout_s: float) -> list[dict[str, object]]:
        """Raises SinkFailed and TimeoutError."""
        return await self._ask(timeout_s, lambda: clickhouse_rows(self._config, query, timeout_s=timeout_s))

    async def explanation(self, request_id: str, tenant: str | None, timeout_s: float) -> str | None:
        """None: no such record, or an older one. Raises SinkFailed and TimeoutError."""
        statement, _ = explanation_statement(request_id, tenant, clickhouse_dialect(self._config))
        return await self._ask(timeout_s, lambda: first_value(_data(self._config, statement, timeout_s)))

    async def _ask(self, timeout_s: float, ask: Callable[[], T]) -> T:
        async with asyncio.timeout(timeout_s):
            return await asyncio.get_running_loop().run_in_executor(self._threads, ask)

    def close(self) -> None:
        """Running queries are answered."""
        self._threads.shutdown(wait=False)


def _quantiles(field: str) -> str:
    """An empty array for a group without values, of which ClickHouse gives zeros or NaN by its version."""
    quantiles = f"quantilesExact({', '.join(map(str, QUANTILES))})({field})"
    return f"arraySlice({quantiles}, 1, if(count({field}) = 0, 0, {len(QUANTILES)}))"


def _literal(value: int | str) -> str:
    """The oldest supported server has no query parameters."""
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
