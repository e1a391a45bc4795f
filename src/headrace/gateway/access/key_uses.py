"""The open requests of each key, so that the requests of a key that was revoked are ended.

Requests are checked after each change of the directory. A key that the store has lost ends none: Redis may have been started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.core.errors import HeadraceError, Unauthorized
from headrace.gateway.access.key_store import KeyRecord

MAX_READS = 64
"""Records of keys that are read at a time."""

End = Callable[[HeadraceError], None]


class KeyRevoked(Unauthorized):
    """The key of a request was revoked while it was answered."""


class KeyUse:
    """One request that is answered with a key, for the length of a `with` block."""

    __slots__ = ("_end", "_ends", "_key_id")

    def __init__(self, ends: dict[str, set[End]], key_id: str, end: End) -> None:
        self._ends, self._key_id, self._end = ends, key_id, end

    def __enter__(self) -> None:
        self._ends.setdefault(self._key_id, set()).add(self._end)

    def __exit__(self, *error: object) -> None:
        ends = self._ends[self._key_id]
        ends.discard(self._end)
        if not ends:
            del self._ends[self._key_id]


class KeyUses:
    def __init__(self) -> None:
        self._ends: dict[str, set[End]] = {}

    def use(self, key_id: str, end: End) -> KeyUse:
        """For `with`: the block answers a request with the key. end: ends the request early, with an error"""
        return KeyUse(self._ends, key_id, end)

    async def end_revoked(self, read: Callable[[str], Awaitable[KeyRecord | None]]) -> None:
        """read: the record of a key. Raises what it raises; then some keys were not checked."""
        in_use = list(self._ends)
        for first in range(0, len(in_use), MAX_READS):
            for record in await asyncio.gather(*map(read, in_use[first : first + MAX_READS])):
                if record is not None and record.revoked_at is not None:
                    for end in list(self._ends.get(record.id, ())):
                        end(KeyRevoked("This request's API key was revoked."))
