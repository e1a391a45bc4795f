"""Keeps what certificate files hold, and loads it again when they change, so that no connection waits for the file system.

A use that comes LOOK_S after the last look starts the next one, in a thread beside. It gets what is held already, as do all before the
look has ended. So after a quiet time the first connection has the certificates of the last look, and a later one those of the files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.regular_files import READ_S, FileThread, in_time

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Stamp = tuple[tuple[int, ...] | None, ...]

LOOK_S = 1.0
"""Seconds between two looks at the files."""


class Watched(Generic[Value]):
    """What some files hold. One thread at a time looks at them; on a mount that hangs it waits, and no other one is started."""

    def __init__(self, paths: tuple[str, ...], load: Callable[[], Value], clock: Clock = time.monotonic) -> None:
        """load: called here and when the files have changed; raises ConfigError for files that cannot be used"""
        self._paths, self._load, self._clock = paths, load, clock
        self._stamp, self._looked_at = _stamp_of(paths), clock()  # before loading, so that a change meanwhile is seen
        self._loaded = load()
        self._looker = threading.Thread()
        self._logged: tuple[Stamp, str] | None = None

    def current(self) -> Value:
        """What the files held at the last look. Never waits, and raises nothing: files that cannot be used are logged, and tried again."""
        silent_s = self._clock() - self._looked_at
        if silent_s < LOOK_S:
            return self._loaded
        if self._looker.is_alive():
            if silent_s >= READ_S:
                self._report((), f"{self._paths[0]}: the file system does not answer")
            return self._loaded
        self._looked_at += silent_s
        self._looker = FileThread(self._look)
        try:
            self._looker.start()
        except RuntimeError as error:  # the limit of threads
            self._report((), str(error))
        return self._loaded

    def _look(self) -> None:
        stamp = _stamp_of(self._paths)
        if stamp != self._stamp:
            try:
                self._loaded = self._load()
            except ConfigError as error:
                self._report(stamp, str(error))
                return
            self._stamp = stamp  # after a success alone: what failed for want of descriptors works later
            log.info("the certificates were read again: %s", self._paths[0])
        self._logged = None

    def _report(self, stamp: Stamp, reason: str) -> None:
        """Log once why the present files are not used. stamp: theirs; empty where they could not be looked at"""
        if self._logged != (stamp, reason):
            self._logged = stamp, reason
            log.error("changed certificates are not used: %s", reason)


def _stamp_of(paths: tuple[str, ...]) -> Stamp:
    """A value for each file that changes when its content or its mode does; None for a file that is not there."""
    try:
        return in_time(lambda: tuple(_file_stamp(path) for path in paths))
    except OSError:  # at the start, where loading says more
        return ()


def _file_stamp(path: str) -> tuple[int, ...] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino
