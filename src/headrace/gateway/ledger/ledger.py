"""The ledger of a gateway: where a request's usage goes when it has ended, and where it is read again.

Opened by `gateway.compose`. Nothing here waits for a disk or a network on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.gateway.ledger.clickhouse import ClickHouseSink
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.ledger.kafka import KafkaSink
from headrace.gateway.ledger.left_over import SPOOL
from headrace.gateway.ledger.record import UsageRecord
from headrace.gateway.ledger.shipper import Shipper
from headrace.gateway.ledger.sink import Sink
from headrace.gateway.ledger.spool import Spool
from headrace.gateway.ledger.spool_thread import SpoolThread
from headrace.gateway.ledger.usage_db import FILE, USAGE, UsageDb
from headrace.gateway.ledger.usage_query import UsageQuery, usage_rows
from headrace.gateway.stores.sqlite_thread import SqliteThread
from headrace.gateway.stores.store import StoreFailed
from headrace.observe.usage_metrics import SinkReading, UsageReading

CLOSE_S = 2.0
"""Seconds for each of two steps at the end: write what is queued, ship what waits. The rest stays in the spool."""

QUERY_S = 5.0
"""Seconds that a query may take; a tenant with very many records asks for a shorter time."""


class Ledger:
    """Made by `open_ledger`."""

    def __init__(self, spool: Spool, sinks: Sequence[Sink], reader: SqliteThread, config: UsageConfig) -> None:
        self._spool = spool
        self._shippers = [Shipper(spool, sink) for sink in sinks]
        self._reader = reader
        for shipper in self._shippers:
            shipper.start()
        self._thread = SpoolThread(spool, fsync=config.fsync, on_segment=self._wake)

    def write(self, record: UsageRecord) -> None:
        """Never blocks, never raises: a record that finds no room is counted."""
        self._thread.put(record)

    async def rows(self, query: UsageQuery) -> list[dict[str, object]]:
        """What this machine's gateways have recorded, up to about a second ago. Raises Unavailable."""
        try:
            return await self._reader.call(lambda: self._rows_in_time(query), is_read=True)
        except StoreFailed:
            raise Unavailable("Usage cannot be read now. Ask again, or for a shorter time (since, until).") from None

    def reading(self) -> UsageReading:
        """For the metrics page."""
        return UsageReading(
            num_recorded=self._thread.num_recorded,
            dropped=dict(self._thread.dropped),
            sinks={shipper.sink.name: self._sink_reading(shipper) for shipper in self._shippers},
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._close)
        await self._reader.close()

    def _close(self) -> None:
        self._thread.close(CLOSE_S)
        for shipper in self._shippers:
            shipper.stop()
        deadline = time.monotonic() + CLOSE_S
        for shipper in self._shippers:
            shipper.join(deadline - time.monotonic())

    def _wake(self) -> None:
        for shipper in self._shippers:
            shipper.wake()

    def _sink_reading(self, shipper: Shipper) -> SinkReading:
        return SinkReading(
            num_shipped=shipper.num_shipped,
            num_failures=shipper.num_failures,
            num_damaged_bytes=shipper.num_damaged_bytes,
            waiting_bytes=self._spool.waiting_bytes(shipper.sink.name),
        )

    def _rows_in_time(self, query: UsageQuery) -> list[dict[str, object]]:
        deadline = time.monotonic() + QUERY_S
        connection = self._reader.connection
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        return usage_rows(connection, query)


def open_ledger(state: str, config: UsageConfig, unix_time: Clock) -> Ledger | None:
    """The ledger in a state folder; None where there is no folder: usage is not kept then. Raises ConfigError."""
    if not state:
        return None
    folder = Path(state)
    sinks = open_sinks(folder, config, unix_time)
    spool = Spool(folder / SPOOL, [sink.name for sink in sinks], config.max_spool_bytes)
    return Ledger(spool, sinks, SqliteThread.open(str(folder / FILE), USAGE, where="state"), config)


def open_sinks(folder: Path, config: UsageConfig, unix_time: Clock) -> list[Sink]:
    """Where the records of a gateway go. With Kafka, ClickHouse gets them from there. Raises ConfigError."""
    sinks: list[Sink] = [UsageDb(str(folder / FILE), retention_days=config.retention_days, unix_time=unix_time)]
    if config.kafka is not None:
        sinks.append(KafkaSink(config.kafka))
    elif config.clickhouse is not None:
        sinks.append(ClickHouseSink(config.clickhouse))
    return sinks
