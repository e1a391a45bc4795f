"""Tests which models and servers a request's wishes leave, and in which order, against what the wishes say in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.limits.price import Price
from headrace.policy.routing.wishes import (
    FADING,
    NO_WISHES,
    OWN_ENGINES,
    AnswerMeans,
    ModelFigures,
    RoutingWishes,
    SortBy,
    excess,
    ordered,
    server_places,
)

pytestmark = pytest.mark.pure

MONEY = st.integers(0, 8).map(lambda eighths: eighths / 8)
PRICES = st.builds(Price, input=MONEY, output=MONEY, cached_input=st.none() | MONEY)
FIGURES = st.lists(
    st.builds(ModelFigures, st.sampled_from("abcdefgh"), PRICES, MONEY, st.none() | st.floats(0.5, 90.0)),
    unique_by=lambda each: each.name,
)
WISHES = st.builds(
    RoutingWishes,
    max_input_price=st.none() | MONEY,
    max_output_price=st.none() | MONEY,
    min_throughput=st.none() | st.floats(0.0, 90.0),
    sort=st.sampled_from([None, *SortBy]),
)


@given(FIGURES, WISHES)
def test_who_may_answer_and_in_which_order(figures: list[ModelFigures], wishes: RoutingWishes) -> None:
    by_name = {each.name: each for each in figures}
    made = ordered(figures, wishes)
    left = [by_name[name] for name, _ in made]
    assert len(left) == len(set(left))
    assert {each.name for each in left} == {each.name for each in figures if not excess(each, wishes)}
    for each in left:
        assert wishes.max_input_price is None or each.price.input <= wishes.max_input_price
        assert wishes.max_output_price is None or each.price.output <= wishes.max_output_price
    slow = [each.tokens_per_s is not None and each.tokens_per_s < (wishes.min_throughput or 0.0) for each in left]
    assert slow == sorted(slow), "slow ones are last"
    for is_slow in (False, True):
        some = [each for each, its in zip(left, slow, strict=True) if its is is_slow]
        if wishes.sort is SortBy.PRICE:
            assert some == sorted(some, key=lambda each: (each.mixed_price, figures.index(each)))
        elif wishes.sort is SortBy.THROUGHPUT:
            assert some == sorted(some, key=lambda each: (-(each.tokens_per_s or 0.0), figures.index(each)))
        else:
            assert some == sorted(some, key=figures.index)
    assert all(reason.endswith(".") for _, reason in made)


@given(PRICES, MONEY)
def test_the_price_of_prompts_lies_between_that_of_new_and_of_cached_tokens(price: Price, hit_rate: float) -> None:
    cached = price.input if price.cached_input is None else price.cached_input
    effective = ModelFigures("a", price, hit_rate).input_price
    assert min(price.input, cached) <= effective <= max(price.input, cached)
    assert ModelFigures("a", price).input_price == price.input
    assert ModelFigures("a", price, 1.0).input_price == cached


def test_a_limit_holds_for_a_prompt_that_no_cache_has() -> None:
    """Whatever hit rate others' prompts have: the request may have none."""
    price, wishes = Price(input=1.0, output=2.0, cached_input=0.1), RoutingWishes(max_input_price=0.5)
    assert excess(ModelFigures("a", price, 0.9), wishes) == "A million prompt tokens cost 1, and provider.max_price.prompt is 0.5."
    assert not excess(ModelFigures("a", price, 0.0), wishes._replace(max_input_price=1.0))
    assert excess(ModelFigures("a", price), RoutingWishes(max_output_price=1.5)).startswith("A million completion tokens cost 2,")


ANSWERS = st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.none() | st.floats(0.001, 5.0)), max_size=30)


@given(ANSWERS)
def test_means_are_weighted_sums_over_the_answers(answers: list[tuple[int, int, float | None]]) -> None:
    means = AnswerMeans()
    for prompt, cached, tpot_s in answers:
        means.add(prompt_tokens=prompt, cached_tokens=min(cached, prompt), tpot_s=tpot_s)
    if not answers:
        assert (means.hit_rate, means.tokens_per_s) == (0.0, None)
        return
    weights = [FADING**age for age in reversed(range(len(answers)))]
    hits = sum(weight * min(cached, prompt) for weight, (prompt, cached, _) in zip(weights, answers, strict=True))
    assert means.hit_rate == pytest.approx(hits / sum(weight * answer[0] for weight, answer in zip(weights, answers, strict=True)))
    times_s = [time_s for _, _, time_s in answers if time_s is not None]
    if not times_s:
        assert means.tokens_per_s is None
        return
    weights = [FADING**age for age in reversed(range(len(times_s)))]
    mean_s = sum(weight * time_s for weight, time_s in zip(weights, times_s, strict=True)) / sum(weights)
    assert means.tokens_per_s == pytest.approx(1.0 / mean_s)


SERVERS = (OWN_ENGINES, "one", "two", "three")
SOME = st.lists(st.sampled_from([*SERVERS, "elsewhere"]), max_size=4).map(tuple)


@given(st.builds(RoutingWishes, order=SOME, only=SOME, ignore=SOME, allow_fallbacks=st.booleans()))
def test_servers_that_may_answer(wishes: RoutingWishes) -> None:
    places = server_places(SERVERS, wishes)
    for name in SERVERS:
        may = name not in wishes.ignore and (not wishes.only or name in wishes.only)
        is_other = bool(wishes.order) and name not in wishes.order
        assert (name in places) == (may and (wishes.allow_fallbacks or not is_other))
    named = [name for name in dict.fromkeys(wishes.order) if name in places]
    assert sorted(named, key=places.__getitem__) == named
    assert all(places[name] > max(map(places.__getitem__, named), default=-1) for name in places if name not in named)


def test_without_wishes_all_servers_have_one_place() -> None:
    assert server_places(SERVERS, NO_WISHES) == dict.fromkeys(SERVERS, 0)
