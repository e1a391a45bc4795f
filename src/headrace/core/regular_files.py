"""Reads a file that an operator names, so that no file can hold up the process or fill its memory.

Only a regular file is read, up to a bound, by a thread of its own that is left behind after a time limit: a FIFO, a device, or a server of
files that does not answer would block its reader for ever, and a thread of a pool would block the end of the process as well.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

MAX_FILE_BYTES = 16 << 20
"""A configuration file: 100,000 API keys."""

MAX_SECRET_BYTES = 1 << 20
"""A file with a token, a password, properties or certificates."""

READ_S = 5.0

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_file(path: str | Path, max_bytes: int) -> bytes:
    """Raises OSError, with the reason in `strerror`, for a file that is no regular one, that has more bytes, that changes while it is read,
    that takes more than READ_S seconds, or that cannot be opened.
    """
    return in_time(lambda: _read(path, max_bytes))


class FileThread(threading.Thread):
    """May wait for the file system for ever, and ends with the process. `in_time` in it starts no other thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(target=work, name="file", daemon=True)


def in_time(work: Callable[[], Value], limit_s: float | None = None) -> Value:
    """The result of `work`, done by a `FileThread`. In such a thread it is done there, and without a limit.

    Raises what `work` raises, OSError for a path with a NUL or where no thread can be started, or TimeoutError after `limit_s` seconds
    (None: READ_S).
    """
    if isinstance(threading.current_thread(), FileThread):
        return _asked(work)
    done = _begun(work)
    limit_s = READ_S if limit_s is None else limit_s
    if not wait([done], limit_s).done:
        del done  # the error's traceback would keep what is read late
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:g} s")
    return done.result()


def _begun(work: Callable[[], Value]) -> Future[Value]:
    done: Future[Value] = Future()

    def run() -> None:
        try:
            done.set_result(_asked(work))
        except BaseException as error:  # raised to the caller below
            done.set_exception(error)

    try:
        FileThread(run).start()
    except RuntimeError as error:  # the limit of threads
        raise OSError(errno.EAGAIN, str(error)) from error
    return done


def _asked(work: Callable[[], Value]) -> Value:
    try:
        return work()
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from error


def check_regular(path: str | Path) -> None:
    """Raises OSError, with the reason in `strerror`, for what is no regular file. For a file that foreign code opens by its path."""
    _check_kind(os.stat(path))


def _read(path: str | Path, max_bytes: int) -> bytes:
    check_regular(path)  # before it is opened, which alone has effects at some devices
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        _check_kind(before)
        data = bytearray()
        while len(data) <= max_bytes and (piece := file.read(max_bytes + 1 - len(data))):
            data += piece
        after = os.fstat(file.fileno())
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes")
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise OSError(errno.EBUSY, "it changed while it was read")
    return bytes(data)


def _check_kind(info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, f"{_KINDS.get(stat.S_IFMT(info.st_mode), 'something else')}, not a regular file")
