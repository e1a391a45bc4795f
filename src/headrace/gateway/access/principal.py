"""The authenticated caller of a request: what the request inherits from its key."""

from __future__ import annotations

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
    tenant     what limits, caches, sessions and bills are separated by
    tier_name  of the tenant's tier, whose rules `tier` has
    key_id     public name of the key; "" where the server is open
    user       the person or program that the tenant gave the key to; "" where it did not say
    """

    tenant: str
    tier_name: str = DEFAULT_TIER
    tier: Tier = field(default_factory=Tier)
    key_id: str = ""
    user: str = ""
    limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def priority(self) -> PriorityClass:
        return self.tier.priority

    @property
    def weight(self) -> float:
        return self.tier.weight

    def may_use(self, model: str) -> bool:
        """Whether the key and the tier allow the model of this name."""
        return all(not allowed or model in allowed for allowed in (self.tier.models, self.limits.models))


ANONYMOUS = Principal(tenant="default")
"""The caller of every request while there is no key."""
