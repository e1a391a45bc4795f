"""Authentication: the principal that an API key belongs to. With keys configured, every path that is not marked public wants one.

`gateway.app` decides by the path that the router matched, never by a URL rebuilt from headers. Keys exist here only as SHA-256 digests. The
lookup is blinded: digests are indexed by a keyed hash whose secret is drawn at start, so the timing of a lookup depends on a value that the
client can neither compute nor choose (double HMAC: a comparison in constant time whose cost does not grow with the number of keys).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.core.errors import Unauthorized
from headrace.gateway.access.principal import ANONYMOUS, Principal
from headrace.gateway.config import ApiKey, digest_of
from headrace.policy.limits.tier import DEFAULT_TIER, Tier, all_tiers

MAX_KEY_BYTES = 512
_MESSAGE = "This server wants a valid API key: send it as 'Authorization: Bearer KEY'."


class Authenticator:
    def __init__(self, api_keys: Sequence[ApiKey], tiers: Mapping[str, Tier]) -> None:
        """
        api_keys  with digests, as `gateway.config` leaves them; empty: the server is open
        tiers     of the configuration
        """
        self._secret = secrets.token_bytes(32)
        self._tiers = all_tiers(tiers)
        self._principals = {self._blinded(bytes.fromhex(key.sha256)): self._configured(key) for key in api_keys}
        self._anonymous = replace(ANONYMOUS, tier=self._tiers[DEFAULT_TIER])

    @property
    def is_open(self) -> bool:
        return not self._principals

    def principal(self, headers: Sequence[tuple[bytes, bytes]]) -> Principal:
        """The caller of a request with these headers. Raises Unauthorized, whose message never says what was wrong."""
        if self.is_open:
            return self._anonymous
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or len(given[0]) > MAX_KEY_BYTES:
            raise Unauthorized(_MESSAGE)
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized(_MESSAGE)
        principal = self._principals.get(self._blinded(digest_of(key.strip(b" "))))
        if principal is None:
            raise Unauthorized(_MESSAGE)
        return principal

    def _configured(self, key: ApiKey) -> Principal:
        name = key.tier or DEFAULT_TIER
        tier = self._tiers[name] if key.tier else replace(self._tiers[name], class_=key.priority)
        return Principal(tenant=key.tenant, user=key.user, tier_name=name, tier=tier, weight=key.weight, key_id=f"key-{key.sha256[:12]}")

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()
