"""Memory given back once nothing runs: what a storm took is not kept until the next one.

Cycles of a request (its task, its errors' tracebacks) wait for a collection, which an idle process does not come to; and the C library
keeps freed memory. Both are seen to when the last request has left, never while one runs: each may take milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from contextlib import suppress

from headrace.gateway.access.open_requests import OpenRequests

LOOK_S = 1.0


async def give_back_when_idle(open_requests: OpenRequests) -> None:
    """Until it is cancelled."""
    num_seen = open_requests.num_closed
    while True:
        await asyncio.sleep(LOOK_S)
        if open_requests.num_open == 0 and open_requests.num_closed != num_seen:
            num_seen = open_requests.num_closed
            give_back()


def give_back() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
