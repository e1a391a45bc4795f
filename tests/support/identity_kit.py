"""What an operator does to keys and tenants of a state folder, for tests."""

from __future__ import annotations

import time
from pathlib import Path

from headrace.gateway.access.administration import Administration
from headrace.gateway.access.open_keys import open_keys
from headrace.gateway.stores.config import StoreConfig
from headrace.policy.limits.tier import BUILT_IN_TIERS


def administration(state: Path, url: str = "", *, actor: str = "test") -> Administration:
    store = open_keys(str(state), StoreConfig(url=url))
    assert store is not None
    return Administration(store, tiers=BUILT_IN_TIERS, unix_time=time.time, actor=actor)
