"""How much memory requests may hold, and memory given back once nothing runs: what a storm took is not kept until the next one.

Cycles of a request (its task, its errors' tracebacks) wait for a collection, which an idle process does not come to; and the C library
keeps freed memory. Both are seen to when the last request has left, never while one runs: each may take milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

from headrace.gateway.access.budget import HeldLimits, MemoryBudget
from headrace.gateway.config import GatewayConfig

LOOK_S = 1.0


MIN_PROMPT_BYTES = 40 << 20
PROMPT_SHARE = 16
"""Without `limits.max_prompt_bytes`: a sixteenth of the machine's memory."""

SEVERAL_TENANTS_SHARE = 0.25
"""Without `limits.max_tenant_share`, where there are several."""


def memory_budget(config: GatewayConfig, machine_bytes: int) -> MemoryBudget:
    """What requests may hold. machine_bytes: `machine_bytes()`"""
    limits = config.limits
    share = limits.max_tenant_share or (SEVERAL_TENANTS_SHARE if config.num_tenants > 1 else 1.0)
    prompts = limits.max_prompt_bytes or max(MIN_PROMPT_BYTES, machine_bytes // PROMPT_SHARE)
    answers, request = limits.max_answer_bytes, limits.max_request_held_bytes
    return MemoryBudget(
        prompts=HeldLimits(request, int(prompts * share), prompts),
        answers=HeldLimits(request, int(answers * share), answers, keeps_reserve=True),
    )


def machine_bytes(root: Path = Path("/")) -> int:
    """Physical memory, or the container's limit where that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # not there, or "max"
            found.append(int((root / name).read_text()))
    return min(found)


async def give_back_when_idle(budget: MemoryBudget) -> None:
    """Until it is cancelled. At two looks once nothing runs: what the connections of the last requests held is freed after them."""
    num_seen, num_due = budget.num_closed, 0
    while True:
        await asyncio.sleep(LOOK_S)
        if budget.num_closed != num_seen:
            num_seen, num_due = budget.num_closed, 2
        if num_due and budget.num_open == 0:
            num_due -= 1
            give_back()


def give_back() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
