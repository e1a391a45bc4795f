"""Decides how many threads compute, from the CPUs this process may use and its cgroup's quota.

`plan_threads` decides from values that were read before; `kernels.Backend.limit_threads` sets the number. How threads wait between regions
is set by `tensor.host.openmp`, before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.cpus import allowed_cpus
from headrace.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CpuShare:
    """What this process may use.

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
    """How many threads to compute with, and why. share: None: this process's own.

    Raises: ConfigError for more threads than CPUs: threads wait for each other by spinning, and the spinning threads would keep the
    computing ones from a CPU.
    """
    share = share or read_cpu_share()
    if requested is not None:
        if not 1 <= requested <= share.cpus:
            raise ConfigError("num_threads", f"{requested} is outside 1..{share.cpus}, the CPUs this process may use", "Leave it out.")
        return ThreadPlan(requested, "as configured")
    if share.quota is not None and share.quota < share.cores:
        return ThreadPlan(max(1, int(share.quota)), f"the cgroup allows {share.quota:g} CPUs")
    reason = f"{share.cores} cores" if share.cores == share.cpus else f"{share.cores} cores of {share.cpus} hardware threads"
    return ThreadPlan(share.cores, reason)


# --- reading ---


def read_cpu_share(root: Path = Path("/")) -> CpuShare:
    """This process's share. root: the folder where proc and sys are mounted."""
    cpus = allowed_cpus()
    cpus = list(range(os.cpu_count() or 1)) if cpus is None else cpus
    return CpuShare(len(cpus), count_cores(root, cpus), read_quota(root))


def count_cores(root: Path, cpus: Iterable[int]) -> int:
    """Physical cores among `cpus`; a CPU whose siblings cannot be read counts as a core."""
    cores = set()
    for cpu in cpus:
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or f"cpu {cpu}")
    return max(1, len(cores))


def read_quota(root: Path) -> float | None:
    """The tightest CPU quota of this process's cgroup and those above it, version 2 or 1; None = no limit."""
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [_quota_v2(folder) for folder in _ancestors(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            for mount in {"cpu", controllers}:
                quotas += [_quota_v1(folder) for folder in _ancestors(root / "sys/fs/cgroup" / mount, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The cgroup's folder and all above it up to the mount. A path that leads outside (another namespace) leaves the mount itself."""
    parts = [] if ".." in path.split("/") else [part for part in path.split("/") if part]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _quota_v2(folder: Path) -> float | None:
    """cpu.max: "QUOTA PERIOD" in microseconds, QUOTA may be "max"."""
    fields = (_read(folder / "cpu.max") or "").split()
    return _ratio(fields[0], fields[1]) if len(fields) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or "")


def _ratio(quota: str, period: str) -> float | None:
    """None for "max", -1 and whatever is no number."""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
