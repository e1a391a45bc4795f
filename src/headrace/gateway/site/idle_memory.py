"""Gives free memory back to the system once no request runs: reference cycles of a request wait for a garbage collection, which an
idle process never starts, and the C library keeps freed memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from contextlib import suppress

from headrace.gateway.access.memory_charges import RequestMemory

CHECK_S = 1.0


async def give_back_when_idle(memory: RequestMemory) -> None:
    """Until cancelled. Waits for two idle checks in a row: connections free some memory only after their request."""
    num_seen, num_left = memory.num_closed, 0
    while True:
        await asyncio.sleep(CHECK_S)
        if memory.num_closed != num_seen:
            num_seen, num_left = memory.num_closed, 2
        if num_left and memory.num_open == 0:
            num_left -= 1
            give_back()


def give_back() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
