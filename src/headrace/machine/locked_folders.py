"""Private directories that one process uses while it lives, and the removal of those whose process was killed.

A directory's lock file is locked before it gets its name, and the lock ends with the process. A socket shows less: between bind and
listen, a living process refuses connections too. A directory without a lock file is left alone: its process may be about to make it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

NOT_LOCKED_YET = ".new"


class LockedFolder:
    """Mode 0700, locked until `remove` or until this process ends."""

    def __init__(self, path: Path, lock_name: str, descriptor: int) -> None:
        self.path = path
        self._lock_name = lock_name
        self._descriptor = descriptor

    @classmethod
    def make(cls, base: Path, prefix: str, lock_name: str) -> Self:
        """lock_name: must differ from that of other kinds of directories with the same prefix. Raises OSError."""
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        try:
            return cls(path, lock_name, _lock(path, lock_name))
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def remove(self) -> None:
        _remove(self.path, self._lock_name)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(folder: Path, lock_name: str) -> bool:
    """False also if this user cannot see the folder, or if the lock file's owner is not the folder's."""
    try:
        descriptor = _open_lock(folder / lock_name)
    except OSError:
        return False
    try:
        if not _is_lock_of(descriptor, folder.stat().st_uid):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def remove_unlocked(base: Path, prefix: str, lock_name: str) -> None:
    for path in base.glob(f"{prefix}*/{lock_name}"):
        with suppress(OSError):
            _remove_if_unlocked(path)


def _remove_if_unlocked(path: Path) -> None:
    info = path.parent.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        return
    descriptor = _open_lock(path)
    try:
        if _is_lock_of(descriptor, info.st_uid):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path.parent, path.name)
    finally:
        os.close(descriptor)


def _remove(folder: Path, lock_name: str) -> None:
    """The lock file goes last: if this process is killed meanwhile, another one finds the rest by it."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != lock_name:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _open_lock(path: Path) -> int:
    """Follows no link and does not block: where all users may write, the lock may be another user's link or FIFO."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_lock_of(descriptor: int, uid: int) -> bool:
    info = os.fstat(descriptor)
    return stat.S_ISREG(info.st_mode) and info.st_uid == uid


def _lock(folder: Path, name: str) -> int:
    descriptor = os.open(folder / (name + NOT_LOCKED_YET), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(folder / (name + NOT_LOCKED_YET), folder / name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
