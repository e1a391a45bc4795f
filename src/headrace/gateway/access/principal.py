"""The authenticated caller of a request: what the request inherits from its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.core.request import PriorityClass
from headrace.policy.limits.tier import DEFAULT_TIER, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of one key beside those of its tenant's tier. None: without this limit.

    monthly_budget       money in a UTC month, in the currency of `prices`
    requests_per_minute  started in any 60 s
    models               names that it may use, of those that the tier allows; empty: all of them
    """

    monthly_budget: float | None = None
    requests_per_minute: int | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """
    tenant     name of the tenant, by which metrics, usage records and the request log are separated
    tenant_id  drawn when the tenant was created; "" where no record of it is in the store
    tenant_since  Unix seconds at which it was created: usage from before is that of an earlier tenant of the same name
    tier_name  of the tenant's tier, whose rules `tier` has
    key_id     public name of the key; "" where the server is open
    weight     share of the tenant among the tenants of its tier
    user       the person or program that the tenant gave the key to; "" where it did not say
    limits     of the key alone
    options    what the tenant chose for itself, JSON values by name; an absent one has its default
    """

    tenant: str
    tenant_id: str = ""
    tenant_since: float = 0.0
    tier_name: str = DEFAULT_TIER
    tier: Tier = field(default_factory=Tier)
    key_id: str = ""
    user: str = ""
    weight: float = 1.0
    limits: KeyLimits = field(default_factory=KeyLimits)
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def tenant_key(self) -> str:
        """What limits, caches, sessions and prefixes in the KV cache are separated by: a later tenant of the same name has another one."""
        return self.tenant_id or self.tenant

    @property
    def priority(self) -> PriorityClass:
        return self.tier.priority

    @property
    def logs_prompts(self) -> bool:
        """Whether the tenant has opted in that its prompts are kept in usage records (docs/usage.md)."""
        return self.options.get("log_prompts") is True

    @property
    def may_use_all(self) -> bool:
        """Whether neither the key nor the tier names models."""
        return not (self.tier.models or self.limits.models)

    def may_use(self, *names: str) -> bool:
        """Whether the key and the tier allow the model of these names: each may call it by another one of them."""
        return all(not allowed or any(name in allowed for name in names) for allowed in (self.tier.models, self.limits.models))


ANONYMOUS = Principal(tenant="default")
"""The caller of a public path, and of every request while there is no key and no configured tier of the default name."""
