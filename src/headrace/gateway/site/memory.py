"""How much memory requests may hold, which part of it and of each store one tenant may fill, and the return of free memory to the system
once no request runs.

Reference cycles of a request (its task, its errors' tracebacks) wait for a garbage collection, which an idle process never starts, and the
C library keeps freed memory. So both are triggered after the last request, never while one runs: each may take milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from contextlib import suppress

from headrace.gateway.access.budget import HeldLimits, RequestMemory
from headrace.gateway.http.config import Limits

CHECK_S = 1.0
"""Seconds between two checks whether any request runs."""

MIN_PROMPT_BYTES = 40 << 20
"""Least bytes for prompts where `limits.max_prompt_bytes` is not set."""

PROMPT_SHARE = 16
"""Without `limits.max_prompt_bytes`, prompts may take 1/N of the machine's memory."""

SEVERAL_TENANTS_SHARE = 0.25
"""Share of each bound that one tenant may fill where there are several tenants and `limits.max_tenant_share` is not set."""


class TenantShare:
    """Share of each bound in bytes that one tenant may fill: the same for what requests hold and for every store.

    It follows the configuration, and the first stored key: keys may be of several tenants from then on.
    """

    def __init__(self, limits: Limits, num_tenants: int) -> None:
        """num_tenants: of the keys in the configuration"""
        self.has_stored_keys = False
        self.change(limits, num_tenants)

    def change(self, limits: Limits, num_tenants: int) -> None:
        """The configuration has changed."""
        self._share, self._num_tenants = limits.max_tenant_share, num_tenants

    def __call__(self) -> float:
        """In (0, 1], at this moment."""
        return self._share or (SEVERAL_TENANTS_SHARE if self.has_several else 1.0)

    @property
    def has_several(self) -> bool:
        """Whether keys may be of several tenants: stored ones may, whatever they are of now."""
        return self.has_stored_keys or self._num_tenants > 1


def memory_budget(limits: Limits, machine_bytes: int, share: float) -> RequestMemory:
    """The two sums of `access.budget`, empty, with their limits.

    machine_bytes  what `core.memory.machine_bytes()` gives
    share          part of each sum that one tenant may hold
    """
    prompts = limits.max_prompt_bytes or default_prompt_bytes(machine_bytes)
    answers, request = limits.max_answer_bytes, limits.max_request_held_bytes
    return RequestMemory(
        prompts=HeldLimits(request, int(prompts * share), prompts),
        answers=HeldLimits(request, int(answers * share), answers, keeps_reserve=True),
    )


def default_prompt_bytes(machine_bytes: int) -> int:
    """`limits.max_prompt_bytes` where it is not set."""
    return max(MIN_PROMPT_BYTES, machine_bytes // PROMPT_SHARE)


async def give_back_when_idle(budget: RequestMemory) -> None:
    """Runs until it is cancelled. Gives memory back at two checks in a row, because connections free some of it after their request."""
    num_seen, num_left = budget.num_closed, 0
    while True:
        await asyncio.sleep(CHECK_S)
        if budget.num_closed != num_seen:
            num_seen, num_left = budget.num_closed, 2
        if num_left and budget.num_open == 0:
            num_left -= 1
            give_back()


def give_back() -> None:
    """Collect garbage, and return free memory to the system where the C library can."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
