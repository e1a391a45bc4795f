"""The limits that hold for a caller, from its tier, its key and the deployment: which counter each has, and its number. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from headrace.core.money import NANOS
from headrace.gateway.access.principal import KeyLimits, Principal
from headrace.policy.limits.book import Claim
from headrace.policy.limits.ceiling import RequestCeiling
from headrace.policy.limits.counters import Amounts, Unit, Window
from headrace.policy.limits.price import Price
from headrace.policy.limits.tier import NO_BUDGET, DeploymentBudget, Tier

MAX_CALLERS = 4096
"""Callers whose limits are kept in memory, some kilobytes each; those of the one that was seen longest ago are made again."""

MAX_NUMBER = 2**62
"""The largest number that a counter is compared with: it fits the whole numbers of every store."""

TIER_LIMITS = (
    ("requests_per_minute", Window.MINUTE, Unit.REQUESTS),
    ("max_concurrent_requests", Window.OPEN, Unit.OPEN),
    ("input_tokens_per_minute", Window.MINUTE, Unit.INPUT),
    ("output_tokens_per_minute", Window.MINUTE, Unit.OUTPUT),
    ("daily_tokens", Window.DAY, Unit.TOKENS),
    ("monthly_tokens", Window.MONTH, Unit.TOKENS),
    ("daily_budget", Window.DAY, Unit.NANOS),
    ("monthly_budget", Window.MONTH, Unit.NANOS),
)
"""Field of a tier, window, unit: each tenant's, all its keys together."""

KEY_LIMITS = (
    ("requests_per_minute", Window.MINUTE, Unit.REQUESTS),
    ("monthly_budget", Window.MONTH, Unit.NANOS),
)
"""Field of `KeyLimits`, window, unit: of one key."""

DEPLOYMENT_LIMITS = (
    ("daily_budget", Window.DAY, Unit.NANOS),
    ("monthly_budget", Window.MONTH, Unit.NANOS),
)
"""Field of `DeploymentBudget`, window, unit: of all tenants together."""

BEFORE_PARSING = (Unit.REQUESTS, Unit.OPEN)
"""Units that are known before a body is read."""


class Scope(StrEnum):
    """Whose requests one limit counts."""

    TENANT = "tenant"
    USER = "user"
    KEY = "key"
    DEPLOYMENT = "deployment"


@dataclass(frozen=True, slots=True)
class LimitRule:
    """One limit of a caller. option: the one that sets it; number: in tokens, requests or nano-units, inclusive"""

    option: str
    scope: Scope
    counter: str
    window: Window
    unit: Unit
    number: int

    @property
    def name(self) -> str:
        """For refusals. A tenant's and a user's options differ; a key and the deployment have options of the same names as a tenant."""
        return self.option if self.scope in (Scope.TENANT, Scope.USER) else f"{self.option} of this {self.scope}"

    @property
    def label(self) -> str:
        """Its name for metrics and logs, of which there are as many as the tables above have rows, and one for users."""
        return self.option if self.scope in (Scope.TENANT, Scope.USER) else f"{self.scope}_{self.option}"

    @property
    def is_of_deployment(self) -> bool:
        """Whether other tenants count in it too: its number and what is used of it are not for a tenant's eyes."""
        return self.scope is Scope.DEPLOYMENT

    @property
    def is_quota(self) -> bool:
        """Whether it is used up for a day or a month, and not for a minute."""
        return self.window in (Window.DAY, Window.MONTH)

    def claim(self, amount: int | None) -> Claim:
        return Claim(self.counter, self.window, self.unit, self.number, amount)


def rules_of(principal: Principal, budget: DeploymentBudget = NO_BUDGET) -> tuple[LimitRule, ...]:
    """Every limit of a caller; none where nothing has to be counted. budget: of the deployment, in which every caller's requests count"""
    return tuple(_rules(principal.tenant_key, principal.tier, principal.user, principal.key_id, principal.limits, budget))


def deployment_rules(budget: DeploymentBudget) -> tuple[LimitRule, ...]:
    """The limits that all tenants share; none without a budget."""
    return tuple(_scope_rules(budget, DEPLOYMENT_LIMITS, Scope.DEPLOYMENT, "deployment"))


