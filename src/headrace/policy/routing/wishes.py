"""Defines what a request may wish of the models and servers that answer it, and which of them may answer, in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from headrace.policy.limits.price import FREE, PRICE_DECIMALS, Price

OWN_ENGINES = "headrace"
"""The name of our own engines among the servers of a model."""

FADING = 0.98
"""An answer counts half as much after 34 later ones."""


class SortBy(StrEnum):
    PRICE = "price"
    THROUGHPUT = "throughput"


class RoutingWishes(NamedTuple):
    """models, fallbacks  that may answer where the asked one cannot, for any reason, in this order
    max_input_price, max_output_price  of a million tokens, in the operator's currency: a model that costs more never answers
    min_throughput  tokens per second of a stream; slower models are asked last
    sort            None: the asked model first, then its fallbacks as they are written
    order, only, ignore  names of a model's foreign servers, or OWN_ENGINES; servers beside `order` follow unless `allow_fallbacks` is off.
                    Without `order` and `allow_fallbacks` the server that is asked first is the only one
    """

    models: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    max_input_price: float | None = None
    max_output_price: float | None = None
    min_throughput: float | None = None
    sort: SortBy | None = None
    order: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    allow_fallbacks: bool = True

    @property
    def of_servers(self) -> RoutingWishes:
        return NO_WISHES._replace(order=self.order, only=self.only, ignore=self.ignore, allow_fallbacks=self.allow_fallbacks)

    @property
    def keeps_first_server(self) -> bool:
        return not (self.allow_fallbacks or self.order)


NO_WISHES = RoutingWishes()


class AnswerMeans:
    """Fading means of a model's finished answers."""

    __slots__ = ("_cached_tokens", "_num_timed", "_prompt_tokens", "_tpot_s")

    def __init__(self) -> None:
        self._prompt_tokens = self._cached_tokens = self._num_timed = self._tpot_s = 0.0

    def add(self, *, prompt_tokens: int, cached_tokens: int, tpot_s: float | None) -> None:
        """tpot_s: None: no output had a second token"""
        self._prompt_tokens = FADING * self._prompt_tokens + prompt_tokens
        self._cached_tokens = FADING * self._cached_tokens + cached_tokens
        if tpot_s is not None:
            self._num_timed, self._tpot_s = FADING * self._num_timed + 1.0, FADING * self._tpot_s + tpot_s

    @property
    def hit_rate(self) -> float:
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of one stream. None: not measured"""
        return self._num_timed / self._tpot_s if self._tpot_s else None


class ModelFigures(NamedTuple):
    """hit_rate, tokens_per_s: as in `AnswerMeans`"""

    name: str
    price: Price = FREE
    hit_rate: float = 0.0
    tokens_per_s: float | None = None

    @property
    def input_price(self) -> float:
        """A million prompt tokens cost this, the measured share of them at the price of cached ones."""
        cached = self.price.input if self.price.cached_input is None else self.price.cached_input
        return round(self.price.input - self.hit_rate * (self.price.input - cached), PRICE_DECIMALS)

    @property
    def mixed_price(self) -> float:
        """A million tokens cost this, three in four of them of prompts."""
        return (3.0 * self.input_price + self.price.output) / 4.0


def excess(figures: ModelFigures, wishes: RoutingWishes) -> str:
    for kind, price, most in (
        ("prompt", figures.price.input, wishes.max_input_price),
        ("completion", figures.price.output, wishes.max_output_price),
    ):
        if most is not None and price > most:
            return f"A million {kind} tokens cost {price:.12g}, and provider.max_price.{kind} is {most:.12g}."
    return ""


def ordered(figures: Sequence[ModelFigures], wishes: RoutingWishes) -> list[tuple[str, str]]:
    """The models that may answer, first choice first, each with the reason of its place. figures: in the request's order, which decides
    between equal ones
    """
    left = sorted([each for each in figures if not excess(each, wishes)], key=lambda each: _place(each, wishes))
    return [(each.name, _reason(each, wishes)) for each in left]


def _place(figures: ModelFigures, wishes: RoutingWishes) -> tuple[bool, float]:
    match wishes.sort:
        case SortBy.PRICE:
            cost = figures.mixed_price
        case SortBy.THROUGHPUT:
            cost = math.inf if figures.tokens_per_s is None else -figures.tokens_per_s
        case None:
            cost = 0.0
    return _is_slow(figures, wishes), cost


def _is_slow(figures: ModelFigures, wishes: RoutingWishes) -> bool:
    speed, least = figures.tokens_per_s, wishes.min_throughput
    return speed is not None and least is not None and speed < least


def _reason(figures: ModelFigures, wishes: RoutingWishes) -> str:
    speed = figures.tokens_per_s
    if _is_slow(figures, wishes):
        return "Its streams were measured as slower than provider.preferred_min_throughput."
    match wishes.sort:
        case SortBy.PRICE:
            return "By provider.sort: what its tokens cost, with the measured share of cached ones."
        case SortBy.THROUGHPUT if speed is None:
            return "By provider.sort: the speed of its streams is not measured."
        case SortBy.THROUGHPUT:
            return "By provider.sort: the measured speed of its streams."
    return "It has this place in the request."


def server_places(names: Iterable[str], wishes: RoutingWishes) -> dict[str, int]:
    last, others_may = len(wishes.order), wishes.allow_fallbacks or not wishes.order
    places = {name: wishes.order.index(name) if name in wishes.order else last for name in names}
    return {
        name: place
        for name, place in places.items()
        if name not in wishes.ignore and (not wishes.only or name in wishes.only) and (place < last or others_may)
    }
