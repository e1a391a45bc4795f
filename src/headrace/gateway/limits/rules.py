"""The limits that hold for a caller, from its tier and its key: which counter each has, and its number. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.gateway.access.principal import Principal
from headrace.policy.limits.book import Claim
from headrace.policy.limits.ceiling import RequestCeiling
from headrace.policy.limits.counters import Amounts, Unit, Window
from headrace.policy.limits.price import NANOS, Price

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

OF_KEY = " of this key"

BEFORE_PARSING = (Unit.REQUESTS, Unit.OPEN)
"""Units that are known before a body is read."""


@dataclass(frozen=True, slots=True)
class LimitRule:
    """One limit of a caller. name: the option that sets it, for refusals; number: in tokens, requests or nano-units, inclusive"""

    name: str
    counter: str
    window: Window
    unit: Unit
    number: int

    @property
    def label(self) -> str:
        """Its name for metrics and logs, of which there are as many as `TIER_LIMITS` and `KEY_LIMITS` have rows, and one for users."""
        return f"key_{self.name.removesuffix(OF_KEY)}" if self.name.endswith(OF_KEY) else self.name

    @property
    def is_quota(self) -> bool:
        """Whether it is used up for a day or a month, and not for a minute."""
        return self.window in (Window.DAY, Window.MONTH)

    def claim(self, amount: int | None) -> Claim:
        return Claim(self.counter, self.window, self.unit, self.number, amount)


def rules_of(principal: Principal) -> tuple[LimitRule, ...]:
    """Every limit of a caller; none where nothing has to be counted."""
    return tuple(_rules(principal))


def _rules(principal: Principal) -> Iterator[LimitRule]:
    tenant = f"tenant:{principal.tenant_key}"
    yield from _scope_rules(principal.tier, TIER_LIMITS, tenant, "")
    if principal.tier.user_requests_per_minute is not None:
        number = principal.tier.user_requests_per_minute
        counter = f"user:{principal.tenant_key}:{principal.user}:requests_per_minute"
        yield LimitRule("user_requests_per_minute", counter, Window.MINUTE, Unit.REQUESTS, number)
    yield from _scope_rules(principal.limits, KEY_LIMITS, f"key:{principal.key_id}", OF_KEY)


def _scope_rules(numbers: object, limits: tuple[tuple[str, Window, Unit], ...], scope: str, suffix: str) -> Iterator[LimitRule]:
    for name, window, unit in limits:
        if (number := getattr(numbers, name)) is not None:
            counted = round(number * NANOS) if unit is Unit.NANOS else number
            yield LimitRule(name + suffix, f"{scope}:{name}", window, unit, min(counted, MAX_NUMBER))


def ceiling_of(principal: Principal, rules: tuple[LimitRule, ...], price: Price) -> RequestCeiling:
    def least(*units: Unit) -> int | None:
        return min((rule.number for rule in rules if rule.unit in units), default=None)

    return RequestCeiling(
        tier=principal.tier_name,
        context_tokens=principal.tier.max_context_tokens,
        output_tokens=least(Unit.OUTPUT),
        total_tokens=least(Unit.TOKENS),
        nanos=least(Unit.NANOS),
        price=price,
    )


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
