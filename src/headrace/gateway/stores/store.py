"""Defines the protocol of a store: bytes under keys, each entry with a tenant and a lifetime. An entry may go before its time, so a store
holds caches, never data that must not be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.core.errors import HeadraceError


class StoreFailed(HeadraceError):
    """The message is for the log; clients get other errors."""


@dataclass(slots=True)
class StoreProgress:
    num_answers: int = 0


def drop_error(task: asyncio.Future[Any]) -> None:
    """Done callback that retrieves a task's error, which asyncio would log otherwise."""
    if not task.cancelled():
        task.exception()


class StoredEntry(msgspec.Struct, array_like=True, frozen=True):
    """The base of values in a store, encoded as msgpack. form: number of the layout that the writing version used"""

    form: int


T = TypeVar("T", bound=StoredEntry)


def entry_in(value: bytes | None, decoder: msgspec.msgpack.Decoder[T], form: int) -> T | None:
    try:
        entry = None if value is None else decoder.decode(value)
    except msgspec.DecodeError:
        return None
    return entry if entry is not None and entry.form == form else None


class EntryTooLarge(StoreFailed):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Inclusive, in bytes; `tenant` and `total` with the store's overhead for each entry. A write beyond one of these two removes the
    oldest entries, of the tenant or of all. tenant_share: part of `total`, asked at each write
    """

    entry: int
    total: int
    tenant_share: Callable[[], float]

    @property
    def tenant(self) -> int:
        return int(self.total * self.tenant_share())

    def check(self, num_bytes: int, stored_bytes: int) -> None:
        """stored_bytes: with the store's overhead. Raises EntryTooLarge."""
        most = min(self.tenant, self.total)
        if num_bytes > self.entry or stored_bytes > most:
            raise EntryTooLarge(f"An entry has {num_bytes} bytes, {stored_bytes} as stored; at most {self.entry} and {most} are kept.")


class Store(Protocol):
    """Every method raises StoreFailed. A failed or cancelled call may have taken effect or not."""

    progress: StoreProgress

    async def put(self, key: str, value: bytes, *, tenant: str, ttl_s: float) -> None:
        """Raises EntryTooLarge."""
        ...

    async def get(self, key: str) -> bytes | None: ...

    async def swap(self, key: str, value: bytes, *, expected: bytes | None, tenant: str, ttl_s: float) -> bool:
        """As `put`, if the present entry equals `expected` (None: there is no entry). Atomic: of concurrent swaps one succeeds."""
        ...

    async def delete(self, key: str, *, expected: bytes | None = None) -> None: ...

    async def purge(self, tenant: str) -> int: ...

    async def close(self) -> None: ...
