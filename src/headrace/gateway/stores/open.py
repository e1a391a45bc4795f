"""Opens the stores that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.clock import Clock
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.redis import RedisStore, open_redis
from headrace.gateway.stores.sqlite import SqliteStore
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import Store, StoreLimits

MAX_STREAMS_BYTES = 256 << 20

MAX_STREAM_BYTES = 1 << 20
"""A longer answer (eight bytes per token) cannot be continued."""


@dataclass(frozen=True, slots=True)
class Stores:
    """Each part is a store of its own: none pushes out entries of another."""

    config: StoreConfig
    state: str
    tenant_share: Callable[[], float]
    unix_time: Clock

    def limits(self, *, entry: int, total: int) -> StoreLimits:
        return StoreLimits(entry=entry, total=total, tenant_share=self.tenant_share)

    def open(self, part: str, limits: StoreLimits) -> Store:
        """Raises ConfigError."""
        if self.config.url:
            return RedisStore(open_redis(self.config.url, password=self.config.password()), limits, part)
        return SqliteStore(str(Path(self.state) / f"{part or 'entries'}.db") if self.state else IN_MEMORY, limits, self.unix_time)

    def open_streams(self) -> Store:
        return self.open("", self.limits(entry=MAX_STREAM_BYTES, total=MAX_STREAMS_BYTES))
