"""Authenticates a request: finds the principal of its API key.

`gateway.app` decides by the path that the router matched, never by a URL rebuilt from headers. Keys exist here only as SHA-256 digests;
look-ups hash a digest once more with a random secret, so that their time leaks nothing about stored digests (`stored_keys.blinding`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.core.clock import Clock
from headrace.core.errors import Unauthorized, UnusableKey
from headrace.gateway.access.key_store import KeyRecord, StoredKey, TenantRecord
from headrace.gateway.access.principal import ANONYMOUS, ApiKey, KeyRole, Principal, digest_of
from headrace.gateway.access.stored_keys import StoredKeys, blinding, remember
from headrace.gateway.http.asgi import Framing, Headers
from headrace.policy.limits.tier import DEFAULT_TIER, Tier, all_tiers

log = logging.getLogger(__name__)

MAX_KEY_BYTES = 512
LOG_EVERY_S = 10.0
"""Between two log lines about one unusable key."""

MAX_MADE = 16_384


@dataclass(frozen=True, slots=True)
class _Made:
    key: ApiKey | KeyRecord
    tenant: TenantRecord | None
    principal: Principal


class Authenticator:
    def __init__(
        self, api_keys: Sequence[ApiKey], tiers: Mapping[str, Tier], stored: StoredKeys | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._blind = blinding()
        self._stored = stored
        self._clock = clock
        self._tiers = all_tiers(tiers)
        self._configured = {self._blind(bytes.fromhex(key.sha256)): key for key in api_keys}
        self._made: dict[str, _Made] = {}
        self._logged_at: dict[str, float] = {}
        self._anonymous = replace(ANONYMOUS, tier=self._tiers[DEFAULT_TIER])

    async def principal(self, headers: Headers, framing: Framing) -> Principal:
        """Raises Unauthorized, whose message never gives the reason; UnusableKey where the key's tier is not configured; Unavailable where
        the store of keys is needed and does not answer.
        """
        if not self._configured and (self._stored is None or not await self._stored.has_keys()):
            return self._anonymous
        key = key_in(headers, framing)
        digest = digest_of(key)
        configured = self._configured.get(self._blind(digest)) if self._configured else None
        if configured is not None:
            tenant = None if self._stored is None else await self._stored.tenant(configured.tenant)
            return self._known(configured, tenant) or self._keep(configured, tenant, self._of_configured(configured, tenant))
        stored = None if self._stored is None else await self._stored.find(digest)
        if stored is None:
            raise _unauthorized(framing)
        return self._known(stored.key, stored.tenant) or self._keep(stored.key, stored.tenant, self._of_stored(stored))

    def _known(self, key: ApiKey | KeyRecord, tenant: TenantRecord | None) -> Principal | None:
        made = self._made.get(key.sha256)
        return made.principal if made is not None and made.key is key and made.tenant is tenant else None

    def _keep(self, key: ApiKey | KeyRecord, tenant: TenantRecord | None, principal: Principal) -> Principal:
        remember(self._made, key.sha256, _Made(key, tenant, principal), MAX_MADE)
        return principal

    def _of_configured(self, key: ApiKey, tenant: TenantRecord | None) -> Principal:
        """tenant: its tier holds for a key without one"""
        key_id = f"key-{key.sha256[:12]}"
        name = key.tier or (DEFAULT_TIER if tenant is None else tenant.tier)
        principal = Principal(
            tenant=key.tenant, user=key.user, tier_name=name, tier=self._tier(key_id, name), key_id=key_id, role=KeyRole(key.role)
        )
        return principal if tenant is None else with_record(principal, tenant)

    def _of_stored(self, stored: StoredKey) -> Principal:
        return stored_principal(stored, self._tier(stored.key.id, stored.tier_name))

    def _tier(self, key_id: str, name: str) -> Tier:
        """Raises UnusableKey, and logs the reason now and then."""
        tier = self._tiers.get(name)
        if tier is None:
            now = self._clock()
            if now - self._logged_at.get(key_id, float("-inf")) >= LOG_EVERY_S:
                self._logged_at[key_id] = now
                log.error("key %s is refused: its tier %s is not in the configuration", key_id, name)
            raise UnusableKey("This API key cannot be used on this server; its operator finds the reason in the log.")
        return tier


def stored_principal(stored: StoredKey, tier: Tier) -> Principal:
    """tier: of the stored key's `tier_name`"""
    key = stored.key
    principal = Principal(
        tenant=key.tenant, user=key.user, tier_name=stored.tier_name, tier=tier, key_id=key.id, role=key.role, limits=key.limits
    )
    return with_record(principal, stored.tenant)


def with_record(principal: Principal, tenant: TenantRecord) -> Principal:
    tier = principal.tier
    if tenant.monthly_budget is not None:
        tier = replace(tier, monthly_budget=tenant.monthly_budget)
    return replace(principal, tenant_id=tenant.id, tenant_since=tenant.created_at, tier=tier, options=tenant.options)


def key_in(headers: Headers, framing: Framing) -> bytes:
    """Raises Unauthorized where the request carries no key, several, or one that is too long."""
    given = [value for name, value in headers if name == framing.key_header]
    if len(given) != 1 or len(given[0]) > MAX_KEY_BYTES:
        raise _unauthorized(framing)
    scheme, _, key = given[0].partition(b" ") if framing.key_scheme else (b"", b"", given[0])
    if scheme.lower() != framing.key_scheme.lower() or not key:
        raise _unauthorized(framing)
    return key.strip(b" ")


def _unauthorized(framing: Framing) -> Unauthorized:
    where = f"{framing.key_header.decode().title()}: {framing.key_scheme.decode()}".rstrip()
    return Unauthorized(f"This server wants a valid API key: send it as '{where} KEY'.")
