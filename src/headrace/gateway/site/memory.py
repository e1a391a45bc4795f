"""Computes the limits of memory charges from the configuration and the machine's memory."""

from __future__ import annotations

from collections.abc import Callable

from headrace.gateway.access.memory_charges import ChargeLimits, MemoryLimits
from headrace.gateway.http.config import Limits

MIN_PROMPT_BYTES = 40 << 20

MAX_REQUEST_BYTES = 32 << 20
"""For prompts, and for answers; a request with more is refused with 413."""

PROMPT_SHARE = 16
"""Prompts may take 1/N of the machine's memory."""


def memory_limits(limits: Limits, machine_bytes: int, tenant_share: Callable[[], float]) -> MemoryLimits:
    prompts = limits.max_prompt_bytes or default_prompt_bytes(machine_bytes)
    return MemoryLimits(
        prompts=ChargeLimits(MAX_REQUEST_BYTES, prompts, tenant_share),
        answers=ChargeLimits(MAX_REQUEST_BYTES, limits.max_answer_bytes, tenant_share, keeps_reserve=True),
    )


def default_prompt_bytes(machine_bytes: int) -> int:
    return max(MIN_PROMPT_BYTES, machine_bytes // PROMPT_SHARE)
