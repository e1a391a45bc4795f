"""Writes files atomically: one process at a time writes a file under a temporary name, under a lock, and renames the complete file.

Imports no torch, for the reason in `cache_folder`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished"


@contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """The descriptor of a file at `path`, locked for this process and emptied; None if another process holds it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not is_named(descriptor, path):  # another process renamed or removed it just now
            yield None
            return
        os.ftruncate(descriptor, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def remove_unfinished(directory: Path) -> None:
    """Keeps those that a running process is writing."""
    for path in directory.glob("*" + UNFINISHED):
        with suppress(OSError), locked(path) as descriptor:
            if descriptor is not None:
                path.unlink()


def remove_oldest(files: list[Path], *, max_files: int, max_bytes: int | None = None, group_of: Callable[[Path], str] = str) -> list[Path]:
    """Remove the files changed longest ago until at most max_files, of at most max_bytes together, are left. Returns these.

    The files of one group count as one, changed when the last of them was. A file that is gone, or cannot be removed, counts as removed.
    """
    found = sorted(((path, *_facts(path)) for path in files), key=lambda entry: entry[1], reverse=True)
    kept: list[Path] = []
    groups: dict[str, int] = {}
    num_bytes = 0
    for path, _, size in found:
        num_bytes += size
        if groups.setdefault(group_of(path), len(groups)) < max_files and (max_bytes is None or num_bytes <= max_bytes):
            kept.append(path)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return kept


def _facts(path: Path) -> tuple[float, int]:
    try:
        facts = path.stat()
    except OSError:  # another start has just removed it
        return 0.0, 0
    return facts.st_mtime, facts.st_size
