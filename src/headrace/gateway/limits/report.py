"""What a tenant has used of its limits, for people. Read from the book, whether servers run or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.gateway.access.principal import Principal
from headrace.gateway.limits.rules import LimitRule, rules_of
from headrace.gateway.limits.store import LimitStore
from headrace.gateway.limits.verdict import LimitState, states
from headrace.policy.limits.counters import Unit
from headrace.policy.limits.price import NANOS
from headrace.policy.limits.tier import Tier


def tenant_principal(name: str, tier_name: str, tier: Tier, *, monthly_budget: float | None) -> Principal:
    """A caller whose limits are those of the tenant, without any key's or user's. monthly_budget: in the place of the tier's; None: that"""
    own = replace(tier, user_requests_per_minute=None)
    return Principal(tenant=name, tier_name=tier_name, tier=own if monthly_budget is None else replace(own, monthly_budget=monthly_budget))


async def limit_states(store: LimitStore, principal: Principal) -> list[LimitState]:
    """Every limit of a caller as it is now; nothing is taken. Raises StoreFailed."""
    rules = rules_of(principal)
    claims = [rule.claim(None) for rule in rules]
    return states(rules, claims, await store.take(None, claims)) if rules else []


def shown_limits(found: Sequence[LimitState]) -> list[dict[str, object]]:
    """As plain data: requests, tokens, or money in the currency of `prices`; what is reserved counts as used."""
    return [
        {
            "limit": state.rule.name,
            "number": _in_units(state.rule, state.rule.number),
            "used": _in_units(state.rule, state.used),
            "left": _in_units(state.rule, state.remaining),
            "reset_s": state.reset_ms / 1000,
        }
        for state in found
    ]


def _in_units(rule: LimitRule, value: int) -> float | int:
    return value / NANOS if rule.unit is Unit.NANOS else value