def _rules(tenant_key: str, tier: Tier, user: str, key_id: str, key_limits: KeyLimits, budget: DeploymentBudget) -> Iterator[LimitRule]:
    yield from _scope_rules(tier, TIER_LIMITS, Scope.TENANT, f"tenant:{tenant_key}")
    if (number := tier.user_requests_per_minute) is not None:
        option = "user_requests_per_minute"
        yield LimitRule(option, Scope.USER, f"user:{tenant_key}:{user}:requests_per_minute", Window.MINUTE, Unit.REQUESTS, number)
    yield from _scope_rules(key_limits, KEY_LIMITS, Scope.KEY, f"key:{key_id}")
    yield from deployment_rules(budget)


def _scope_rules(numbers: object, limits: tuple[tuple[str, Window, Unit], ...], scope: Scope, counters: str) -> Iterator[LimitRule]:
    """counters: what the names of their counters begin with"""
    for option, window, unit in limits:
        if (number := getattr(numbers, option)) is not None:
            counted = round(number * NANOS) if unit is Unit.NANOS else number
            yield LimitRule(option, scope, f"{counters}:{option}", window, unit, min(counted, MAX_NUMBER))


@dataclass(frozen=True, slots=True, eq=False)
class CallerLimits:
    """What depends on the caller of a request alone, made once for each caller.

    first_rules   which `first_claims` are of: taken or read before a body is read; none where nothing is taken then
    takes_open    whether these need a reservation, which gives back an open request at its end
    token_rules   what is taken once the prompt is tokenized
    ceiling       of a free model
    """

    first_rules: tuple[LimitRule, ...]
    first_claims: tuple[Claim, ...]
    takes_open: bool
    token_rules: tuple[LimitRule, ...]
    ceiling: RequestCeiling


def limits_of(principal: Principal, budget: DeploymentBudget = NO_BUDGET) -> CallerLimits:
    """budget: of the deployment"""
    tier = principal.tier
    return _limits_of(principal.tenant_key, principal.tier_name, tier, principal.user, principal.key_id, principal.limits, budget)


@lru_cache(maxsize=MAX_CALLERS)
def _limits_of(
    tenant_key: str, tier_name: str, tier: Tier, user: str, key_id: str, key_limits: KeyLimits, budget: DeploymentBudget
) -> CallerLimits:
    """The parameters are all that the limits depend on, so that a change of the key, the tenant or the tier is another caller."""
    rules = tuple(_rules(tenant_key, tier, user, key_id, key_limits, budget))
    has_first = any(rule.unit in BEFORE_PARSING for rule in rules)
    first = tuple(rule for rule in rules if has_first and not rule.is_quota)
    return CallerLimits(
        first_rules=first,
        first_claims=tuple(rule.claim(1 if rule.unit in BEFORE_PARSING else None) for rule in first),
        takes_open=any(rule.unit is Unit.OPEN for rule in first),
        token_rules=tuple(rule for rule in rules if rule.unit not in BEFORE_PARSING),
        ceiling=RequestCeiling(
            tier=tier_name,
            context_tokens=tier.max_context_tokens,
            output_tokens=_least(rules, Unit.OUTPUT),
            total_tokens=_least(rules, Unit.TOKENS),
            nanos=_least([rule for rule in rules if not rule.is_of_deployment], Unit.NANOS),
        ),
    )


@lru_cache(maxsize=MAX_CALLERS)
def ceiling_of(limits: CallerLimits, price: Price) -> RequestCeiling:
    """What a request of the caller may use at most of a model with this price."""
    return replace(limits.ceiling, price=price)


def _least(rules: Sequence[LimitRule], unit: Unit) -> int | None:
    return min((rule.number for rule in rules if rule.unit is unit), default=None)


def amounts_of(price: Price, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Amounts:
    """What one answered request uses. It is no longer open."""
    cost = price.cost_nanos(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, completion_tokens=completion_tokens)
    return Amounts(
        requests=1,
        open=0,
        input=prompt_tokens,
        output=completion_tokens,
        tokens=prompt_tokens + completion_tokens,
        nanos=min(cost, MAX_NUMBER),
    )
