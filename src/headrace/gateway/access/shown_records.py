"""Keys, tenants and audit records as plain data, for `--json` and the admin socket. Digests stay inside."""

from __future__ import annotations

from headrace.gateway.access.key_records import AuditRecord, KeyRecord, TenantRecord


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
