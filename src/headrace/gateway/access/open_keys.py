"""The store of keys that a configuration names."""

from __future__ import annotations

from pathlib import Path

from headrace.gateway.access.key_store import KeyStore
from headrace.gateway.access.redis_keys import RedisKeys
from headrace.gateway.access.sqlite_keys import FILE, SqliteKeys
from headrace.gateway.stores.config import StoreConfig
from headrace.wire.private_files import read_token


def open_keys(state: str, store: StoreConfig) -> KeyStore | None:
    """
    state  folder of the embedded stores, which is there; empty: a bare gateway, whose keys are those of its configuration
    store  takes the place of the file where it has a url

    Raises ConfigError.
    """
    if store.url:
        return RedisKeys.open(store.url, password=read_token("store.password_file", store.password_file) if store.password_file else None)
    return SqliteKeys.open(str(Path(state) / FILE)) if state else None
