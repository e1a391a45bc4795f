"""Decides how many threads compute, from the CPUs this process may use and its cgroup's quota."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.machine.resources import allowed_cpus, cpu_quota, read_text


@dataclass(frozen=True, slots=True)
class CpuShare:
    """
    cpus   logical CPUs in its affinity mask
    cores  physical cores among them: two threads of one core share its vector units
    quota  CPUs' worth of time per period that its cgroups allow; None = no limit
    """

    cpus: int
    cores: int
    quota: float | None


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    num_threads: int
    reason: str


def plan_threads(requested: int | None, share: CpuShare | None = None) -> ThreadPlan:
    """Raises ConfigError for more threads than CPUs: threads wait for each other by spinning, and would keep the computing ones from a
    CPU."""
    share = share or read_cpu_share()
    if requested is not None:
        if not 1 <= requested <= share.cpus:
            raise ConfigError("num_threads", f"{requested} is outside 1..{share.cpus}, the CPUs this process may use", "Leave it out.")
        return ThreadPlan(requested, "as given")
    if share.quota is not None and share.quota < share.cores:
        return ThreadPlan(max(1, int(share.quota)), f"the cgroup allows {share.quota:g} CPUs")
    reason = f"{share.cores} cores" if share.cores == share.cpus else f"{share.cores} cores of {share.cpus} hardware threads"
    return ThreadPlan(share.cores, reason)


# --- reading ---


def read_cpu_share(root: Path = Path("/")) -> CpuShare:
    cpus = allowed_cpus()
    cpus = list(range(os.cpu_count() or 1)) if cpus is None else cpus
    return CpuShare(len(cpus), count_cores(root, cpus), cpu_quota(root))


def count_cores(root: Path, cpus: Iterable[int]) -> int:
    cores = set()
    for cpu in cpus:
        siblings = read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or f"cpu {cpu}")
    return max(1, len(cores))
