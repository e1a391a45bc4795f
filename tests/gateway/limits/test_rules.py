"""Tests that a refusal's `Retry-After`, its x-ratelimit headers and its message state one moment, whatever limits it meets."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.gateway.access.principal import KeyLimits, Principal
from headrace.gateway.http.errors import error_reply
from headrace.gateway.limits.rules import DEPLOYMENT_RETRY_MS, SHOWN, LimitRule, duration, headers, refusal, rules_of, states
from headrace.policy.limits.book import ClaimReading, TakeResult, is_over
from headrace.policy.limits.counters import Moment
from headrace.policy.limits.tier import DeploymentBudget, Tier

pytestmark = pytest.mark.pure

NUMBERS = st.none() | st.integers(1, 50)
MONEY = st.none() | st.integers(1, 50).map(lambda number: number * 1e-9)
OF_TENANTS = (
    *("requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute", "user_requests_per_minute"),
    *("max_concurrent_requests", "daily_tokens", "monthly_tokens"),
)
BUDGETS = st.fixed_dictionaries({"daily_budget": MONEY, "monthly_budget": MONEY})
ALL_RULES = st.builds(
    lambda counts, money, of_key, of_all: rules_of(
        Principal(tenant="acme", user="ann", key_id="k", tier=Tier(**counts, **money), limits=of_key), DeploymentBudget(**of_all)
    ),
    st.fixed_dictionaries(dict.fromkeys(OF_TENANTS, NUMBERS)),
    BUDGETS,
    st.builds(KeyLimits, requests_per_minute=NUMBERS, monthly_budget=MONEY),
    BUDGETS,
)
AMOUNTS = st.integers(0, 60)


def milliseconds(text: str) -> int:
    """A duration of Go, as OpenAI's headers have it."""
    assert re.fullmatch(r"(\d+h\d+m|\d+m)?\d+(\.\d+)?s|\d+ms", text), text
    units = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
    return int(sum(Fraction(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", text)))


@given(st.integers(0, 10**10))
def test_a_duration_loses_no_millisecond(ms: int) -> None:
    assert milliseconds(duration(ms)) == ms


def test_a_refusal_by_a_limit_of_which_nothing_is_used_states_the_same_moment() -> None:
    now = Moment(5_000, 5_000)
    rules = rules_of(Principal(tenant="acme", user="ann", key_id="k", tier=Tier(input_tokens_per_minute=50)), DeploymentBudget())
    claims = [rule.claim(60) for rule in rules]
    result = TakeResult(False, now, tuple(ClaimReading(0, 0) for _ in rules))
    error = refusal(rules, claims, result)
    found = dict(headers(states(rules, claims, result)))
    assert milliseconds(found[b"x-ratelimit-reset-tokens"].decode()) == round(1000 * error.retry_after_s) > 0


@given(ALL_RULES, st.integers(0, 10**7), st.integers(0, 4 * 10**12), st.data())
def test_a_refusal_states_one_moment_in_its_headers_and_its_message(
    rules: tuple[LimitRule, ...], steady_ms: int, unix_ms: int, data: st.DataObject
) -> None:
    now = Moment(steady_ms, unix_ms)
    claims = [rule.claim(data.draw(st.none() | st.integers(1, 60))) for rule in rules]
    readings = tuple(ClaimReading(data.draw(AMOUNTS), data.draw(AMOUNTS)) for _ in rules)
    over = [rule for rule, claim, reading in zip(rules, claims, readings, strict=True) if is_over(claim, reading, now)]
    assume(over)
    result = TakeResult(False, now, readings)
    error = refusal(rules, claims, result)
    retry_s = int(dict(error_reply(error).headers)[b"retry-after"])
    assert retry_s == max(1, math.ceil(error.retry_after_s))
    found = dict(headers(states(rules, claims, result)))
    for names in {SHOWN[rule.unit] for rule in over if rule.unit in SHOWN}:
        assert milliseconds(found[names[2]].decode()) <= 1000 * retry_s, "a client that waits for either is not refused by it again"
    [refusing, *others] = [rule for rule in over if rule.label == error.limit]
    assert not others
    if refusing.unit in SHOWN:
        _, _, reset = SHOWN[refusing.unit]
        assert milliseconds(found[reset].decode()) == round(1000 * error.retry_after_s)
        assert "Try again in" not in str(error) or f"Try again in {found[reset].decode()}." in str(error)
    if refusing.is_of_deployment:
        assert error.retry_after_s <= DEPLOYMENT_RETRY_MS / 1000
