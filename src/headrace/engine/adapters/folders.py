"""Reads the folders of adapters; one that was loaded at run time only below its root, wherever links lead by then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from headrace.core.adapters import ADAPTER_FILES, AdapterSource, resolve_below
from headrace.core.errors import CheckpointError, ConfigError
from headrace.engine.adapters.pool import AdapterWeights

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
    """All methods raise CheckpointError for a folder that is not below its root."""

    def __init__(self, loader: LoadsAdapters[Loaded]) -> None:
        self._loader = loader

    def stamp(self, source: AdapterSource) -> Stamp | None:
        """What changes whenever one of the files does; None where it may not. Raises OSError."""
        return self._read(source, _stamp)

    def inspect(self, source: AdapterSource) -> str:
        return self._read(source, self._loader.inspect)

    def load(self, source: AdapterSource, digest: str) -> Loaded:
        return self._read(source, lambda folder: self._loader.load(folder, digest))

    def _read(self, source: AdapterSource, work: Callable[[Path], Value]) -> Value:
        return work(_folder(source))


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
