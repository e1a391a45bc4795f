"""Does what an operator does to keys and tenants of a state folder, for tests."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from virtual_time import VirtualTimeLoop

from headrace.core.clock import Clock
from headrace.gateway.access.administration import Administration
from headrace.gateway.access.key_store import open_keys
from headrace.gateway.stores.config import StoreConfig
from headrace.policy.limits.tier import BUILT_IN_TIERS


def administration(state: Path, url: str = "", *, actor: str = "test") -> Administration:
    """In a test on virtual time, by its clock."""
    store = open_keys(str(state), StoreConfig(url=url))
    assert store is not None
    return Administration(store, tiers=BUILT_IN_TIERS, unix_time=_unix_time(), actor=actor)


def _unix_time() -> Clock:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time
    return loop.unix_time if isinstance(loop, VirtualTimeLoop) else time.time
