"""Defines the records of keys and tenants in a store.

No record holds a key itself, only its SHA-256 digest and first characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from headrace.gateway.access.principal import KeyLimits

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A stored key. Times are Unix seconds.

    id               public name of the key, the same after a rotation
    sha256           hex digest of the key
    first_chars      beginning of the key, by which a person finds it in a list
    tier             name of the key's own tier; empty: its tenant's tier holds
    expires_at       time from which the key is refused; None: never
    revoked_at       time of the revocation; None: the key is not revoked
    previous_sha256  digest of the key before the last rotation, valid until previous_until; empty: there is none
    limits           the key's own limits, beside those of its tenant's tier
    """

    id: str
    sha256: str
    first_chars: str
    tenant: str
    created_at: float
    user: str = ""
    tier: str = ""
    expires_at: float | None = None
    revoked_at: float | None = None
    previous_sha256: str = ""
    previous_until: float = 0.0
    limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def digests(self) -> tuple[str, ...]:
        return (self.sha256, self.previous_sha256) if self.previous_sha256 else (self.sha256,)

    def is_active(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def is_valid(self, sha256: str, now: float) -> bool:
        """Whether the key may be used under this digest, which must be one of `digests`."""
        return self.is_active(now) and (sha256 == self.sha256 or now < self.previous_until)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """
    id              drawn when the tenant was created: a later tenant of the same name has another one. "" in records of earlier versions
    tier            name of the tier of keys that have none of their own
    monthly_budget  money in a UTC month, in place of the tier's budget; None: the tier's
    options         the tenant's choices by name (`OPTION_VALUES` of `access.administration`)
    """

    name: str
    tier: str
    created_at: float
    id: str = ""
    monthly_budget: float | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One change by an operator; never deleted.

    actor    user of the operating system that made the change, and the way: by command or through the admin socket
    action   "key.create", "tenant.set", "cache.purge", "deployment.scale", ...
    subject  a key's id, a tenant's name, a model, a replica, or "deployment"
    detail   the values that were set
    """

    time: float
    actor: str
    action: str
    subject: str
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key and its tenant, from one read."""

    key: KeyRecord
    tenant: TenantRecord


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """version: differs after each change; has_keys: a key was created at some time, valid or not"""

    version: int
    has_keys: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryChange:
    """Records to write in one transaction. removed_digests: digests that stop leading to a key"""

    audit: AuditRecord
    keys: tuple[KeyRecord, ...] = ()
    removed_digests: tuple[str, ...] = ()
    tenants: tuple[TenantRecord, ...] = ()
    removed_tenants: tuple[str, ...] = ()

    @property
    def has_records(self) -> bool:
        """Whether there is more than the audit record to write."""
        return bool(self.keys or self.removed_digests or self.tenants or self.removed_tenants)


R = TypeVar("R", KeyRecord, TenantRecord)


def decoded(record: bytes, kind: type[T]) -> T:
    """A record from a store's JSON."""
    return msgspec.json.decode(record, type=kind)
