"""Usage of one machine, read from its usage.db beside the gateways that write it."""

from __future__ import annotations

import time

from headrace.gateway.ledger.usage_query import UsageQuery, usage_rows
from headrace.gateway.stores.sqlite_thread import SqliteThread


class LocalUsage:
    """A `ledger.UsageSource`, open until `end`."""

    def __init__(self, reader: SqliteThread) -> None:
        self._reader = reader

    async def rows(self, query: UsageQuery, timeout_s: float) -> list[dict[str, object]]:
        """Raises StoreFailed, also where it takes longer than `timeout_s`."""
        return await self._reader.call(lambda: self._rows_in_time(query, timeout_s), is_read=True)

    def close(self) -> None:
        """Its file stays open: a later configuration may read it again."""

    async def end(self) -> None:
        await self._reader.close()

    def _rows_in_time(self, query: UsageQuery, timeout_s: float) -> list[dict[str, object]]:
        deadline = time.monotonic() + timeout_s
        connection = self._reader.connection
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            return usage_rows(connection, query)
        finally:
            connection.set_progress_handler(None, 0)
