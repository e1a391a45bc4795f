"""Memory, CPUs and open files that this process may use, as the machine, its affinity and its cgroups (version 2 or 1) leave them.

The tightest limit on the way up binds.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import counted

UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number just below 2**63."""


_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


UNKNOWN_OPEN = 32
"""Assumed where the system does not list the open descriptors."""


@dataclass(frozen=True, slots=True)
class Available:
    """is_measured: False if `num_bytes` is the whole memory, free or not."""

    num_bytes: int
    source: str
    is_measured: bool = True


def read_available(root: Path = Path("/")) -> Available:
    meminfo = read_text(root / "proc/meminfo")
    if meminfo is None:
        return Available(physical_bytes(), "the machine's memory; what is free is not measured there", is_measured=False)
    candidates = [Available(parse_meminfo(meminfo), "MemAvailable")]
    if (below_limit := memory_left(root)) is not None:
        candidates.append(Available(below_limit, "the cgroup's limit"))
    return min(candidates, key=lambda available: available.num_bytes)


def memory_limit(root: Path = Path("/")) -> int | None:
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """None: no limit. Inactive file cache counts as free."""
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU seconds per second; None without a limit."""
    return min((quota for folder in folders("cpu", root) if (quota := _quota(folder)) is not None), default=None)


def folders(controller: str, root: Path) -> Iterator[Path]:
    """Folders whose limits of this controller may bind the process, innermost first, of cgroups 1 and 2.

    The mount's own root is always listed: inside a container, the path of the process may be a path of the host that is not visible.
    """
    mount = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or f"0::/\n1:{controller}:/").splitlines():
        hierarchy, controllers, path = ([*line.split(":", 2), "", "", ""])[:3]
        if hierarchy == "0" and not controllers:
            bases = [mount]
        elif controller in controllers.split(","):
            bases = [mount / name for name in dict.fromkeys((controller, controllers))]  # mounted together, or under a plain name
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from (base.joinpath(*parts[:depth]) for base in bases for depth in range(len(parts), -1, -1))


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    for folder in folders("memory", root):
        for limit_file, usage_file, reclaimable in _MEMORY_FILES:
            limit = _number(read_text(folder / limit_file))
            if limit is not None and limit < UNLIMITED:
                lines = [line.split() for line in (read_text(folder / "memory.stat") or "").splitlines()]
                cache = next((int(line[1]) for line in lines if line[:1] == [reclaimable]), 0)
                yield limit, max(0, (_number(read_text(folder / usage_file)) or 0) - cache)


def _quota(folder: Path) -> float | None:
    """CPU seconds per second; None without a limit, which the file writes as "max" or -1."""
    fields = (read_text(folder / "cpu.max") or "").split()
    if len(fields) != 2:
        fields = [read_text(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    quota, period = map(_number, fields)
    return quota / period if quota is not None and period else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def allowed_cpus() -> list[int] | None:
    """Ids, ascending. None where the system does not tell (macOS): any CPU may be used."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def memory_domains(cpus: Sequence[int], root: Path = Path("/")) -> list[list[int]]:
    """These CPUs by the memory that is next to them (NUMA nodes), domains without one of them left out.

    CPUs of which the system says nothing are one domain.
    """
    folders_of_nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    node_of = {cpu: folder.name for folder in folders_of_nodes for cpu in _cpu_list(read_text(folder / "cpulist") or "")}
    names = dict.fromkeys([folder.name for folder in folders_of_nodes] + [""])
    domains = ([cpu for cpu in cpus if node_of.get(cpu, "") == name] for name in names)
    return [domain for domain in domains if domain]


def _cpu_list(text: str) -> Iterator[int]:
    """text: such as 0-3,8"""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@dataclass(frozen=True, slots=True)
class MachineShare:
    index: int
    total: int


def share_of(cpus: Sequence[int] | None, share: MachineShare, root: Path = Path("/")) -> list[int]:
    """Empty (no binding) if the share is the only one, or CPUs are not known. CPUs of one memory domain stay together."""
    number, total = share.index, share.total
    if total == 1 or cpus is None:
        return []
    if total >= len(cpus):
        return [cpus[number % len(cpus)]]
    cpus = list(chain(*memory_domains(cpus, root)))
    return list(cpus[number * len(cpus) // total : (number + 1) * len(cpus) // total])


def num_allowed_cpus() -> int:
    cpus = allowed_cpus()
    return (os.cpu_count() or 1) if cpus is None else len(cpus)


def why_crowded(num_processes: int, num_threads: int) -> str:
    """A warning to ranks of `num_threads` each. Empty: every thread has a CPU."""
    num_cpus = min(num_allowed_cpus(), max(1, int(cpu_quota() or UNLIMITED)))
    if num_processes * num_threads <= num_cpus:
        return ""
    threads = f" of {num_threads} threads" if num_threads > 1 else ""
    where = f"{num_processes} processes{threads} on {counted(num_cpus, 'CPU')}"
    return f"{where}: those that share one wait for each other in every layer; use fewer"


class ProcessMemory(NamedTuple):
    """Bytes. size: the address space; anonymous: `resident` without mapped files"""

    size: int
    resident: int
    anonymous: int


def process_memory() -> ProcessMemory:
    """Zeros without /proc."""
    size, resident, shared = map(int, (read_text(Path("/proc/self/statm")) or "0 0 0").split()[:3])
    page = resource.getpagesize()
    return ProcessMemory(size * page, resident * page, (resident - shared) * page)


def trim_heap() -> None:
    """Gives memory that was freed back to the system."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def machine_bytes(root: Path = Path("/")) -> int:
    return min(physical_bytes(), memory_limit(root) or UNLIMITED)


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_meminfo(text: str) -> int:
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in text.splitlines()) if rest.split()}
    return fields.get("MemAvailable", fields.get("MemFree", 0))


def raise_open_files_limit(wanted: int) -> int:
    """Raise the soft limit on open files to `wanted`, or to the hard limit if that is lower. Never lowers it. Returns the limit in
    force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (wanted if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    allowed = min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return allowed
    return soft


def num_open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return UNKNOWN_OPEN
