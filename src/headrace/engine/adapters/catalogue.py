"""Knows the adapters that may be asked for: name -> folder and digest."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.core.adapters import AdapterSource, check_adapters
from headrace.core.errors import CheckpointError, Unavailable
from headrace.core.request import EngineRequest
from headrace.engine.adapters.folders import AdapterFolders, Stamp
from headrace.engine.adapters.pool import AdapterWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Inspected:
    """stamp: of the files as they were read; None: they are read again next time"""

    source: AdapterSource
    digest: str
    stamp: Stamp | None


class AdapterCatalogue:
    """`set` may be called on any thread, by one at a time; a reader sees the old adapters or the new ones."""

    def __init__(self, folders: AdapterFolders[AdapterWeights]) -> None:
        self._folders = folders
        self._known: Mapping[str, _Inspected] = {}

    @property
    def digests(self) -> dict[str, str]:
        return {name: found.digest for name, found in self._known.items()}

    def set(self, sources: Sequence[AdapterSource], changed: Collection[str] | None = None) -> None:
        """All or nothing; reads each folder whose files are new. Raises ConfigError and CheckpointError. One that is optional and cannot be
        used is left out.

        changed  names of known adapters whose folders are looked at again; None: all
        """
        check_adapters(sources)
        known: dict[str, _Inspected] = {}
        for source in sources:
            try:
                known[source.name] = self._inspect(source, looks_again=changed is None or source.name in changed)
            except CheckpointError as error:
                if not source.is_optional:
                    raise
                log.warning("the adapter %s is left out: %s", source.name, error)
        self._known = known

    def _inspect(self, source: AdapterSource, *, looks_again: bool) -> _Inspected:
        """A folder that has been read, and cannot be now, hinders no change of other adapters."""
        before = self._known.get(source.name)
        before = replace(before, source=source) if before is not None and before.source.path == source.path else None
        if before is not None and not looks_again:
            return before
        try:
            stamp = self._folders.stamp(source, is_known=before is not None)
        except OSError as error:
            if before is None:
                return _Inspected(source, self._folders.inspect(source), None)
            log.warning("the folder of the adapter %s cannot be read now (%s); it stays as it was read", source.name, error.strerror)
            return before
        if before is not None and stamp is not None and before.stamp == stamp:
            return before
        return _Inspected(source, self._folders.inspect(source), stamp)

    def check(self, request: EngineRequest) -> None:
        """Raises Unavailable for an adapter that is not here with these weights: it was when the sender chose this engine."""
        found = self._known.get(request.adapter or "")
        if found is None or found.digest != request.adapter_digest:
            raise Unavailable(f"the adapter {request.adapter} was loaded again or unloaded a moment ago; the request can be sent again")

    def source(self, digest: str) -> AdapterSource | None:
        return next((found.source for found in self._known.values() if found.digest == digest), None)
