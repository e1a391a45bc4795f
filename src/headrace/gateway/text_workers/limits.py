"""Limits one job (CPU seconds, memory, wall time) by its bytes, and refuses a prompt that cannot fit its model's context.

CPU is limited to about five times, memory to about twice, what ordinary work takes on a slow machine: tokenizing a MiB takes about a second
of CPU and 200 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.gateway.http.errors import context_overflow
from headrace.text.token_bytes import TokenBound

MIB = 1 << 20

CPU_BASE_S = 0.1
CPU_PER_MIB_S = 5.0

MEMORY_BASE_BYTES = 64 * MIB
MEMORY_PER_BYTE = 320
"""Bytes of memory per byte of the job, beyond what the worker had when it began."""

WALL_FACTOR = 20
WALL_BASE_S = 30.0
"""Wall time only ends workers that hang without computing; on a busy machine CPU time accrues slowly."""

START_CPU_S = 10.0

START_MEMORY_BYTES = 256 * MIB

HEAVY_BYTES = 64 << 10
"""A heavy job has at least this many bytes. At most all workers but one run heavy jobs (one, in a pool of one); such a worker is killed
when its client disconnects.
"""


@dataclass(frozen=True, slots=True)
class JobLimits:
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


def check_fits(field: str, text: str, bound: TokenBound | None, max_model_len: int | None) -> None:
    """Raise ContextLengthExceeded for a text whose lower bound of tokens is beyond the context."""
    if bound is None or max_model_len is None or 4 * len(text) < max_model_len:
        return
    least = bound.least_tokens(text)
    if least >= max_model_len:
        raise context_overflow(field, max_model_len, part=field, prompt_tokens=least, max_tokens=None, is_least=True)
