"""The seam between gateways, administration and what keeps keys and tenants.

A store is a directory of small records with one version. Every change names the version that it was decided on, and is refused where the
directory has changed since, so that the rules (`access.administration`) stand once, above both implementations: `access.sqlite_keys` and
`access.redis_keys`. Which one a configuration names: `access.open_keys`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.gateway.access.key_records import AuditRecord, KeyRecord, StoredKey, TenantRecord
from headrace.gateway.stores.store import StoreProgress


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """version: another one after each change; has_keys: a key was created at some time, valid or not"""

    version: int
    has_keys: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryChange:
    """Records to write as one.

    expected         version of the directory that the change was decided on
    version          the one it has afterwards, the same where there is only the audit record to write
    removed_digests  that lead to no key any more
    """

    expected: int
    version: int
    audit: AuditRecord
    keys: tuple[KeyRecord, ...] = ()
    removed_digests: tuple[str, ...] = ()
    tenants: tuple[TenantRecord, ...] = ()
    removed_tenants: tuple[str, ...] = ()


class KeyStore(Protocol):
    """Every method raises StoreFailed."""

    progress: StoreProgress

    async def state(self) -> DirectoryState: ...

    async def find(self, sha256: str) -> tuple[int, StoredKey | None]:
        """The version of the directory, and the key with this digest in it."""
        ...

    async def key(self, key_id: str) -> KeyRecord | None: ...

    async def keys(self) -> list[KeyRecord]: ...

    async def tenant(self, name: str) -> TenantRecord | None: ...

    async def tenants(self) -> list[TenantRecord]: ...

    async def audit(self, limit: int) -> list[AuditRecord]:
        """The newest changes, newest first."""
        ...

    async def apply(self, change: DirectoryChange) -> bool:
        """Write all of it, or nothing and return False where the directory is not of the expected version."""
        ...

    async def close(self) -> None: ...
