"""Asks whether a server's store has keys, at a start and at a reload: keys let the server listen beyond loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.gateway.stores.config import StoreConfig

T = TypeVar("T")

ASK_S = 5.0
"""Seconds that a starting server waits for its Redis to say whether there are keys."""


def has_stored_keys(state: str, store: StoreConfig) -> bool:
    """Whether the store has ever had a key; nothing is created. Raises ConfigError if the store cannot be asked.

    state, store  as `open_keys` takes them
    """
    from headrace.gateway.access.key_store import FILE
    from headrace.gateway.stores.store import StoreFailed

    if not store.url and not (Path(state) / FILE).exists():
        return False
    try:
        return _run_apart(_has_keys(state, store))
    except (StoreFailed, TimeoutError) as error:
        reason = f"cannot be asked whether there are API keys ({error or 'no answer'})"
        raise ConfigError("gateway.store.url" if store.url else "state", reason) from None


async def _has_keys(state: str, store: StoreConfig) -> bool:
    from headrace.gateway.access.key_store import open_keys

    opened = open_keys(state, store)
    assert opened is not None, "one of the two is given"
    try:
        async with asyncio.timeout(ASK_S):
            return (await opened.state()).has_keys
    finally:
        await opened.close()


def _run_apart(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` that also works below a running event loop, where a reload reads the configuration."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
