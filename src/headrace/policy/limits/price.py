"""Computes what tokens cost, and the most that one request may use under its limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from headrace.core.errors import ConfigError
from headrace.core.option import check_options, option

PICOS_PER_NANO = 1000

PICOS_OF_PRICE = 1_000_000
"""Pico-units per token for a price of 1 per million tokens."""

PRICE_DECIMALS = 6

MAX_PRICE = 1e6
"""The highest price: it keeps a month's sum within a 64-bit integer."""


MIN_MONEY, MAX_MONEY = 1e-9, 1e9

MAX_PRICES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    input: float = option(
        0.0, "Price of a million prompt tokens of the model NAME; six decimals at most, as the next two.", low=0.0, high=MAX_PRICE
    )
    output: float = option(0.0, "Price of a million generated tokens.", low=0.0, high=MAX_PRICE)
    cached_input: float | None = option(
        None, "Price of a million prompt tokens that were found in a cache.", shown="as `input`", low=0.0, high=MAX_PRICE
    )

    def checked(self, where: str) -> Price:
        check_options(self, where)
        for name in ("input", "output", "cached_input"):
            value = getattr(self, name)
            if value is not None and round(value, PRICE_DECIMALS) != value:
                raise ConfigError(f"{where}.{name}", f"{value} has more than {PRICE_DECIMALS} decimals", "Round it.")
        return self

    def cost_nanos(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """The cost, rounded up."""
        cached = self.input if self.cached_input is None else self.cached_input
        picos = (prompt_tokens - cached_tokens) * picos_per_token(self.input) + completion_tokens * picos_per_token(self.output)
        if cached_tokens:
            picos += cached_tokens * picos_per_token(cached)
        return -(-picos // PICOS_PER_NANO)


@lru_cache(maxsize=MAX_PRICES)
def picos_per_token(price: float) -> int:
    return round(price * PICOS_OF_PRICE)


FREE = Price()


def highest(prices: Sequence[Price]) -> Price:
    """The highest of each number: no request costs more at any of the prices, unless cached tokens cost more than others."""
    return Price(input=max([price.input for price in prices]), output=max([price.output for price in prices]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCeiling:
    """None in a field: no such bound."""

    tier: str = ""
    context_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    nanos: int | None = None
    price: Price = FREE

    def max_tokens(self, prompt_tokens: int, num_sequences: int) -> int | None:
        """At least 1: a request for which nothing is left is refused by the limit."""
        bounds = list(self._bounds(prompt_tokens))
        return max(1, min(bounds) // num_sequences) if bounds else None

    def deciding(self, *, has_max_tokens: bool) -> RequestCeiling:
        """The bounds on which an answer's length depends: the context alone if the client sent `max_tokens`."""
        if has_max_tokens:
            return RequestCeiling(tier=self.tier, context_tokens=self.context_tokens)
        return self if self.nanos is not None else replace(self, price=FREE)

    def _bounds(self, prompt_tokens: int) -> Iterator[int]:
        if self.output_tokens is not None:
            yield self.output_tokens
        if self.total_tokens is not None:
            yield self.total_tokens - prompt_tokens
        if self.nanos is not None and (output_picos := picos_per_token(self.price.output)):
            left = self.nanos - self.price.cost_nanos(prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=0)
            yield left * PICOS_PER_NANO // output_picos


UNBOUNDED = RequestCeiling()
