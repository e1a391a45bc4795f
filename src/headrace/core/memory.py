"""Memory that this process may still take: the least of what the machine and the cgroups above the process leave.

Reads /proc and /sys below a given root, so that tests can write their own. `kv_sizing` decides what the memory is used for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number just below 2**63."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that could be taken now, and where the number comes from. is_measured False: how many of them are free is not known."""

    num_bytes: int
    source: str
    is_measured: bool = True


def read_available(root: Path = Path("/")) -> Available:
    """The least of MemAvailable and what each memory cgroup above this process leaves; all memory of the machine without /proc/meminfo."""
    meminfo = _text(root / "proc/meminfo")
    if meminfo is None:
        num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Available(num_bytes, "the machine's memory; what is free is not measured there", is_measured=False)
    found = [Available(parse_meminfo(meminfo), "MemAvailable")]
    for directory in cgroup_directories(_text(root / "proc/self/cgroup") or "", root / "sys/fs/cgroup"):
        if (below_limit := cgroup_available(directory)) is not None:
            found.append(Available(below_limit, "the cgroup's limit"))
    return min(found, key=lambda available: available.num_bytes)


def parse_meminfo(text: str) -> int:
    """Bytes of MemAvailable; of MemFree on kernels that do not say."""
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in text.splitlines()) if rest.split()}
    return fields.get("MemAvailable", fields.get("MemFree", 0))


def cgroup_directories(text: str, mount: Path) -> list[Path]:
    """Directories whose memory limits bind the process with this /proc/self/cgroup, innermost first, of both hierarchies.

    Inside a container the path may be one of the host's that is not visible: the mount's own root, always listed, stands for it then.
    """
    found: list[Path] = []
    for line in text.splitlines():
        hierarchy, controllers, path = ([*line.split(":", 2), "", "", ""])[:3]
        if hierarchy == "0" and not controllers:
            base = mount
        elif "memory" in controllers.split(","):
            base = mount / "memory"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return found


def cgroup_available(directory: Path) -> int | None:
    """Bytes below the limit of one cgroup, v2 or v1 by its files; None without a limit. Cache that is not in use counts as free."""
    for limit_file, usage_file, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(directory / limit_file), _number(directory / usage_file)
        if limit is not None and usage is not None and limit < UNLIMITED:
            cache = _stat(_text(directory / "memory.stat") or "", reclaimable)
            return max(0, limit - max(0, usage - cache))
    return None


def _stat(text: str, name: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), 0)


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return None
