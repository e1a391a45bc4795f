"""Memory that this process may still take: the least of what the machine and the cgroups above the process leave."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headrace.machine.cgroups import UNLIMITED, memory_left, memory_limit, read_text


@dataclass(frozen=True, slots=True)
class Available:
    """is_measured: False if `num_bytes` is the whole memory, free or not."""

    num_bytes: int
    source: str
    is_measured: bool = True


def read_available(root: Path = Path("/")) -> Available:
    """The least of MemAvailable and of what each memory cgroup leaves. Without /proc/meminfo, all memory of the machine."""
    meminfo = read_text(root / "proc/meminfo")
    if meminfo is None:
        return Available(physical_bytes(), "the machine's memory; what is free is not measured there", is_measured=False)
    found = [Available(parse_meminfo(meminfo), "MemAvailable")]
    if (below_limit := memory_left(root)) is not None:
        found.append(Available(below_limit, "the cgroup's limit"))
    return min(found, key=lambda available: available.num_bytes)


def machine_bytes(root: Path = Path("/")) -> int:
    return min(physical_bytes(), memory_limit(root) or UNLIMITED)


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_meminfo(text: str) -> int:
    """MemAvailable in bytes, or MemFree on kernels that do not report it."""
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in text.splitlines()) if rest.split()}
    return fields.get("MemAvailable", fields.get("MemFree", 0))
