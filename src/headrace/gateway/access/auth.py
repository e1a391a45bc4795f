"""Authentication: the principal that an API key belongs to. Once there is a key, every path that is not marked public wants one.

`gateway.app` decides by the path that the router matched, never by a URL rebuilt from headers. Keys are those of the configuration, then
those of the store (`access.stored_keys`). They exist here only as SHA-256 digests, and lookups are blinded (`access.blinding`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.core.errors import Unauthorized
from headrace.gateway.access.blinding import Blinding
from headrace.gateway.access.key_records import StoredKey
from headrace.gateway.access.principal import ANONYMOUS, Principal
from headrace.gateway.access.stored_keys import StoredKeys, unavailable
from headrace.gateway.config import ApiKey, digest_of
from headrace.policy.limits.tier import DEFAULT_TIER, Tier, all_tiers

log = logging.getLogger(__name__)

MAX_KEY_BYTES = 512
_MESSAGE = "This server wants a valid API key: send it as 'Authorization: Bearer KEY'."


class Authenticator:
    """One configuration's view of the keys."""

    def __init__(self, api_keys: Sequence[ApiKey], tiers: Mapping[str, Tier], stored: StoredKeys | None = None) -> None:
        """
        api_keys  with digests, as `gateway.config` leaves them
        tiers     of the configuration
        stored    keys of the store; None: there is none
        """
        self._blind = Blinding()
        self._stored = stored
        self._tiers = all_tiers(tiers)
        self._configured = {self._blind(bytes.fromhex(key.sha256)): self._of_configured(key) for key in api_keys}
        self._anonymous = replace(ANONYMOUS, tier=self._tiers[DEFAULT_TIER])

    async def principal(self, headers: Sequence[tuple[bytes, bytes]]) -> Principal:
        """The caller of a request with these headers.

        Raises Unauthorized, whose message never says what was wrong, and Unavailable where the store of keys is needed and does not answer.
        """
        if not self._configured and (self._stored is None or not await self._stored.has_keys()):
            return self._anonymous
        key = key_in(headers)
        digest = digest_of(key)
        if (configured := self._configured.get(self._blind(digest))) is not None:
            return configured
        found = None if self._stored is None else await self._stored.find(digest)
        if found is None:
            raise Unauthorized(_MESSAGE)
        return self._of_stored(found)

    def _of_configured(self, key: ApiKey) -> Principal:
        name = key.tier or DEFAULT_TIER
        tier = self._tiers[name] if key.tier else replace(self._tiers[name], class_=key.priority)
        return Principal(tenant=key.tenant, user=key.user, tier_name=name, tier=tier, weight=key.weight, key_id=f"key-{key.sha256[:12]}")

    def _of_stored(self, found: StoredKey) -> Principal:
        key, tenant = found.key, found.tenant
        name = key.tier or tenant.tier
        tier = self._tiers.get(name)
        if tier is None:
            log.error("key %s is refused: its tier %s is not in the configuration", key.id, name)
            raise unavailable()
        if tenant.monthly_budget is not None:
            tier = replace(tier, monthly_budget=tenant.monthly_budget)
        return Principal(
            tenant=key.tenant, user=key.user, tier_name=name, tier=tier, key_id=key.id, limits=key.limits, options=tenant.options
        )


def key_in(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The key that a request carries. Raises Unauthorized where it carries none, several, or one that is too long."""
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1 or len(given[0]) > MAX_KEY_BYTES:
        raise Unauthorized(_MESSAGE)
    scheme, _, key = given[0].partition(b" ")
    if scheme.lower() != b"bearer" or not key:
        raise Unauthorized(_MESSAGE)
    return key.strip(b" ")
