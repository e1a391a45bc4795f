"""The store that a configuration names."""

from __future__ import annotations

from headrace.core.clock import Clock
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.redis import RedisStore
from headrace.gateway.stores.sqlite import SqliteStore
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import Store, StoreLimits
from headrace.wire.private_files import read_token


def open_store(config: StoreConfig, tenant_share: float, unix_time: Clock) -> Store:
    """tenant_share: part of the store that one tenant may fill. Raises ConfigError."""
    limits = StoreLimits(entry=config.max_entry_bytes, tenant=int(config.max_bytes * tenant_share), total=config.max_bytes)
    if config.url:
        password = read_token("store.password_file", config.password_file) if config.password_file else None
        return RedisStore.open(config.url, limits, password=password)
    return SqliteStore(config.path or IN_MEMORY, limits, unix_time)
