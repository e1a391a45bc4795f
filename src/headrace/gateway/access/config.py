"""API keys as the configuration names them. A plain key is hashed at once; no repr shows either."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.core.errors import ConfigError
from headrace.core.request import PriorityClass
from headrace.core.strict_decode import NeedsExactlyOne
from headrace.policy.limits.tier import Tier

SHA256_HEX = re.compile(r"[0-9a-f]{64}")
MIN_KEY_CHARS = 8
PLAIN_PRIORITY, PLAIN_WEIGHT = "standard", 1.0
"""Class and weight of a key that names neither these nor a tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key and its tenant. Give `key` (plain, hashed at once) or `sha256` (hex of the digest), never both.

    tenant    opaque name: fairness, cache salt and log; defaults to a name made from the digest
    user      the person or program that uses it; limits and usage may be by user
    tier      name of the tenant's rules; empty: the default tier's, with the next two
    priority  class of this key's requests (premium | standard | batch); a body's `priority` may only lower it
    weight    share of the tenant among the tenants of its tier
    """

    key: str = field(default="", repr=False)
    sha256: str = field(default="", repr=False)
    tenant: str = ""
    user: str = ""
    tier: str = ""
    priority: str = PLAIN_PRIORITY
    weight: float = PLAIN_WEIGHT


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key: keys are long and random, so no slow hash is needed."""
    return hashlib.sha256(key).digest()


def with_digest(key: ApiKey) -> ApiKey:
    digest = key.sha256 or digest_of(key.key.encode()).hex()
    return replace(key, key="", sha256=digest, tenant=key.tenant or f"key-{digest[:12]}")


def check_key(where: str, key: ApiKey, tiers: Mapping[str, Tier]) -> None:
    if bool(key.key) == bool(key.sha256):
        raise NeedsExactlyOne(where, "key", "sha256")
    if key.key and len(key.key) < MIN_KEY_CHARS:
        raise ConfigError(f"{where}.key", f"is shorter than {MIN_KEY_CHARS} characters", "Use 32 random bytes.")
    if key.sha256 and SHA256_HEX.fullmatch(key.sha256) is None:
        raise ConfigError(f"{where}.sha256", "is not 64 lower-case hex digits")
    if key.tier and key.tier not in tiers:
        raise ConfigError(f"{where}.tier", f"{key.tier!r} is not a tier", f"There are: {', '.join(tiers)}.")
    if key.tier and (key.priority, key.weight) != (PLAIN_PRIORITY, PLAIN_WEIGHT):
        raise ConfigError(f"{where}.tier", "is given beside priority or weight", "A tier has its own: leave them out.")
    if key.priority.upper() not in PriorityClass.__members__:
        raise ConfigError(f"{where}.priority", f"{key.priority!r} is not one of premium, standard, batch")
    if not 0 < key.weight <= 1e6:
        raise ConfigError(f"{where}.weight", f"{key.weight} is outside 0 < weight <= 1e6")
