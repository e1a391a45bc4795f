"""Computes the limits of memory charges and a tenant's share of every bound, and gives free memory back once no request runs.

Reference cycles of a request wait for a garbage collection, which an idle process never starts, and the C library keeps freed memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

from headrace.gateway.access.memory_charges import ChargeLimits, MemoryLimits, RequestMemory
from headrace.gateway.http.config import Limits

CHECK_S = 1.0
MIN_PROMPT_BYTES = 40 << 20

MAX_REQUEST_BYTES = 32 << 20
"""For prompts, and for answers; a request with more is refused with 413."""

PROMPT_SHARE = 16
"""Prompts may take 1/N of the machine's memory."""

SEVERAL_TENANTS_SHARE = 0.25
"""Where `limits.max_tenant_share` is not set."""


def memory_limits(limits: Limits, machine_bytes: int, tenant_share: Callable[[], float]) -> MemoryLimits:
    prompts = limits.max_prompt_bytes or default_prompt_bytes(machine_bytes)
    return MemoryLimits(
        prompts=ChargeLimits(MAX_REQUEST_BYTES, prompts, tenant_share),
        answers=ChargeLimits(MAX_REQUEST_BYTES, limits.max_answer_bytes, tenant_share, keeps_reserve=True),
    )


def default_prompt_bytes(machine_bytes: int) -> int:
    return max(MIN_PROMPT_BYTES, machine_bytes // PROMPT_SHARE)


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


class TenantShare:
    """The share of every bound that one tenant may fill. Changes with the configuration, and with the first stored key: from then on keys
    may be of several tenants.
    """

    def __init__(self, max_share: float | None, num_tenants: int) -> None:
        self._has_stored_keys = False
        self.change(max_share, num_tenants)

    def change(self, max_share: float | None, num_tenants: int) -> None:
        self._max_share, self._num_tenants = max_share, num_tenants

    def note_stored_keys(self) -> None:
        self._has_stored_keys = True

    def __call__(self) -> float:
        return self._max_share or (SEVERAL_TENANTS_SHARE if self.has_several else 1.0)

    @property
    def has_several(self) -> bool:
        """True with any stored key, since later ones may be of others."""
        return self._has_stored_keys or self._num_tenants > 1
