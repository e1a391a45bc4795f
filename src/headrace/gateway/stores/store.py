"""Defines the protocol of a store: bytes under keys, each entry with a tenant and a lifetime.

An entry may go before its time: where room is missing, the oldest entries are removed. So a store holds caches, never data that must not be
lost. `stores.sqlite` is the embedded implementation, `stores.redis` the one that several machines share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.core.errors import HeadraceError


class StoreFailed(HeadraceError):
    """The store cannot be reached, is full or broken. The message is for the log; clients get other errors."""


@dataclass(slots=True)
class StoreProgress:
    """num_answers: calls of this process that the store has ended so far, with or without an error"""

    num_answers: int = 0


def drop_error(task: asyncio.Future[Any]) -> None:
    """Done callback that retrieves a task's error, which asyncio would otherwise log when nothing waits for the task any more."""
    if not task.cancelled():
        task.exception()


class StoredEntry(msgspec.Struct, array_like=True, frozen=True):
    """Base of stored values, in msgpack. form: number of the layout that the writing version used"""

    form: int


T = TypeVar("T", bound=StoredEntry)


def entry_in(value: bytes | None, decoder: msgspec.msgpack.Decoder[T], form: int) -> T | None:
    """The decoded value. None: there is no value, or it has another form."""
    try:
        entry = None if value is None else decoder.decode(value)
    except msgspec.DecodeError:
        return None
    return entry if entry is not None and entry.form == form else None


class EntryTooLarge(StoreFailed):
    """An entry alone exceeds the bound of an entry, of a tenant, or of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Upper bounds in bytes, inclusive. A write beyond `tenant` or `total` removes the oldest entries, of the tenant or of all.

    entry         bytes of one value
    tenant        bytes of a tenant's entries, with the store's overhead for each
    total         bytes of all entries, with the store's overhead for each
    tenant_share  gives the part of `total` that one tenant may fill; called at each write
    """

    entry: int
    total: int
    tenant_share: Callable[[], float]

    @property
    def tenant(self) -> int:
        return int(self.total * self.tenant_share())

    def check(self, num_bytes: int, stored_bytes: int) -> None:
        """Raises EntryTooLarge. num_bytes: the value's bytes; stored_bytes: with the store's overhead"""
        most = min(self.tenant, self.total)
        if num_bytes > self.entry or stored_bytes > most:
            raise EntryTooLarge(f"An entry has {num_bytes} bytes, {stored_bytes} as stored; at most {self.entry} and {most} are kept.")


class Store(Protocol):
    """A store of entries by key. Every method raises StoreFailed. A failed or cancelled call may have taken effect or not."""

    progress: StoreProgress

    async def put(self, key: str, value: bytes, *, tenant: str, ttl_s: float) -> None:
        """Keep `value` for `ttl_s` seconds, in place of what was there. Raises EntryTooLarge."""
        ...

    async def get(self, key: str) -> bytes | None: ...

    async def swap(self, key: str, value: bytes, *, expected: bytes | None, tenant: str, ttl_s: float) -> bool:
        """As `put`, if the present entry equals `expected` (None: there is no entry). Returns whether it did. Atomic: of concurrent swaps
        one succeeds.
        """
        ...

    async def delete(self, key: str, *, expected: bytes | None = None) -> None:
        """Remove the entry. expected: only if the entry equals it; None: whatever the entry is"""
        ...

    async def purge(self, tenant: str) -> int:
        """Remove all entries of a tenant. Returns their number."""
        ...

    async def close(self) -> None: ...
