"""The seam between gateways and what keeps bytes for them: entries under keys, each of a tenant, each for a time.

An entry is there for its time at most: where there is no room, the entries that were written first are removed. So a store holds what is
good to have, never what must not be lost. `stores.sqlite` is the embedded implementation, `stores.redis` the one that several machines
share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.core.errors import HeadraceError


class StoreFailed(HeadraceError):
    """The store cannot be reached, is full or broken. For the log: a client is answered with an error of its own."""


class EntryTooLarge(StoreFailed):
    """One entry has more bytes than an entry, or all entries of a tenant, may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Upper bounds in bytes, inclusive, of values without their keys: one entry, the entries of a tenant, all entries.

    Where a tenant's bound or the whole would be exceeded, the oldest entries of the tenant, or of all, are removed.
    """

    entry: int
    tenant: int
    total: int

    def check(self, num_bytes: int) -> None:
        """Raises EntryTooLarge."""
        most = min(self.entry, self.tenant, self.total)
        if num_bytes > most:
            raise EntryTooLarge(f"An entry has {num_bytes} bytes; at most {most} are kept (store.max_entry_bytes, store.max_bytes).")


class Store(Protocol):
    """Every method raises StoreFailed, and may be cancelled; what it asked for may then happen or not."""

    async def put(self, key: str, value: bytes, *, tenant: str, ttl_s: float) -> None:
        """Keep `value` for `ttl_s` seconds, in place of what was there. Raises EntryTooLarge."""
        ...

    async def get(self, key: str) -> bytes | None: ...

    async def swap(self, key: str, value: bytes, *, expected: bytes | None, tenant: str, ttl_s: float) -> bool:
        """As `put`, but only while the entry is `expected` (None: while there is none); whether it was. Atomic: of several at once one
        succeeds.
        """
        ...

    async def delete(self, key: str) -> None: ...

    async def purge(self, tenant: str) -> int:
        """Remove all entries of a tenant. Returns their number."""
        ...

    async def close(self) -> None: ...
