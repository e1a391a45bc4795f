"""Defines what a request may wish of the models and servers that answer it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class SortBy(StrEnum):
    PRICE = "price"
    THROUGHPUT = "throughput"


class RoutingWishes(NamedTuple):
    """fallbacks       models that may answer where the asked one cannot, for any reason, in this order
    max_input_price, max_output_price  of a million tokens, in the operator's currency: a model that costs more never answers
    min_throughput  tokens per second of a stream; slower models are asked last
    sort            None: the asked model first, then its fallbacks as they are written
    order, only, ignore  names of a model's foreign servers, or "headrace" for its own engines; servers beside `order` follow unless
                    `allow_fallbacks` is off
    """

    fallbacks: tuple[str, ...] = ()
    max_input_price: float | None = None
    max_output_price: float | None = None
    min_throughput: float | None = None
    sort: SortBy | None = None
    order: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    allow_fallbacks: bool = True


NO_WISHES = RoutingWishes()
