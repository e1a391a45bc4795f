"""Tests what a body's wishes are read as, and which of them are refused, on both surfaces."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.surfaces import chat, completions
from headrace.policy.limits.tier import Tier
from headrace.policy.routing.wishes import NO_WISHES, RoutingWishes, SortBy

pytestmark = pytest.mark.pure

CALLER = Principal(tenant="t", tier=Tier())


def parsed(surface: str, **fields: Any) -> ParsedRequest:
    if surface == "chat":
        chatted, ignored = chat.parse_chat({"messages": [{"role": "user", "content": "Hello"}], **fields})
        made = chat.chat_completions.common(chatted, CALLER)
    else:
        completed, ignored = completions.parse_completion({"prompt": "Hello", **fields})
        made = completions.completions.common(completed, CALLER)
    assert not ignored
    assert not made.foreign_fields, "a wish is for us"
    return made


@pytest.mark.parametrize("surface", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "model", "wishes"),
    [
        ({}, None, NO_WISHES),
        ({"model": "a", "models": [], "fallbacks": [], "provider": {}}, "a", NO_WISHES),
        ({"model": "a", "fallbacks": ["b", "c", "b", "a"]}, "a", RoutingWishes(fallbacks=("b", "c"))),
        ({"models": ["a", "b", "c"]}, "a", RoutingWishes(models=("b", "c"))),
        ({"model": "a", "models": ["a", "b"]}, "a", RoutingWishes(models=("b",))),
        ({"model": "a", "models": ["b", "c"], "fallbacks": ["d", "b"]}, "a", RoutingWishes(models=("b", "c"), fallbacks=("d",))),
        ({"fallbacks": ["b"]}, None, RoutingWishes(fallbacks=("b",))),
        (
            {"provider": {"order": ["x", "y"], "only": ["x"], "ignore": ["z"], "allow_fallbacks": False}},
            None,
            RoutingWishes(order=("x", "y"), only=("x",), ignore=("z",), allow_fallbacks=False),
        ),
        ({"provider": {"sort": "price"}}, None, RoutingWishes(sort=SortBy.PRICE)),
        (
            {"provider": {"sort": "throughput", "preferred_min_throughput": 20}},
            None,
            RoutingWishes(min_throughput=20, sort=SortBy.THROUGHPUT),
        ),
        ({"provider": {"preferred_min_throughput": {"p50": 7.5}}}, None, RoutingWishes(min_throughput=7.5)),
        ({"provider": {"max_price": {"prompt": 0}}}, None, RoutingWishes(max_input_price=0.0)),
        (
            {"provider": {"max_price": {"prompt": 1, "completion": 2.5}}},
            None,
            RoutingWishes(max_input_price=1.0, max_output_price=2.5),
        ),
    ],
)
def test_a_wish_is_read(surface: str, fields: dict[str, Any], model: str | None, wishes: RoutingWishes) -> None:
    made = parsed(surface, **fields)
    assert (made.model, made.routing) == (model, wishes)


@pytest.mark.parametrize("surface", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"fallbacks": "b"}, "fallbacks"),
        ({"fallbacks": [{"model": "b", "messages": []}]}, "fallbacks[0]"),
        ({"fallbacks": [{"a": ["b"]}]}, "fallbacks[0]"),
        ({"fallbacks": ["b"] * 9}, "fallbacks"),
        ({"models": ["b", "c" * 257]}, "models[1]"),
        ({"models": [""]}, "models[0]"),
        ({"provider": "foreign-0"}, "provider"),
        ({"provider": {"order": "foreign-0"}}, "provider.order"),
        ({"provider": {"only": ["x"] * 18}}, "provider.only"),
        ({"provider": {"ignore": ["x" * 129]}}, "provider.ignore[0]"),
        ({"provider": {"sort": "latency"}}, "provider.sort"),
        ({"provider": {"sort": {"by": "price"}}}, "provider.sort"),
        ({"provider": {"max_price": {"prompt": -1}}}, "provider.max_price.prompt"),
        ({"provider": {"max_price": {"completion": "1"}}}, "provider.max_price.completion"),
        ({"provider": {"max_price": {"request": 1}}}, "provider.max_price.request"),
        ({"provider": {"preferred_min_throughput": -1}}, "provider.preferred_min_throughput"),
        ({"provider": {"preferred_min_throughput": {"p50": -1}}}, "provider.preferred_min_throughput.p50"),
        ({"provider": {"preferred_min_throughput": {"p90": 20}}}, "provider.preferred_min_throughput.p90"),
        ({"provider": {"preferred_max_latency": 1}}, "provider.preferred_max_latency"),
        ({"provider": {"data_collection": "deny"}}, "provider.data_collection"),
        ({"provider": {"allow_fallback": False}}, "provider.allow_fallback"),
        ({"route": "sort"}, "route"),
        ({"context_window_fallbacks": [{"a": ["b"]}]}, "context_window_fallbacks"),
    ],
)
def test_what_is_no_wish_is_refused_by_name(surface: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parsed(surface, **fields)
    assert refused.value.field == param
