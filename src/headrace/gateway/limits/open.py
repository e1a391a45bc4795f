"""The store of limits that a configuration names."""

from __future__ import annotations

from pathlib import Path

from headrace.core.clock import Clock
from headrace.gateway.limits.redis import RedisLimits
from headrace.gateway.limits.sqlite import SqliteLimits
from headrace.gateway.limits.store import LimitStore
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.wire.private_files import read_token

FILE = "limits.db"


def open_limits(config: StoreConfig, state: str, *, clock: Clock, unix_time: Clock) -> LimitStore:
    """state: folder of the embedded stores; empty: the book is in memory. Raises ConfigError."""
    if config.url:
        password = read_token("store.password_file", config.password_file) if config.password_file else None
        return RedisLimits.open(config.url, password=password)
    return SqliteLimits(str(Path(state) / FILE) if state else IN_MEMORY, clock=clock, unix_time=unix_time)
