"""Keys and tenants over the admin socket: requests to `access.administration`, records to JSON. docs/identity.md lists the requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import ConfigError, InvalidRequest
from headrace.core.strict_decode import decode
from headrace.gateway.access.administration import Administration, IssuedKey, NewKey, TenantChange
from headrace.gateway.access.key_store import AuditRecord, KeyRecord, TenantRecord
from headrace.gateway.access.principal import KeyLimits
from headrace.gateway.stores.store import StoreFailed

MAX_AUDIT = 10_000
"""Audit records that one answer may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBody:
    tenant: str
    tier: str | None = None
    user: str = ""
    expires_s: float | None = None
    budget: float | None = None
    requests_per_minute: int | None = None
    models: tuple[str, ...] = ()

    def wanted(self) -> NewKey:
        limits = KeyLimits(monthly_budget=self.budget, requests_per_minute=self.requests_per_minute, models=self.models)
        return NewKey(tenant=self.tenant, tier=self.tier, user=self.user, expires_s=self.expires_s, limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateBody:
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBody:
    tier: str | None = None
    budget: float | None = None
    options: dict[str, bool | str | None] = field(default_factory=dict)

    def change(self) -> TenantChange:
        return TenantChange(tier=self.tier, monthly_budget=self.budget, options=self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTenantBody(TenantBody):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveBody:
    revoke_keys: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """One request. name: the id or the tenant in its path; "" where there is none"""

    admin: Administration
    name: str
    query: Mapping[str, str]
    body: Mapping[str, object]


class KeyRequests:
    """A `fleet.admin.AdminRequests`."""

    def __init__(self, open_administration: Callable[[str], Administration]) -> None:
        """open_administration: for an actor; closed after each request"""
        self._open = open_administration

    async def answer(
        self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, object], actor: str
    ) -> tuple[int, object] | None:
        """Status and JSON; None: no request of these. path: its parts"""
        if _handler(method, path) is None:
            return None
        try:
            admin = self._open(f"{actor}, through the admin socket")
            try:
                return 200, await answer_request(admin, method, path, query, body)
            finally:
                await admin.close()
        except (InvalidRequest, ConfigError) as error:
            return 400, {"error": str(error)}
        except StoreFailed as error:
            return 503, {"error": str(error)}


async def answer_request(
    admin: Administration,
    method: str,
    path: Sequence[str],
    query: Mapping[str, str] | None = None,
    body: Mapping[str, object] | None = None,
) -> Any:
    """What one of REQUESTS gives, as JSON data. Raises InvalidRequest, ConfigError and StoreFailed."""
    handler = _handler(method, path)
    assert handler is not None, f"{method} {path} is in the table"
    return await handler(_Call(admin, path[1] if len(path) > 1 else "", query or {}, body or {}))


def _handler(method: str, path: Sequence[str]) -> Callable[[_Call], Awaitable[object]] | None:
    shape = (method, path[0] if path else "", *("NAME" if index == 0 else part for index, part in enumerate(path[1:])))
    return REQUESTS.get(shape)


async def _keys(call: _Call) -> object:
    return [shown_key(key, call.admin.now()) for key in await call.admin.keys(call.query.get("tenant"))]


async def _key(call: _Call) -> object:
    return shown_key(await call.admin.key(call.name), call.admin.now())


async def _create_key(call: _Call) -> object:
    return _issued(await call.admin.create_key(decode(KeyBody, call.body).wanted()))


async def _rotate_key(call: _Call) -> object:
    return _issued(await call.admin.rotate_key(call.name, grace_s=decode(RotateBody, call.body).grace_s))


async def _revoke_key(call: _Call) -> object:
    return shown_key(await call.admin.revoke_key(call.name), call.admin.now())


async def _tenants(call: _Call) -> object:
    return [shown_tenant(tenant) for tenant in await call.admin.tenants()]


async def _tenant(call: _Call) -> object:
    return shown_tenant(await call.admin.tenant(call.name))


async def _create_tenant(call: _Call) -> object:
    body = decode(NewTenantBody, call.body)
    return shown_tenant(await call.admin.create_tenant(body.name, body.change()))


async def _set_tenant(call: _Call) -> object:
    return shown_tenant(await call.admin.set_tenant(call.name, decode(TenantBody, call.body).change()))


async def _remove_tenant(call: _Call) -> object:
    await call.admin.remove_tenant(call.name, revoke_keys=decode(RemoveBody, call.body).revoke_keys)
    return {}


async def _audit(call: _Call) -> object:
    limit = call.query.get("limit", "100")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_AUDIT):
        raise InvalidRequest("limit", f"1 to {MAX_AUDIT}", limit)
    return [shown_audit(record) for record in await call.admin.audit(int(limit))]


def _issued(issued: IssuedKey) -> object:
    return {"id": issued.record.id, "key": issued.key, "tenant": issued.record.tenant}


REQUESTS: Mapping[tuple[str, ...], Callable[[_Call], Awaitable[object]]] = {
    ("GET", "keys"): _keys,
    ("POST", "keys"): _create_key,
    ("GET", "keys", "NAME"): _key,
    ("POST", "keys", "NAME", "rotate"): _rotate_key,
    ("DELETE", "keys", "NAME"): _revoke_key,
    ("GET", "tenants"): _tenants,
    ("POST", "tenants"): _create_tenant,
    ("GET", "tenants", "NAME"): _tenant,
    ("POST", "tenants", "NAME"): _set_tenant,
    ("DELETE", "tenants", "NAME"): _remove_tenant,
    ("GET", "audit"): _audit,
}
"""Method and parts of the path -> what answers."""


def shown_key(key: KeyRecord, now: float) -> dict[str, object]:
    return {
        "id": key.id,
        "first_chars": key.first_chars,
        "tenant": key.tenant,
        "user": key.user,
        "tier": key.tier or None,
        "state": state_of(key, now),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "previous_until": key.previous_until if key.previous_until > now else None,
        "budget": key.limits.monthly_budget,
        "requests_per_minute": key.limits.requests_per_minute,
        "models": list(key.limits.models),
    }


def state_of(key: KeyRecord, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "active" if key.is_active(now) else "expired"


def shown_tenant(tenant: TenantRecord) -> dict[str, object]:
    return {
        "name": tenant.name,
        "id": tenant.id,
        "tier": tenant.tier,
        "budget": tenant.monthly_budget,
        "options": dict(tenant.options),
        "created_at": tenant.created_at,
    }


def shown_audit(record: AuditRecord) -> dict[str, object]:
    return {
        "time": record.time,
        "actor": record.actor,
        "action": record.action,
        "subject": record.subject,
        "detail": dict(record.detail),
    }
