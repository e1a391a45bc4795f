"""The CPUs that this process may run on, as far as the system tells."""

from __future__ import annotations

import os


def allowed_cpus() -> list[int] | None:
    """Ids, ascending. None where the system does not tell (macOS): any CPU may be used."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def num_allowed_cpus() -> int:
    cpus = allowed_cpus()
    return (os.cpu_count() or 1) if cpus is None else len(cpus)
