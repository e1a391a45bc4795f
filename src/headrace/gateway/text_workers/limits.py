"""What one job may take: CPU seconds, memory, wall time. Each grows with the job's own bytes, so that a small job cannot take much.

The figures are several times what honest work takes on a slow machine: tokenizing a MiB takes about a second of CPU and 200 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

CPU_BASE_S = 0.1
CPU_PER_MIB_S = 5.0

MEMORY_BASE_BYTES = 64 * MIB
MEMORY_PER_BYTE = 320
"""Beside what the worker had when it began."""

WALL_FACTOR = 20
WALL_BASE_S = 30.0
"""Wall time is only a net under a worker that hangs without computing: on a busy machine CPU time comes slowly."""

START_CPU_S = 10.0
"""Compiling one model's templates and rendering an empty conversation."""

START_MEMORY_BYTES = 256 * MIB

HEAVY_BYTES = 64 << 10
"""A job from here on may hold its worker for long: it never holds the last of several, and is worth killing when nobody waits for it."""


@dataclass(frozen=True, slots=True)
class JobBudget:
    """What one job of `num_bytes` may take."""

    num_bytes: int

    @property
    def cpu_s(self) -> float:
        return CPU_BASE_S + CPU_PER_MIB_S * self.num_bytes / MIB

    @property
    def memory_bytes(self) -> int:
        return MEMORY_BASE_BYTES + MEMORY_PER_BYTE * self.num_bytes

    @property
    def wall_s(self) -> float:
        return WALL_BASE_S + WALL_FACTOR * self.cpu_s

    @property
    def is_heavy(self) -> bool:
        return self.num_bytes >= HEAVY_BYTES
