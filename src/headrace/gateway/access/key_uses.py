"""The open requests of each key, so that the requests of a key that was revoked are ended.

Requests are checked after each change of the directory. A key that the store has lost ends none: Redis may have been started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from headrace.core.errors import HeadraceError, Unauthorized
from headrace.gateway.access.key_records import KeyRecord

MAX_READS = 64
"""Records of keys that are read at a time."""

End = Callable[[HeadraceError], None]


class KeyRevoked(Unauthorized):
    """The key of a request was revoked while it was answered."""


class KeyUses:
    def __init__(self) -> None:
        self._ends: dict[str, set[End]] = {}

    @contextmanager
    def use(self, key_id: str, end: End) -> Iterator[None]:
        """The block answers a request with the key. end: ends the request early, with an error"""
        ends = self._ends.setdefault(key_id, set())
        ends.add(end)
        try:
            yield
        finally:
            ends.discard(end)
            if not ends and self._ends.get(key_id) is ends:
                del self._ends[key_id]

    async def end_revoked(self, read: Callable[[str], Awaitable[KeyRecord | None]]) -> None:
        """read: the record of a key. Raises what it raises; then some keys were not checked."""
        in_use = list(self._ends)
        for first in range(0, len(in_use), MAX_READS):
            for record in await asyncio.gather(*map(read, in_use[first : first + MAX_READS])):
                if record is not None and record.revoked_at is not None:
                    for end in list(self._ends.get(record.id, ())):
                        end(KeyRevoked("This request's API key was revoked."))
