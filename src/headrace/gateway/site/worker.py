"""Says which of several gateway processes on one port this one is.

Each takes its part of a limit on all requests of the site, and none borrows from another; a limit on one request is the same in each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core.option import options
from headrace.gateway.http.config import Limits
from headrace.gateway.site.memory import default_prompt_bytes

SHARED_LIMITS = tuple(name for name, described in options(Limits) if described.is_shared)


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """index: from 0; a restarted worker keeps it"""

    index: int
    folder: Path

    @property
    def name(self) -> str:
        return f"gateway-{self.index}"

    def socket(self, index: int) -> Path:
        return self.folder / f"w{index}.sock"


def part_of(limits: Limits, num_workers: int, machine_bytes: int) -> Limits:
    if limits.max_prompt_bytes is None:
        limits = replace(limits, max_prompt_bytes=default_prompt_bytes(machine_bytes))
    return divided(limits, num_workers)


def divided(limits: Limits, num_workers: int) -> Limits:
    parts = {name: -(-getattr(limits, name) // num_workers) for name in SHARED_LIMITS if getattr(limits, name) is not None}
    return replace(limits, **parts)
