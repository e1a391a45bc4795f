"""The protocol of a store: bytes under keys, each entry with a tenant and a lifetime.

An entry may go before its time: where room is missing, the oldest entries are removed. So a store holds caches, never data that must not be
lost. `stores.sqlite` is the embedded implementation, `stores.redis` the one that several machines
share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.core.errors import HeadraceError


class StoreFailed(HeadraceError):
    """The store cannot be reached, is full or broken. For the log: a client is answered with an error of its own."""


@dataclass(slots=True)
class StoreProgress:
    """num_answers: calls that a store has ended so far, as its client in this process has seen, with an error or without"""

    num_answers: int = 0


def drop_error(task: asyncio.Future[Any]) -> None:
    """Take the error of a task that has failed: asyncio would log it where all that waited for it have gone."""
    if not task.cancelled():
        task.exception()


class StoredEntry(msgspec.Struct, array_like=True, frozen=True):
    """A value as it is kept, in msgpack. form: that of the version that wrote it"""

    form: int


T = TypeVar("T", bound=StoredEntry)


def entry_in(value: bytes | None, decoder: msgspec.msgpack.Decoder[T], form: int) -> T | None:
    """None where there is no value, or another version wrote it in another form."""
    try:
        entry = None if value is None else decoder.decode(value)
    except msgspec.DecodeError:
        return None
    return entry if entry is not None and entry.form == form else None


class EntryTooLarge(StoreFailed):
    """One entry has more bytes than an entry, or all entries of a tenant, may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Upper bounds in bytes, inclusive. entry: of one value; tenant, total: of the entries of a tenant, of all, with all that a store takes
    for an entry beside its value.

    Where a tenant's bound or the whole would be exceeded, the oldest entries of the tenant, or of all, are removed.
    tenant_share: part of `total` that one tenant may fill, asked for at each write
    """

    entry: int
    total: int
    tenant_share: Callable[[], float]

    @property
    def tenant(self) -> int:
        return int(self.total * self.tenant_share())

    def check(self, num_bytes: int, stored_bytes: int) -> None:
        """Raises EntryTooLarge. num_bytes: of the value; stored_bytes: with what the store takes beside it"""
        most = min(self.tenant, self.total)
        if num_bytes > self.entry or stored_bytes > most:
            raise EntryTooLarge(f"An entry has {num_bytes} bytes, {stored_bytes} as stored; at most {self.entry} and {most} are kept.")


class Store(Protocol):
    """Every method raises StoreFailed, and may be cancelled; what it asked for may then happen or not."""

    progress: StoreProgress

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
