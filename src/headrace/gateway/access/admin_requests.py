"""Answers the admin socket's requests about keys and tenants (docs/identity.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.core.errors import ConfigError, InvalidRequest
from headrace.core.strict_decode import decode
from headrace.gateway.access.administration import Administration, IssuedKey, NewKey, NewTenant, TenantChange
from headrace.gateway.access.key_store import AuditRecord, KeyRecord, TenantRecord
from headrace.gateway.stores.store import StoreFailed

MAX_AUDIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateBody:
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveBody:
    revoke_keys: bool = False


@dataclass(frozen=True, slots=True)
class AdminCall:
    """name: key id or tenant from the path; "" for a path without one"""

    admin: Administration
    name: str
    query: Mapping[str, str]
    body: Mapping[str, object]


Handlers = Mapping[tuple[str, ...], Callable[[AdminCall], Awaitable[object]]]
"""NAME stands for any part of a path."""


class KeyRequests:
    def __init__(self, open_administration: Callable[[str], Administration], handlers: Handlers | None = None) -> None:
        """open_administration: opens one for an actor; closed after each request"""
        self._open = open_administration
        self._handlers = REQUESTS if handlers is None else handlers

    async def answer(
        self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, object], actor: str
    ) -> tuple[int, object] | None:
        if _shape(method, path) not in self._handlers:
            return None
        try:
            admin = self._open(f"{actor}, through the admin socket")
            try:
                return 200, await answer_request(admin, method, path, query, body, self._handlers)
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
    handlers: Handlers | None = None,
) -> Any:
    handler = (REQUESTS if handlers is None else handlers)[_shape(method, path)]
    return shown(await handler(AdminCall(admin, path[1] if len(path) > 1 else "", query or {}, body or {})), admin.now())


def _shape(method: str, path: Sequence[str]) -> tuple[str, ...]:
    return (method, path[0] if path else "", *("NAME" if index == 0 else part for index, part in enumerate(path[1:])))


def _limit_of(query: Mapping[str, str]) -> int:
    limit = query.get("limit", "100")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_AUDIT):
        raise InvalidRequest("limit", f"1 to {MAX_AUDIT}", limit)
    return int(limit)


REQUESTS: Handlers = {
    ("GET", "keys"): lambda call: call.admin.keys(call.query.get("tenant")),
    ("POST", "keys"): lambda call: call.admin.create_key(decode(NewKey, call.body)),
    ("GET", "keys", "NAME"): lambda call: call.admin.key(call.name),
    ("POST", "keys", "NAME", "rotate"): lambda call: call.admin.rotate_key(call.name, grace_s=decode(RotateBody, call.body).grace_s),
    ("DELETE", "keys", "NAME"): lambda call: call.admin.revoke_key(call.name),
    ("GET", "tenants"): lambda call: call.admin.tenants(),
    ("POST", "tenants"): lambda call: call.admin.create_tenant(decode(NewTenant, call.body)),
    ("GET", "tenants", "NAME"): lambda call: call.admin.tenant(call.name),
    ("POST", "tenants", "NAME"): lambda call: call.admin.set_tenant(call.name, decode(TenantChange, call.body)),
    ("DELETE", "tenants", "NAME"): lambda call: call.admin.remove_tenant(call.name, revoke_keys=decode(RemoveBody, call.body).revoke_keys),
    ("GET", "audit"): lambda call: call.admin.audit(_limit_of(call.query)),
}


def shown(result: object, now: float) -> Any:
    """now: Unix seconds"""
    match result:
        case KeyRecord():
            return {
                "id": result.id,
                "first_chars": result.first_chars,
                "tenant": result.tenant,
                "user": result.user,
                "role": result.role,
                "tier": result.own_tier or None,
                "state": state_of(result, now),
                "created_at": result.created_at,
                "expires_at": result.expires_at,
                "revoked_at": result.revoked_at,
                "previous_until": result.previous_until if result.previous_until > now else None,
                "budget": result.limits.monthly_budget,
                "requests_per_minute": result.limits.requests_per_minute,
                "models": list(result.limits.models),
            }
        case IssuedKey():
            return {"id": result.record.id, "key": result.key, "tenant": result.record.tenant}
        case TenantRecord():
            return {
                "name": result.name,
                "id": result.id,
                "tier": result.tier,
                "budget": result.monthly_budget,
                "options": dict(result.options),
                "created_at": result.created_at,
            }
        case AuditRecord():
            return asdict(result)
        case dict():
            return result
        case list():
            return [shown(one, now) for one in result]
    return {}


def state_of(key: KeyRecord, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "active" if key.is_active(now) else "expired"
