"""The memory and CPU time that this process's cgroups (version 2 or 1) allow. The tightest limit on the way up binds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number just below 2**63."""

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


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
