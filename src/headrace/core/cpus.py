"""The CPUs that this process may run on, as far as the system says."""

from __future__ import annotations

import os


def allowed_cpus() -> list[int] | None:
    """Their numbers, ascending. None where a process cannot ask (macOS): all CPUs of the machine may be used then."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def num_allowed_cpus() -> int:
    """How many; those of the machine where it is not known which are allowed."""
    cpus = allowed_cpus()
    return (os.cpu_count() or 1) if cpus is None else len(cpus)
