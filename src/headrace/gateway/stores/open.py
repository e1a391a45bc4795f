"""The stores that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.core.clock import Clock
from headrace.gateway.stores.config import StoreConfig
from headrace.gateway.stores.redis import RedisStore
from headrace.gateway.stores.sqlite import SqliteStore
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import Store, StoreLimits
from headrace.wire.private_files import read_token

STREAMS_FILE = "entries.db"


def open_store(config: StoreConfig, state: str, tenant_share: Callable[[], float], unix_time: Clock) -> Store:
    """The store of streams: at `config.url`, in `config.path`, in STREAMS_FILE of the folder `state`, or else in this process's memory.

    tenant_share  part of the store that one tenant may fill

    Raises ConfigError.
    """
    limits = StoreLimits(entry=config.max_entry_bytes, total=config.max_bytes, tenant_share=tenant_share)
    if config.url:
        return RedisStore.open(config.url, limits, password=_password(config))
    in_state = str(Path(state) / STREAMS_FILE) if state else IN_MEMORY
    return SqliteStore(config.path or in_state, limits, unix_time)


def open_part(part: str, config: StoreConfig, state: str, limits: StoreLimits, unix_time: Clock) -> Store:
    """A store of its own beside that of streams, so that neither pushes out entries of the other.

    part   its name on the server of `config.url`, or of its file
    state  folder of that file where no server is named; empty: entries are in the memory of this process

    Raises ConfigError.
    """
    if config.url:
        return RedisStore.open(config.url, limits, password=_password(config), part=part)
    return SqliteStore(str(Path(state) / f"{part}.db") if state else IN_MEMORY, limits, unix_time)


def _password(config: StoreConfig) -> str | None:
    return read_token("store.password_file", config.password_file) if config.password_file else None
