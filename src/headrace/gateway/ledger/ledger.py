"""Takes usage records, and answers questions about usage. Nothing here waits for a disk or a network on the event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError, Overloaded, Unavailable
from headrace.gateway.ledger.clickhouse import ClickHouseSink, ClickHouseUsage
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.ledger.kafka import KafkaSink
from headrace.gateway.ledger.record import Sink, SinkFailed, UsageRecord
from headrace.gateway.ledger.shipper import Shipper
from headrace.gateway.ledger.spool import OPEN, Spool
from headrace.gateway.ledger.spool_thread import SpoolThread
from headrace.gateway.ledger.usage_db import FILE, SQL, USAGE, UsageDb
from headrace.gateway.ledger.usage_query import LocalUsage, UsageQuery
from headrace.gateway.stores.sqlite_thread import SqliteThread, open_sqlite
from headrace.gateway.stores.store import StoreFailed, drop_error
from headrace.observe.reading_metrics import SinkReading, UsageReading

T = TypeVar("T")

CLOSE_S = 2.0
"""Seconds for each of two steps at the end: write what is queued, ship what waits."""

QUERY_S = 5.0


class Ledger:
    def __init__(self, spool: Spool, usage_db: UsageDb, local: LocalUsage, config: UsageConfig) -> None:
        """usage_db: sink of every ledger. Raises ConfigError."""
        self._spool = spool
        self._usage_db = usage_db
        self._local = local
        self._source: LocalUsage | ClickHouseUsage = local
        self._asking: set[str | None] = set()
        self._shippers: dict[str, Shipper] = {}
        start = self.prepare(config)
        self._thread = SpoolThread(spool, on_segment=self._wake)
        start()

    def prepare(self, config: UsageConfig) -> Callable[[], None]:
        """Calling the result uses the new sinks from then on. Raises ConfigError."""
        sinks: dict[str, Sink] = {sink.name: sink for sink in (self._usage_db, *far_sinks(config))}
        source = self._local if config.clickhouse is None else ClickHouseUsage(config.clickhouse)
        self._spool.make_folders(list(sinks))
        if not self._shippers:  # at the start: the spool's thread, which is made next, gives all of them what ended processes left open
            self._spool.sinks = tuple(sinks)

        def apply() -> None:
            self._usage_db.retention_days = config.retention_days
            self._spool.sinks = tuple(sinks)
            self._ship_to(sinks)
            former, self._source = self._source, source
            _close(former)

        return apply

    def _ship_to(self, sinks: Mapping[str, Sink]) -> None:
        former = self._shippers
        self._shippers = {name: former.get(name) or Shipper(self._spool, sink) for name, sink in sinks.items()}
        for name, shipper in self._shippers.items():
            if name not in former:
                shipper.start()
            elif sinks[name] is not shipper.sink:
                shipper.change_sink(sinks[name])
        for name in former.keys() - sinks.keys():
            former[name].stop()

    def write(self, record: UsageRecord) -> None:
        """Never blocks and never raises: a record beyond the queue's bound is dropped and counted."""
        self._thread.put(record)

    async def rows(self, query: UsageQuery) -> list[dict[str, object]]:
        """Usage up to about a second ago. Raises Unavailable, and Overloaded while another query about the same tenant runs, since usage.db
        answers one query at a time.
        """
        return await self._ask(query.tenant, lambda: self._source.rows(query, QUERY_S))

    async def explanation(self, request_id: str, tenant: str | None) -> str | None:
        """None: no such request has ended more than about a second ago. tenant: None, of any. Raises as `rows`."""
        return await self._ask(tenant, lambda: self._source.explanation(request_id, tenant, QUERY_S))

    async def _ask(self, tenant: str | None, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The question is answered to its end, also when its client leaves."""
        if tenant in self._asking:
            raise Overloaded("Another request for this usage is being answered; ask again when it has ended.", retry_after_s=1.0)
        asked = asyncio.create_task(question(), name="usage read")
        self._asking.add(tenant)
        asked.add_done_callback(lambda _: self._asking.discard(tenant))
        asked.add_done_callback(drop_error)
        try:
            return await asyncio.shield(asked)
        except (StoreFailed, SinkFailed, ConfigError, TimeoutError):
            raise Unavailable("Usage cannot be read now. Ask again, or for a shorter time (since, until).") from None

    def reading(self) -> UsageReading:
        return UsageReading(
            num_recorded=self._thread.num_recorded,
            dropped=dict(self._thread.dropped),
            sinks={name: self._sink_reading(shipper) for name, shipper in self._shippers.items()},
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._close)
        _close(self._source)
        await self._local.close()

    def _close(self) -> None:
        self._thread.close(CLOSE_S)
        shippers = list(self._shippers.values())
        for shipper in shippers:
            shipper.stop()
        deadline = time.monotonic() + CLOSE_S
        for shipper in shippers:
            shipper.join(deadline - time.monotonic())

    def _wake(self) -> None:
        for shipper in list(self._shippers.values()):
            shipper.wake()

    def _sink_reading(self, shipper: Shipper) -> SinkReading:
        return SinkReading(
            num_shipped=shipper.num_shipped,
            num_failures=shipper.num_failures,
            num_damaged_bytes=shipper.num_damaged_bytes,
            waiting_bytes=self._spool.waiting_bytes(shipper.sink.name),
        )


def _close(source: LocalUsage | ClickHouseUsage) -> None:
    """The reader of usage.db stays open, since a later configuration may use it again."""
    if isinstance(source, ClickHouseUsage):
        source.close()


def open_ledger(state: str, config: UsageConfig, unix_time: Clock) -> Ledger | None:
    """Raises ConfigError."""
    if not state:
        return None
    folder = Path(state)
    usage_db = UsageDb(str(folder / FILE), retention_days=config.retention_days, unix_time=unix_time)
    spool = Spool(folder / SPOOL, [usage_db.name])
    return Ledger(spool, usage_db, LocalUsage(SqliteThread(open_sqlite(str(folder / FILE), USAGE))), config)


def far_sinks(config: UsageConfig) -> list[Sink]:
    """Raises ConfigError."""
    if config.kafka is not None:
        return [KafkaSink(config.kafka)]
    return [] if config.clickhouse is None else [ClickHouseSink(config.clickhouse)]


SPOOL = "spool"


def ship_orphaned(state: Path) -> None:
    """Does nothing while a running gateway ships the records, nor in another user's folder, where new files would be this user's. Raises
    ConfigError.
    """
    folder = state / SPOOL
    if not folder.is_dir() or folder.stat().st_uid != os.geteuid():
        return
    sinks = [path.name for path in folder.iterdir() if path.is_dir() and path.name != OPEN]
    if SQL not in sinks:
        return
    config = UsageConfig()
    spool = Spool(folder, sinks)
    with suppress(OSError, SinkFailed), spool.shipping(SQL) as is_ours:
        if is_ours:
            spool.adopt()
            sink = UsageDb(str(state / FILE), retention_days=config.retention_days, unix_time=time.time)
            try:
                Shipper(spool, sink).ship_waiting()
            finally:
                sink.close()
