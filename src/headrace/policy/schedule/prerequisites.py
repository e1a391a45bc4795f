"""What a sequence may have to wait for before it takes a step's budget: names, and the seconds each may take.

The scheduler's own begin with RESERVED. All others are the engine's (`engine.preparation`), which may neither add nor answer such a one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

NO_PREREQUISITES: Mapping[str, float] = MappingProxyType({})

RESERVED = "headrace."
FORK = "headrace.fork"
"""Of the 2nd..nth sequence of a request: the first one's prompt has been computed."""
HOST_KV = "headrace.host_kv"
"""Of a sequence whose prompt goes on in the host tier: its blocks are here, or will not come."""
NO_TIME_LIMIT = math.inf
"""Of the scheduler's own: the first sequence ends, and a transfer has a time limit of its own."""


def check_prerequisite(name: str) -> None:
    """Raises ValueError for a name that is the scheduler's own."""
    if name.startswith(RESERVED):
        raise ValueError(f"prerequisite {name!r}: names that begin with {RESERVED!r} are the scheduler's own")
