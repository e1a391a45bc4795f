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
    """Times are Unix seconds; None: never.

    id               the same after a rotation
    first_chars      by which a person finds the key in a list
    tier             empty: the tenant's tier holds
    previous_sha256  digest before the last rotation, valid until previous_until; empty: there is none
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
        """sha256: one of `digests`"""
        return self.is_active(now) and (sha256 == self.sha256 or now < self.previous_until)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """id: drawn when the tenant was created, so a later tenant of the same name has another one; "" in records of earlier versions.

    options: by name (`OPTION_VALUES` of `access.administration`)
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

    actor    user of the operating system, and the way: by command or through the admin socket
    action   "key.create", "tenant.set", "cache.purge", "deployment.scale", ...
    subject  a key's id, a tenant's name, a model, a replica, or "deployment"
    """

    time: float
    actor: str
    action: str
    subject: str
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """From one read."""

    key: KeyRecord
    tenant: TenantRecord


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """version: differs after each change; has_keys: a key was created at some time, valid or not"""

    version: int
    has_keys: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryChange:
    """Written in one transaction."""

    audit: AuditRecord
    keys: tuple[KeyRecord, ...] = ()
    removed_digests: tuple[str, ...] = ()
    tenants: tuple[TenantRecord, ...] = ()
    removed_tenants: tuple[str, ...] = ()

    @property
    def has_records(self) -> bool:
        return bool(self.keys or self.removed_digests or self.tenants or self.removed_tenants)


R = TypeVar("R", KeyRecord, TenantRecord)


def decoded(record: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(record, type=kind)
