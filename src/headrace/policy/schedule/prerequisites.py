"""Tracks what a sequence waits for before it takes a step's budget: named prerequisites, each with the seconds it may take.

The scheduler's own names begin with RESERVED. All other names come from the engine (`engine.preparation`), which may neither add nor
answer a reserved one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

NO_PREREQUISITES: Mapping[str, float] = MappingProxyType({})

RESERVED = "headrace."
FORK = "headrace.fork"
"""The 2nd to nth sequence of a request wait for the first one to compute the prompt."""
HOST_KV = "headrace.host_kv"
"""A sequence whose cached prompt continues in the host tier waits until those blocks are copied, or will not be."""
NO_TIME_LIMIT = math.inf
"""The scheduler's own prerequisites always end: the first sequence ends by itself, and a transfer has its lease's time limit."""


def check_prerequisite(name: str) -> None:
    """Raises ValueError for a name that is the scheduler's own."""
    if name.startswith(RESERVED):
        raise ValueError(f"prerequisite {name!r}: names that begin with {RESERVED!r} are the scheduler's own")
