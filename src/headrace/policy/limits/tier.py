"""Defines tiers: what a tenant may use, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.option import check_options, option
from headrace.core.request import PriorityClass, TierTerms
from headrace.policy.limits.price import MAX_MONEY, MIN_MONEY

MAX_WEIGHT = 1e6

CLASSES = tuple(member.name.lower() for member in PriorityClass)


class DeploymentBudget(NamedTuple):
    daily_budget: float | None = None
    monthly_budget: float | None = None


NO_BUDGET = DeploymentBudget()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """None: without this limit. Limits are each tenant's, all its keys together, unless they say otherwise."""

    class_: str = option("standard", "Priority class of its requests: `premium`, `standard` or `batch`.", one_of=CLASSES)
    weight: float = option(
        1.0,
        "Share of each step among the tiers of its class that have work; its tenants share what the tier gets.",
        above=0.0,
        high=MAX_WEIGHT,
    )
    requests_per_minute: int | None = option(
        None, "Requests that a tenant may start in a sliding minute ([limits.md](limits.md#counters-and-reservations)).", low=1
    )
    input_tokens_per_minute: int | None = option(None, "Prompt tokens in a sliding minute.", low=1)
    output_tokens_per_minute: int | None = option(None, "Generated tokens in a sliding minute.", low=1)
    user_requests_per_minute: int | None = option(None, "Requests of each user of a tenant in a sliding minute.", low=1)
    max_concurrent_requests: int | None = option(None, "Requests of a tenant at once.", low=1)
    max_context_tokens: int | None = option(None, "Prompt and output of one request together.", low=1)
    kv_share: float | None = option(
        None,
        "Part of an engine's KV blocks that a tenant's running sequences may hold while other tenants wait. "
        "Without one, a sequence beyond half of them makes room for smaller ones.",
        above=0.0,
        high=1,
    )
    daily_tokens: int | None = option(None, "Prompt and generated tokens in a UTC day.", low=1)
    monthly_tokens: int | None = option(None, "The same in a UTC month.", low=1)
    daily_budget: float | None = option(None, "Money in a UTC day, in the currency of `prices`.", low=MIN_MONEY, high=MAX_MONEY)
    monthly_budget: float | None = option(None, "Money in a UTC month.", low=MIN_MONEY, high=MAX_MONEY)
    models: tuple[str, ...] = option((), "Names of the models that may be used.", shown="all")
    ttft_ms: float | None = option(None, "Goal for the first token, which the scheduler keeps where it can.", above=0.0)
    tpot_ms: float | None = option(None, "Goal for each further token.", above=0.0)

    @property
    def priority(self) -> PriorityClass:
        return PriorityClass[self.class_.upper()]

    def terms(self, name: str) -> TierTerms:
        return TierTerms(name=name, weight=self.weight, kv_share=self.kv_share, ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)

    def checked(self, where: str) -> Tier:
        check_options(self, where)
        return self

    @property
    def budgets(self) -> dict[str, float]:
        given = {"daily_budget": self.daily_budget, "monthly_budget": self.monthly_budget}
        return {name: money for name, money in given.items() if money is not None}


DEFAULT_TIER = "standard"

BUILT_IN_TIERS: Mapping[str, Tier] = {
    "enterprise": Tier(class_="premium", weight=8.0, max_context_tokens=131_072),
    "premium": Tier(class_="premium", weight=4.0, max_context_tokens=131_072),
    "standard": Tier(),
    "free": Tier(weight=0.5, requests_per_minute=60, max_context_tokens=32_768),
    "batch": Tier(class_="batch", weight=0.25),
}
"""One of the same name in a configuration takes the place of the whole tier here."""


def all_tiers(configured: Mapping[str, Tier]) -> dict[str, Tier]:
    return {**BUILT_IN_TIERS, **configured}
