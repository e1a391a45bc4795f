"""The limits of memory charges (`access.memory_charges`), from the configuration and the machine."""

from __future__ import annotations

from collections.abc import Callable

from headrace.gateway.access.memory_charges import ChargeLimits, MemoryLimits
from headrace.gateway.http.config import Limits

MIN_PROMPT_BYTES = 40 << 20
"""Least bytes for prompts where `limits.max_prompt_bytes` is not set."""

PROMPT_SHARE = 16
"""Without `limits.max_prompt_bytes`, prompts may take 1/N of the machine's memory."""


def memory_limits(limits: Limits, machine_bytes: int, tenant_share: Callable[[], float]) -> MemoryLimits:
    """
    machine_bytes  what `core.memory.machine_bytes()` gives
    tenant_share   part of each sum that one tenant may hold
    """
    prompts = limits.max_prompt_bytes or default_prompt_bytes(machine_bytes)
    return MemoryLimits(
        prompts=ChargeLimits(limits.max_request_held_bytes, prompts, tenant_share),
        answers=ChargeLimits(limits.max_request_held_bytes, limits.max_answer_bytes, tenant_share, keeps_reserve=True),
    )


def default_prompt_bytes(machine_bytes: int) -> int:
    """`limits.max_prompt_bytes` where it is not set."""
    return max(MIN_PROMPT_BYTES, machine_bytes // PROMPT_SHARE)
