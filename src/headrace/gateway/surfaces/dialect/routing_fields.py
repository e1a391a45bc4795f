"""Reads what a body wishes of the models and servers that answer it, in the fields of LiteLLM and OpenRouter."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from headrace.core.errors import InvalidRequest
from headrace.policy.routing.wishes import RoutingWishes, SortBy

MAX_WISHED_MODELS, MAX_MODEL_CHARS = 8, 256
MAX_WISHED_SERVERS, MAX_SERVER_CHARS = 17, 128
"""A model has at most sixteen foreign servers, and our own engines."""


class MaxPrice(Struct):
    prompt: float | None = None
    completion: float | None = None


class MinThroughput(Struct):
    p50: float | None = None


class ProviderWishes(Struct):
    """OpenRouter's `provider`."""

    order: list[str] = []
    only: list[str] = []
    ignore: list[str] = []
    allow_fallbacks: bool = True
    sort: str | None = None
    max_price: MaxPrice | None = None
    preferred_min_throughput: float | MinThroughput | None = None


NO_PROVIDER, NO_PRICE = ProviderWishes(), MaxPrice()


def routing_wishes(
    model: str | None, models: Sequence[str], fallbacks: Sequence[str], provider: ProviderWishes | None
) -> tuple[str | None, RoutingWishes]:
    """The asked model, and the wishes. Raises InvalidRequest."""
    _check_names("models", models, MAX_WISHED_MODELS, MAX_MODEL_CHARS)
    _check_names("fallbacks", fallbacks, MAX_WISHED_MODELS, MAX_MODEL_CHARS)
    asked = models[0] if model is None and models else model
    wishes = RoutingWishes(
        models=tuple([name for name in dict.fromkeys(models) if name != asked]),
        fallbacks=tuple([name for name in dict.fromkeys(fallbacks) if name not in (asked, *models)]),
    )
    if provider is None:
        return asked, wishes
    for name in ("order", "only", "ignore"):
        _check_names(f"provider.{name}", getattr(provider, name), MAX_WISHED_SERVERS, MAX_SERVER_CHARS)
    if provider.sort is not None and provider.sort not in (*SortBy,):
        raise InvalidRequest("provider.sort", f"one of {', '.join(SortBy)}", provider.sort, "No time to the first token is promised.")
    price, least = provider.max_price or NO_PRICE, provider.preferred_min_throughput
    limits = {"max_price.prompt": price.prompt, "max_price.completion": price.completion}
    if isinstance(least, MinThroughput):
        least = limits["preferred_min_throughput.p50"] = least.p50
    else:
        limits["preferred_min_throughput"] = least
    for name, value in limits.items():
        if value is not None and value < 0:
            raise InvalidRequest(f"provider.{name}", "a number of at least 0", value)
    return asked, wishes._replace(
        max_input_price=price.prompt,
        max_output_price=price.completion,
        min_throughput=least,
        sort=None if provider.sort is None else SortBy(provider.sort),
        order=tuple(provider.order),
        only=tuple(provider.only),
        ignore=tuple(provider.ignore),
        allow_fallbacks=provider.allow_fallbacks,
    )


def _check_names(field: str, names: Sequence[str], most: int, most_chars: int) -> None:
    if len(names) > most:
        raise InvalidRequest(field, f"at most {most} names", len(names))
    for number, name in enumerate(names):
        if not 0 < len(name) <= most_chars:
            raise InvalidRequest(f"{field}[{number}]", f"a name of 1 to {most_chars} characters", len(name))
