"""Defines the authenticated caller of a request. No repr shows a key or its hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headrace.core.errors import ConfigError
from headrace.core.option import Role, check_options, option
from headrace.core.request import PriorityClass
from headrace.core.strict_decode import NeedsExactlyOne
from headrace.observe.tenant_metrics import EVERY_TENANT, NO_TENANT, ShownTenants
from headrace.policy.limits.tier import DEFAULT_TIER, Tier


class KeyRole(StrEnum):
    """What a key is for."""

    USER = "user"
    """everything, for its own tenant"""
    READER = "reader"
    """reads what belongs to every tenant; generates, changes and stores nothing"""


READER_TIER = "role:reader"
"""Stands in a stored reader's key in the place of a tier. A gateway that knows no roles would pass over an unknown field of the record, and
take the key for a user's; a key whose tier it does not know it refuses (`UnusableKey`). No tier has this name.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """None: no limit. monthly_budget: in the currency of `prices`; models: empty, all of the tier's"""

    monthly_budget: float | None = None
    requests_per_minute: int | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """tenant_id     drawn when the tenant was created; "" for a tenant without a record in the store
    tenant_since  Unix seconds of the tenant's creation: earlier usage is that of another tenant of the same name
    options       the tenant's choices: name -> JSON value; an absent option has its default
    """

    tenant: str
    tenant_id: str = ""
    tenant_since: float = 0.0
    tier_name: str = DEFAULT_TIER
    tier: Tier = field(default_factory=Tier)
    key_id: str = ""
    role: KeyRole = KeyRole.USER
    user: str = ""
    limits: KeyLimits = field(default_factory=KeyLimits)
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def tenant_key(self) -> str:
        """Separates limits, caches, sessions and KV prefixes of tenants; a later tenant of the same name has another one."""
        return self.tenant_id or self.tenant

    @property
    def priority(self) -> PriorityClass:
        return self.tier.priority

    @property
    def reads_all(self) -> bool:
        """May read what belongs to every tenant, and may do nothing else."""
        return self.role is KeyRole.READER

    @property
    def logs_prompts(self) -> bool:
        return self.options.get("log_prompts") is True

    @property
    def may_use_all(self) -> bool:
        return not (self.tier.models or self.limits.models)

    def may_use(self, *names: str) -> bool:
        """Names of one model; the key and the tier may each list another."""
        return all(not allowed or any(name in allowed for name in names) for allowed in (self.tier.models, self.limits.models))


ANONYMOUS = Principal(tenant="default")
"""Before the key is checked, and on public paths; known by identity (`gateway.app`). A server without keys has a copy of it with its tier
(`access.auth.Authenticator`)."""


ANY_ACCESS, OPEN_ACCESS = "auto", "open"

SHA256_HEX = re.compile(r"[0-9a-f]{64}")
MIN_KEY_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """Give `key` (plain, hashed at once) or `sha256` (hex of the digest), never both."""

    key: str = option(
        "",
        "The key itself, at least 8 characters; only its digest is kept. Other users of the machine can see a flag, and not "
        "the variable `HEADRACE_API_KEY`.",
        repr=False,
        role=Role.SECURITY,
    )
    sha256: str = option("", 'Hex digest of the key instead: `printf %s "$KEY" \\| sha256sum`.', repr=False, role=Role.SECURITY)
    tenant: str = option("", "Opaque name for fairness, separation of caches, and the log.", shown="from the digest")
    user: str = option("", "The person or program that uses the key; limits and usage may be by user.")
    tier: str = option(
        "",
        "Name of the tenant's rules, class and weight among them: one of `tiers` or a built-in one.",
        shown="the tenant's, else `standard`",
    )
    role: str = option(
        KeyRole.USER.value,
        "`reader`: the key reads what belongs to every tenant, and generates nothing ([identity.md](identity.md#readers)).",
        one_of=tuple(KeyRole),
        role=Role.SECURITY,
    )


def digest_of(key: bytes) -> bytes:
    """Keys are long and random, so a fast hash is safe."""
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
    check_options(key, where)
    if key.tier and key.tier not in tiers:
        raise ConfigError(f"{where}.tier", f"{key.tier!r} is not a tier", f"There are: {', '.join(tiers)}.")


class OpenMetrics(StrEnum):
    """What a reader without a key sees on a server with keys."""

    NONE = "none"
    """no page: a key is wanted"""
    TOTALS = "totals"
    """sums over all tenants, without series of tenants and tiers"""
    ALL = "all"
    """the whole page"""

    def shown_to(self, reader: Principal, *, has_several: bool) -> ShownTenants:
        if self is not OpenMetrics.NONE:
            return EVERY_TENANT if self is OpenMetrics.ALL else NO_TENANT
        if reader.reads_all or not reader.key_id or not has_several:
            return EVERY_TENANT
        return ShownTenants(own=reader.tenant)
