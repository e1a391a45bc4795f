"""Tests that costs are exact: a price's decimals never add to a request's cost, and a budget never buys a token more than it pays for."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.core.money import NANOS
from headrace.policy.limits.price import Price, RequestCeiling

pytestmark = pytest.mark.pure

PRICES = st.integers(0, 10**12).map(lambda picos: picos / 10**6)
TOKENS = st.integers(0, 10**7)


@pytest.mark.parametrize(("price", "num_tokens", "nanos"), [(0.1, 3, 300), (0.15, 7, 1050), (2.3, 100, 230_000), (0.07, 1100, 77_000)])
def test_a_price_with_decimals_costs_no_fraction_more(price: float, num_tokens: int, nanos: int) -> None:
    assert Price(input=price).cost_nanos(prompt_tokens=num_tokens, cached_tokens=0, completion_tokens=0) == nanos
    assert Price(output=price).cost_nanos(prompt_tokens=0, cached_tokens=0, completion_tokens=num_tokens) == nanos


@given(PRICES, PRICES, PRICES, TOKENS, TOKENS, TOKENS)
def test_a_cost_is_that_of_decimal_arithmetic_rounded_up_once(
    plain: float, cached: float, output: float, num_plain: int, num_cached: int, num_output: int
) -> None:
    price = Price(input=plain, cached_input=cached, output=output).checked("prices.m")
    units = sum(Decimal(str(each)) * num for each, num in ((plain, num_plain), (cached, num_cached), (output, num_output)))
    cost = price.cost_nanos(prompt_tokens=num_plain + num_cached, cached_tokens=num_cached, completion_tokens=num_output)
    assert cost == int((Decimal(units) * (NANOS // 10**6)).to_integral_value(ROUND_CEILING))


@given(st.integers(1, 10**12), st.integers(1, 10**6).map(lambda picos: picos / 10**6))
def test_a_budget_pays_for_the_output_that_it_allows_and_for_no_token_more(nanos: int, output: float) -> None:
    price = Price(output=output)
    most = RequestCeiling(nanos=nanos, price=price).max_tokens(0, 1)
    assert most is not None
    costs = [price.cost_nanos(prompt_tokens=0, cached_tokens=0, completion_tokens=most + more) for more in (0, 1)]
    assert costs[0] <= nanos < costs[1] or most == 1


def test_a_price_with_more_decimals_than_are_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prices\.m\.output: 5e-07 has more than 6 decimals"):
        Price(output=5e-07).checked("prices.m")
    Price(input=0.000001, output=999_999.999999).checked("prices.m")
