"""Creates, changes and revokes API keys and tenants, by the same rules for every key store.

A change is written only if no record has changed since it was decided (compare and swap); otherwise it is decided again.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest
from headrace.gateway.access.key_store import AuditRecord, DirectoryChange, KeyRecord, KeyStore, TenantRecord
from headrace.gateway.access.principal import READER_TIER, KeyLimits, KeyRole
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.price import MAX_MONEY, MIN_MONEY
from headrace.policy.limits.tier import DEFAULT_TIER

OPTION_VALUES: Mapping[str, tuple[object, ...]] = {
    "log_prompts": (True, False),
    "cache": (True, False),
    "context_fitting": ("refuse", "sliding_window", "summary"),
}
"""log_prompts: usage records hold prompts; cache: whether answers are cached, whatever `cache.enabled` says."""


def checked_options(options: Mapping[str, object]) -> dict[str, object]:
    """Raises InvalidRequest."""
    for name, value in options.items():
        if name not in OPTION_VALUES:
            raise InvalidRequest("options", f"names of {', '.join(OPTION_VALUES)}", name)
        if value not in OPTION_VALUES[name] or type(value) is not type(OPTION_VALUES[name][0]):
            raise InvalidRequest(f"options.{name}", f"one of {', '.join(map(_option_text, OPTION_VALUES[name]))}", value)
    return dict(options)


def _option_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


T = TypeVar("T")

PREFIX = "hr-"
KEY_BYTES = 32
FIRST_CHARS = 8

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
USER = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
MAX_TRIES = 50
"""Other changes may come between."""


MAX_EXPIRES_S = 100 * 366 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """tier, budget: None, the tenant's; expires_s: seconds from now; role: a `KeyRole`"""

    tenant: str
    role: str = KeyRole.USER
    tier: str | None = None
    user: str = ""
    expires_s: float | None = None
    budget: float | None = None
    requests_per_minute: int | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """key: shown now and never again"""

    record: KeyRecord
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChange:
    """None keeps the present value. budget: in a UTC month, 0: the tier's. options: null removes one"""

    tier: str | None = None
    budget: float | None = None
    options: dict[str, bool | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTenant(TenantChange):
    name: str


class Administration:
    """Every method raises StoreFailed and InvalidRequest."""

    def __init__(self, store: KeyStore, *, tiers: Collection[str], unix_time: Clock, actor: str) -> None:
        """tiers: built-in ones included"""
        self._store = store
        self._tiers = tiers
        self._unix_time = unix_time
        self._actor = actor

    def now(self) -> float:
        return self._unix_time()

    # -- keys ----------------------------------------------------------------------------------------------------------------------

    async def create_key(self, wanted: NewKey) -> IssuedKey:
        """A tenant that does not exist is created with the key's tier."""
        self._check(wanted)
        key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        key_id = f"key-{secrets.token_hex(8)}"

        async def decide() -> tuple[KeyRecord, DirectoryChange]:
            now = self._unix_time()
            tenant = await self._store.record(TenantRecord, wanted.tenant)
            made: tuple[TenantRecord, ...] = ()
            if tenant is None:
                tenant = _new_tenant(wanted.tenant, wanted.tier or DEFAULT_TIER, now)
                made = (tenant,)
            own_tier = "" if wanted.tier in (None, tenant.tier) else wanted.tier
            record = KeyRecord(
                id=key_id,
                sha256=digest(key),
                first_chars=key[:FIRST_CHARS],
                tenant=wanted.tenant,
                user=wanted.user,
                tier=READER_TIER if wanted.role == KeyRole.READER else own_tier,
                created_at=now,
                expires_at=None if wanted.expires_s is None else now + wanted.expires_s,
                limits=KeyLimits(monthly_budget=wanted.budget, requests_per_minute=wanted.requests_per_minute, models=wanted.models),
            )
            detail = {name: value for name, value in _shown(record).items() if value not in (None, "", ())}
            if made:
                detail["created_tenant"] = {"tier": tenant.tier}
            return record, DirectoryChange(audit=self._audit("key.create", key_id, detail), keys=(record,), tenants=made)

        return IssuedKey(await self._change(decide), key)

    async def revoke_key(self, key_id: str) -> KeyRecord:
        async def decide() -> tuple[KeyRecord, DirectoryChange | None]:
            record = await self.key(key_id)
            if record.revoked_at is not None:
                return record, None
            revoked = replace(record, revoked_at=self._unix_time())
            return revoked, DirectoryChange(audit=self._audit("key.revoke", key_id, {}), keys=(revoked,))

        return await self._change(decide)

    async def rotate_key(self, key_id: str, *, grace_s: float = 0.0) -> IssuedKey:
        """The id stays. The previous key stays valid for `grace_s` seconds; older keys end now."""
        if not 0 <= grace_s <= MAX_EXPIRES_S:
            raise InvalidRequest("grace", "seconds from 0 to a hundred years", grace_s)
        key = PREFIX + secrets.token_urlsafe(KEY_BYTES)

        async def decide() -> tuple[KeyRecord, DirectoryChange]:
            record, now = await self.key(key_id), self._unix_time()
            if not record.is_active(now):
                raise InvalidRequest("id", "a key that is neither revoked nor expired", key_id, "Create another one.")
            previous = (record.sha256, now + grace_s) if grace_s else ("", 0.0)
            rotated = replace(
                record, sha256=digest(key), first_chars=key[:FIRST_CHARS], previous_sha256=previous[0], previous_until=previous[1]
            )
            removed = tuple({*record.digests} - {*rotated.digests})
            return rotated, DirectoryChange(
                audit=self._audit("key.rotate", key_id, {"grace_s": grace_s}), keys=(rotated,), removed_digests=removed
            )

        return IssuedKey(await self._change(decide), key)

    async def key(self, key_id: str) -> KeyRecord:
        record = await self._store.record(KeyRecord, key_id)
        if record is None:
            raise InvalidRequest("id", "the id of a key", key_id, "`headrace keys list` shows them.")
        return record

    async def keys(self, tenant: str | None = None) -> list[KeyRecord]:
        return [record for record in await self._store.records(KeyRecord) if tenant in (None, record.tenant)]

    # -- tenants -------------------------------------------------------------------------------------------------------------------

    async def create_tenant(self, wanted: NewTenant) -> TenantRecord:
        name = wanted.name
        self._check_name(name)
        self._check_change(wanted)

        async def decide() -> tuple[TenantRecord, DirectoryChange]:
            if await self._store.record(TenantRecord, name) is not None:
                raise InvalidRequest("tenant", "a name that is not taken", name, "`headrace tenants set` changes it.")
            record = _changed(_new_tenant(name, DEFAULT_TIER, self._unix_time()), wanted)
            return record, DirectoryChange(audit=self._audit("tenant.create", name, _differences(wanted, record)), tenants=(record,))

        return await self._change(decide)

    async def set_tenant(self, name: str, change: TenantChange) -> TenantRecord:
        self._check_change(change)

        async def decide() -> tuple[TenantRecord, DirectoryChange]:
            record = _changed(await self.tenant(name), change)
            return record, DirectoryChange(audit=self._audit("tenant.set", name, _differences(change, record)), tenants=(record,))

        return await self._change(decide)

    async def remove_tenant(self, name: str, *, revoke_keys: bool = False) -> None:
        """Active keys are revoked with `revoke_keys`, else refused as InvalidRequest. A later tenant of the same name has another id and
        never sees this one's data.
        """

        async def decide() -> tuple[None, DirectoryChange]:
            tenant, now = await self.tenant(name), self._unix_time()
            active = [record for record in await self.keys(name) if record.is_active(now)]
            if active and not revoke_keys:
                remedy = "Revoke them first, or with --revoke-keys (revoke_keys)."
                raise InvalidRequest("tenant", "a tenant without active keys", f"{name}: {len(active)} of them", remedy)
            revoked = tuple(replace(record, revoked_at=now) for record in active)
            detail = {"id": tenant.id, "revoked": [record.id for record in revoked]}
            return None, DirectoryChange(audit=self._audit("tenant.remove", name, detail), keys=revoked, removed_tenants=(name,))

        await self._change(decide)

    async def tenant(self, name: str) -> TenantRecord:
        record = await self._store.record(TenantRecord, name)
        if record is None:
            raise InvalidRequest("tenant", "the name of a tenant", name, "`headrace tenants list` shows them.")
        return record

    async def tenant_keys(self, name: str) -> tuple[str, ...]:
        """Names under which stores may hold a tenant's data: its name (configured keys) and its record's id."""
        record = await self._store.record(TenantRecord, name)
        return (name, record.id) if record is not None and record.id else (name,)

    async def tenants(self) -> list[TenantRecord]:
        return await self._store.records(TenantRecord)

    async def audit(self, limit: int) -> list[AuditRecord]:
        return await self._store.audit(limit)

    async def record(self, action: str, subject: str, detail: Mapping[str, object]) -> None:
        """The directory's version stays, so gateways read nothing again."""

        async def decide() -> tuple[None, DirectoryChange]:
            return None, DirectoryChange(audit=self._audit(action, subject, detail))

        await self._change(decide)

    async def close(self) -> None:
        await self._store.close()

    # -- rules ---------------------------------------------------------------------------------------------------------------------

    async def _change(self, decide: Callable[[], Awaitable[tuple[T, DirectoryChange | None]]]) -> T:
        for _ in range(MAX_TRIES):
            state = await self._store.state()  # before all that is decided on
            result, change = await decide()
            if change is None:
                return result
            # A version is another one than a lost directory had.
            version = max(state.version + 1, int(1000 * self._unix_time())) if change.has_records else state.version
            if await self._store.apply(change, expected=state.version, version=version):
                return result
        raise StoreFailed("Other changes came between each time; try again.")

    def _audit(self, action: str, subject: str, detail: Mapping[str, object]) -> AuditRecord:
        return AuditRecord(time=self._unix_time(), actor=self._actor, action=action, subject=subject, detail=detail)

    def _check(self, wanted: NewKey) -> None:
        self._check_name(wanted.tenant)
        if wanted.role not in list(KeyRole):
            raise InvalidRequest("role", f"one of {', '.join(KeyRole)}", wanted.role)
        if wanted.role == KeyRole.READER and (wanted.tier is not None or wanted.budget is not None or wanted.models):
            remedy = "A reader generates nothing that these could limit, and has its tenant's tier: leave them out."
            raise InvalidRequest("role", "user beside tier, budget or models", wanted.role, remedy)
        if wanted.user and USER.fullmatch(wanted.user) is None:
            raise InvalidRequest("user", "1 to 128 letters, digits and . _ @ + -", wanted.user)
        self._check_tier(wanted.tier)
        if wanted.expires_s is not None and not 0 < wanted.expires_s <= MAX_EXPIRES_S:
            raise InvalidRequest("expires", "seconds above 0, up to a hundred years", wanted.expires_s)
        _check_budget(wanted.budget, least_is_zero=False)
        rate = wanted.requests_per_minute
        if rate is not None and not 0 < rate <= 10**9:
            raise InvalidRequest("requests_per_minute", "1 to 1,000,000,000", rate)

    def _check_change(self, change: TenantChange) -> None:
        self._check_tier(change.tier)
        _check_budget(change.budget, least_is_zero=True)
        checked_options({name: value for name, value in change.options.items() if value is not None})

    def _check_tier(self, tier: str | None) -> None:
        if tier is not None and tier not in self._tiers:
            remedy = "Declare others under `tiers` of the server's configuration file; a command learns them by --config FILE."
            raise InvalidRequest("tier", f"one of {', '.join(self._tiers)}", tier, remedy)

    def _check_name(self, name: str) -> None:
        if NAME.fullmatch(name) is None:
            raise InvalidRequest("tenant", "1 to 128 letters, digits and . _ -", name)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _new_tenant(name: str, tier: str, now: float) -> TenantRecord:
    """The id has a colon, so it differs from the name of every stored tenant."""
    return TenantRecord(name=name, tier=tier, created_at=now, id=f"{name}:{secrets.token_hex(8)}")


def _check_budget(budget: float | None, *, least_is_zero: bool) -> None:
    if budget is not None and not (MIN_MONEY <= budget <= MAX_MONEY or (least_is_zero and budget == 0)):
        raise InvalidRequest("budget", f"above 0 (at least {MIN_MONEY:g}), up to {MAX_MONEY:g}", budget)


def _changed(record: TenantRecord, change: TenantChange) -> TenantRecord:
    options = {**record.options, **change.options}
    budget = record.monthly_budget if change.budget is None else change.budget or None
    return replace(
        record,
        tier=change.tier or record.tier,
        monthly_budget=budget,
        options={name: value for name, value in options.items() if value is not None},
    )


def _differences(change: TenantChange, record: TenantRecord) -> dict[str, object]:
    given = {"tier": change.tier and record.tier, "monthly_budget": change.budget, "options": dict(change.options) or None}
    return {name: value for name, value in given.items() if value is not None}


def _shown(record: KeyRecord) -> dict[str, object]:
    return {
        "tenant": record.tenant,
        "user": record.user,
        "role": record.role if record.role is KeyRole.READER else None,
        "tier": record.own_tier,
        "expires_at": record.expires_at,
        "monthly_budget": record.limits.monthly_budget,
        "requests_per_minute": record.limits.requests_per_minute,
        "models": record.limits.models,
    }
