"""Knows the adapters that may be asked for: name -> folder and digest."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.core.adapters import AdapterSource, check_adapters
from headrace.core.errors import CheckpointError, InvalidRequest, Unavailable
from headrace.core.request import EngineRequest

log = logging.getLogger(__name__)

FILES = ("adapter_config.json", "adapter_model.safetensors")

SETTLED_NS = 2_000_000_000
"""Files that changed later than this before they were read may change again within one tick of the file system's clock."""


class InspectsAdapters(Protocol):
    def inspect(self, folder: Path) -> str:
        """The digest, hex, of a folder whose adapter can be loaded. Raises CheckpointError."""
        ...


Stamp = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Inspected:
    """stamp: of the files as they were read; None: they are read again next time"""

    folder: Path
    digest: str
    stamp: Stamp | None


class AdapterCatalogue:
    """`set` may be called on any thread, by one at a time; a reader sees the old adapters or the new ones."""

    def __init__(self, inspector: InspectsAdapters) -> None:
        self._inspector = inspector
        self._known: Mapping[str, _Inspected] = {}

    @property
    def digests(self) -> dict[str, str]:
        return {name: found.digest for name, found in self._known.items()}

    def set(self, sources: Sequence[AdapterSource]) -> None:
        """All or nothing; reads each folder whose files are new. Raises ConfigError and CheckpointError. One that is optional and cannot be
        used is left out.
        """
        check_adapters(sources)
        known: dict[str, _Inspected] = {}
        for source in sources:
            try:
                known[source.name] = self._inspect(source)
            except CheckpointError as error:
                if not source.is_optional:
                    raise
                log.warning("the adapter %s is left out: %s", source.name, error)
        self._known = known

    def _inspect(self, source: AdapterSource) -> _Inspected:
        """A folder that has been read, and cannot be now, hinders no change of other adapters."""
        folder = Path(source.path)
        before = self._known.get(source.name)
        before = before if before is not None and before.folder == folder else None
        try:
            stamp = _stamp(folder)
        except OSError as error:
            if before is None:
                return _Inspected(folder, self._inspector.inspect(folder), None)
            log.warning("the folder of the adapter %s cannot be read now (%s); it stays as it was read", source.name, error.strerror)
            return before
        if before is not None and stamp is not None and before.stamp == stamp:
            return before
        return _Inspected(folder, self._inspector.inspect(folder), stamp)

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest for an adapter that is not here, and Unavailable where its name has other weights."""
        found = self._known.get(request.adapter or "")
        if found is None:
            raise InvalidRequest("adapter", "one that this engine has", request.adapter, "GET /v1/models lists what is served.")
        if found.digest != request.adapter_digest:
            raise Unavailable(f"the adapter {request.adapter} has other weights here than the request asks for; it can be sent again")

    def folder(self, digest: str) -> Path | None:
        return next((found.folder for found in self._known.values() if found.digest == digest), None)


def _stamp(folder: Path) -> Stamp | None:
    """What changes whenever one of the files does; None where it may not. Raises OSError."""
    stats = [(folder / name).stat() for name in FILES]
    if time.time_ns() - max(stat.st_ctime_ns for stat in stats) < SETTLED_NS:
        return None
    return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats)
