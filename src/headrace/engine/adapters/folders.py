"""Reads the folders of adapters, each within a time limit."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from headrace.core.adapters import ADAPTER_FILES, MAX_UNANSWERED, AdapterSource, resolve_below
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.regular_files import READ_S, in_time
from headrace.engine.adapters.pool import AdapterWeights

FOLDER_TIMEOUT_S = 50.0
"""A supervisor waits 60 s for an engine that reads a list anew, and a request as long for its adapter: both hear why it cannot be read."""

SETTLED_NS = 2_000_000_000
"""Files that changed later than this before they were read may change again within one tick of the file system's clock."""

Value = TypeVar("Value")
Loaded = TypeVar("Loaded", bound=AdapterWeights, covariant=True)

Stamp = tuple[tuple[int, ...], ...]


class LoadsAdapters(Protocol[Loaded]):
    """max_bytes: of the largest adapter that can be loaded"""

    max_bytes: int

    def inspect(self, folder: Path) -> str:
        """The digest, hex, of a folder whose adapter can be loaded. Raises CheckpointError."""
        ...

    def load(self, folder: Path, digest: str) -> Loaded:
        """Raises CheckpointError, also where the folder has another digest by now."""
        ...


class AdapterFolders(Generic[Loaded]):
    """May be used on any thread. All methods raise CheckpointError for a folder that is not below its root.

    A read that is not answered in time keeps its thread. Until it ends its folder is not read again, and no folder is while there are
    MAX_UNANSWERED: each of them may come to hold an adapter's bytes.
    """

    def __init__(self, loader: LoadsAdapters[Loaded]) -> None:
        self._loader = loader
        self._lock = threading.Lock()
        self._unanswered: dict[threading.Event, str] = {}  # set when the read has ended -> path of its folder

    def stamp(self, source: AdapterSource, *, is_known: bool) -> Stamp | None:
        """What changes whenever one of the files does; None where it may not. Raises OSError, sooner for a folder that was read before."""
        return self._in_time(source, _stamp, READ_S if is_known else FOLDER_TIMEOUT_S)

    def inspect(self, source: AdapterSource) -> str:
        return self._read(source, self._loader.inspect)

    def load(self, source: AdapterSource, digest: str) -> Loaded:
        return self._read(source, lambda folder: self._loader.load(folder, digest))

    def check(self) -> None:
        with self._lock:
            assert not any(ended.is_set() for ended in self._unanswered)
            assert len(self._unanswered) <= MAX_UNANSWERED + 1, "two threads read at once: one for requests, one for a new list"

    def _read(self, source: AdapterSource, work: Callable[[Path], Value]) -> Value:
        try:
            return self._in_time(source, work, FOLDER_TIMEOUT_S)
        except OSError as error:
            raise CheckpointError(source.path, f"cannot be read ({error.strerror})") from error

    def _in_time(self, source: AdapterSource, work: Callable[[Path], Value], limit_s: float) -> Value:
        with self._lock:
            if source.path in self._unanswered.values():
                raise TimeoutError(errno.ETIMEDOUT, "an earlier read of its folder has no answer yet")
            if len(self._unanswered) >= MAX_UNANSWERED:
                raise TimeoutError(errno.ETIMEDOUT, f"the folders of {MAX_UNANSWERED} other adapters do not answer")
        ended = threading.Event()

        def run() -> Value:
            try:
                return work(_folder(source))
            finally:
                with self._lock:
                    ended.set()
                    self._unanswered.pop(ended, None)

        try:
            return in_time(run, limit_s)
        except TimeoutError:
            with self._lock:
                if not ended.is_set():
                    self._unanswered[ended] = source.path
            raise


def _folder(source: AdapterSource) -> Path:
    if source.root is None:
        return Path(source.path)
    try:
        return resolve_below(source.root, source.path)
    except ConfigError as error:  # its reason has paths, which clients are not to see
        where = f"the adapter {source.name} ({source.path})"
        raise CheckpointError(where, "its folder or a file of it is not below lora_root", error.remedy) from error


def _stamp(folder: Path) -> Stamp | None:
    stats = [(folder / name).stat() for name in ADAPTER_FILES]
    if time.time_ns() - max(stat.st_ctime_ns for stat in stats) < SETTLED_NS:
        return None
    return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats)
