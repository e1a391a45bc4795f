"""Tiers: what a tenant may use, as data. docs/tenancy.md says where each number is enforced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from headrace.core.errors import ConfigError
from headrace.core.request import PriorityClass, TierTerms
from headrace.policy.limits.price import check_money

MAX_WEIGHT = 1e6


class DeploymentBudget(NamedTuple):
    """Money that all tenants together may use in a UTC day, a UTC month, in the currency of `prices`. None: without this limit"""

    daily_budget: float | None = None
    monthly_budget: float | None = None


NO_BUDGET = DeploymentBudget()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The rules of one tier. None: without this limit. Limits are each tenant's, all its keys together, unless they say otherwise.

    class_                    priority class of its requests: premium, standard or batch (the file's key is `class`)
    weight                    share of each step among the tiers of its class that have work, > 0; the tier's tenants share what it gets
    requests_per_minute       started in any 60 s
    input_tokens_per_minute   prompt tokens;  output_tokens_per_minute  generated tokens
    user_requests_per_minute  of each user of a tenant
    max_concurrent_requests   open at once
    max_context_tokens        of one request: prompt and output together
    kv_share                  part of an engine's KV blocks that a tenant's running sequences may hold while other tenants wait, in (0, 1]
    daily_tokens, monthly_tokens   prompt and generated tokens in a UTC day, a UTC month
    daily_budget, monthly_budget   money in the same, in the currency of `prices`
    models                    names that may be used; empty: all
    ttft_ms, tpot_ms          goals for the first token and for each further one, which the scheduler keeps where it can
    """

    class_: str = "standard"
    weight: float = 1.0
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    user_requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_context_tokens: int | None = None
    kv_share: float | None = None
    daily_tokens: int | None = None
    monthly_tokens: int | None = None
    daily_budget: float | None = None
    monthly_budget: float | None = None
    models: tuple[str, ...] = ()
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def priority(self) -> PriorityClass:
        return PriorityClass[self.class_.upper()]

    def terms(self, name: str) -> TierTerms:
        """The part of these rules that engines keep, under this name of the tier."""
        return TierTerms(name=name, weight=self.weight, kv_share=self.kv_share, ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)

    def checked(self, where: str) -> Tier:
        """This value if its rules hold. Raises ConfigError about a key below `where`."""
        if self.class_.upper() not in PriorityClass.__members__:
            raise ConfigError(f"{where}.class", f"{self.class_!r} is not one of premium, standard, batch")
        if not 0 < self.weight <= MAX_WEIGHT:
            raise ConfigError(f"{where}.weight", f"{self.weight} is outside 0 < weight <= {MAX_WEIGHT:g}")
        if self.kv_share is not None and not 0 < self.kv_share <= 1:
            raise ConfigError(f"{where}.kv_share", f"{self.kv_share} is outside 0 < kv_share <= 1")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not value > 0:
                raise ConfigError(f"{where}.{item.name}", f"{value} is not positive", "Leave it out for no limit.")
        for name, money in self.budgets.items():
            check_money(f"{where}.{name}", money)
        return self

    @property
    def budgets(self) -> dict[str, float]:
        """Name and money of each budget that is set."""
        given = {"daily_budget": self.daily_budget, "monthly_budget": self.monthly_budget}
        return {name: money for name, money in given.items() if money is not None}


DEFAULT_TIER = "standard"
"""The tier of tenants and keys that name none."""

BUILT_IN_TIERS: Mapping[str, Tier] = {
    "enterprise": Tier(class_="premium", weight=8.0, max_context_tokens=131_072),
    "premium": Tier(class_="premium", weight=4.0, max_context_tokens=131_072),
    "standard": Tier(),
    "free": Tier(weight=0.5, requests_per_minute=60, max_context_tokens=32_768),
    "batch": Tier(class_="batch", weight=0.25),
}
"""Tiers there are without configuration. One of the same name in a configuration takes the place of the whole tier here."""


def all_tiers(configured: Mapping[str, Tier]) -> dict[str, Tier]:
    return {**BUILT_IN_TIERS, **configured}
