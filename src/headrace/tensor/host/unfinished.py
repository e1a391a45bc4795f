"""Files that have their name only when they are whole: written under another by one process at a time, and swept where a process ended
while it wrote. Imports no torch: see `cache_folder`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished"
"""How a file's name ends while it is written."""


@contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """A file that only this process writes to until the end, open and empty; None where another one does. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not is_named(descriptor, path):  # it has its final name by now, or is gone
            yield None
            return
        os.ftruncate(descriptor, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def is_named(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that stands at `path` now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def remove_unfinished(directory: Path) -> None:
    """What processes left behind that ended while they wrote."""
    for path in directory.glob("*" + UNFINISHED):
        with suppress(OSError), locked(path) as descriptor:
            if descriptor is not None:
                path.unlink()


def remove_oldest(files: list[Path], *, max_files: int, max_bytes: int | None = None) -> list[Path]:
    """Remove files, those changed longest ago first, until so many are left and they have so many bytes in all. Returns what is left.

    One that is gone, or cannot be removed, counts as removed. max_bytes: None: any number
    """
    found = sorted(((path, *_facts(path)) for path in files), key=lambda entry: entry[1], reverse=True)
    kept: list[Path] = []
    num_bytes = 0
    for path, _, size in found:
        num_bytes += size
        if len(kept) < max_files and (max_bytes is None or num_bytes <= max_bytes):
            kept.append(path)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return kept


def _facts(path: Path) -> tuple[float, int]:
    """(time of change, bytes)."""
    try:
        facts = path.stat()
    except OSError:  # another start has just removed it
        return 0.0, 0
    return facts.st_mtime, facts.st_size
