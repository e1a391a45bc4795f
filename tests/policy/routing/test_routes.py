"""Tests the choice behind a route's name: what a name asks for, shares by weight, and how few senders a changed weight moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policy.routing.routes import (
    ModelRoute,
    RouteTarget,
    RouteWish,
    Sender,
    SizeHint,
    Sticky,
    choose_target,
    is_copied,
    wish_of,
)

pytestmark = pytest.mark.pure

ASSISTANT = ModelRoute(
    targets=(
        RouteTarget(model="small-1", size="small", version="1", weight=95.0),
        RouteTarget(model="small-2", size="small", version="2", weight=5.0),
        RouteTarget(model="large-1", size="large"),
    ),
    sticky="tenant",
)
NUM_SENDERS = 1000
FIRST_SIZE = SizeHint(False, "it is short")
LARGE = SizeHint(True, "it is code")


def sender(number: int) -> Sender:
    return Sender(f"tenant-{number}", "", f"{number:024x}")


def never() -> SizeHint:
    raise AssertionError("the size was not open")


def chosen(route: ModelRoute, who: Sender, name: str = "assistant", hint: Callable[[], SizeHint] = lambda: FIRST_SIZE) -> str:
    wish = wish_of(name)
    assert wish is not None
    return choose_target(name, route, wish, who, hint)[0].model


def spread(route: ModelRoute, name: str = "assistant", hint: Callable[[], SizeHint] = lambda: FIRST_SIZE) -> list[str]:
    return [chosen(route, sender(number), name, hint) for number in range(NUM_SENDERS)]


def weighted(*weights: float) -> ModelRoute:
    return ModelRoute(targets=tuple(RouteTarget(model=f"m{number}", weight=weight) for number, weight in enumerate(weights)))


@pytest.mark.parametrize(
    ("name", "wish"),
    [
        ("assistant", RouteWish("assistant")),
        ("assistant:large", RouteWish("assistant", "large")),
        ("assistant@2", RouteWish("assistant", "", "2")),
        ("assistant:small@2", RouteWish("assistant", "small", "2")),
        ("assistant@2:small", RouteWish("assistant", "", "2:small")),
        ("assistant:", None),
        ("assistant@", None),
        ("assistant:@2", None),
        ("", RouteWish("")),
    ],
)
def test_a_name_says_route_size_and_version(name: str, wish: RouteWish | None) -> None:
    assert wish_of(name) == wish


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("assistant:large", {"large-1"}),
        ("assistant@2", {"small-2"}),
        ("assistant:small@1", {"small-1"}),
        ("assistant:small", {"small-1", "small-2"}),
        ("assistant:large@2", set()),
    ],
)
def test_a_size_and_a_version_leave_the_targets_that_have_them(name: str, models: set[str]) -> None:
    wish = wish_of(name)
    assert wish is not None
    assert {target.model for target in ASSISTANT.matching(wish)} == models
    if models:
        assert set(spread(ASSISTANT, name, never)) == models


def test_the_forms_of_a_name_are_those_that_lead_to_a_target() -> None:
    forms = ASSISTANT.forms("assistant")
    assert forms == ["assistant", "assistant:small", "assistant:large", "assistant@1", "assistant@2"]
    for form in forms:
        wish = wish_of(form)
        assert wish is not None
        assert ASSISTANT.matching(wish)


def test_the_hint_decides_between_the_first_and_the_last_size() -> None:
    assert set(spread(ASSISTANT)) == {"small-1", "small-2"}
    assert set(spread(ASSISTANT, hint=lambda: LARGE)) == {"large-1"}
    target, reason = choose_target("assistant", ASSISTANT, RouteWish("assistant"), sender(1), lambda: LARGE)
    assert (target.model, reason) == ("large-1", "assistant leads to it in the size large (it is code)")


def test_reachable_targets_are_those_that_some_request_gets() -> None:
    route = ModelRoute(
        targets=(
            *ASSISTANT.targets[:2],
            RouteTarget(model="small-3", size="small", version="3", weight=0.0),
            RouteTarget(model="middle-1", size="middle"),
            *ASSISTANT.targets[2:],
        )
    )
    for form in route.forms("assistant"):
        wish = wish_of(form)
        assert wish is not None
        given = {*spread(route, form), *spread(route, form, lambda: LARGE)}
        assert {target.model for target in route.reachable(wish)} == given
    assert [target.model for target in route.reachable(RouteWish("assistant"))] == ["small-1", "small-2", "large-1"]
    assert [target.model for target in route.reachable(RouteWish("assistant", "", "3"))] == ["small-3"]
    assert not route.reachable(RouteWish("assistant", "huge"))


def test_a_choice_by_weight_says_so() -> None:
    reason = choose_target("assistant:small", ASSISTANT, RouteWish("assistant", "small"), sender(1), never)[1]
    assert reason == "assistant:small leads to it, by its weight of 95 in 100 for each tenant"


@pytest.mark.parametrize("weights", [(95.0, 5.0), (1.0, 1.0, 1.0), (0.1, 100.0), (3.0, 0.0, 1.0, 7.0, 2.0)])
def test_each_target_gets_its_weights_share(weights: Sequence[float]) -> None:
    counts = Counter(spread(weighted(*weights)))
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = (share * (1.0 - share) / NUM_SENDERS) ** 0.5
        assert abs(counts[f"m{number}"] / NUM_SENDERS - share) <= 4.0 * deviation


@given(st.lists(st.floats(0.0, 100.0), min_size=2, max_size=5).filter(any), st.data())
def test_a_changed_weight_moves_senders_to_or_from_its_target_alone(weights: list[float], data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, len(weights) - 1))
    more = [weight + (number == changed) * data.draw(st.floats(0.1, 50.0)) for number, weight in enumerate(weights)]
    for who in map(sender, range(50)):
        before, after = chosen(weighted(*weights), who), chosen(weighted(*more), who)
        assert after in (before, f"m{changed}")


def test_a_removed_target_leaves_the_others_theirs() -> None:
    whole = weighted(3.0, 2.0, 1.0)
    less = replace(whole, targets=whole.targets[:2])
    for old, new in zip(spread(whole), spread(less), strict=True):
        assert old in (new, "m2")


def test_a_weight_of_zero_leaves_a_version_to_those_that_ask_for_it() -> None:
    route = ModelRoute(targets=(RouteTarget(model="old"), RouteTarget(model="new", version="2", weight=0.0)))
    assert set(spread(route)) == {"old"}
    assert set(spread(route, "assistant@2", never)) == {"new"}


def test_each_process_and_release_makes_the_same_choice() -> None:
    """Gateways of two releases run side by side during an upgrade."""
    first = [chosen(weighted(1.0, 1.0, 2.0), sender(number)) for number in range(12)]
    assert first == ["m2", "m1", "m2", "m2", "m1", "m2", "m2", "m2", "m1", "m1", "m0", "m2"]


@pytest.mark.parametrize(
    ("sticky", "of_session", "without"),
    [(Sticky.REQUEST, "t\0s", "r"), (Sticky.SESSION, "t\0s", "t"), (Sticky.TENANT, "t", "t")],
)
def test_what_stays_with_a_target(sticky: str, of_session: str, without: str) -> None:
    assert Sender("t", "s", "r").key(sticky) == of_session
    assert Sender("t", "", "r").key(sticky) == without


def test_a_share_of_the_requests_is_copied_whatever_their_target() -> None:
    route = weighted(1.0, 1.0)
    copied = Counter(chosen(route, who) for who in map(sender, range(NUM_SENDERS)) if is_copied(0.1, "assistant", who.request_id))
    assert 0.07 < sum(copied.values()) / NUM_SENDERS < 0.13
    assert 0.3 < copied["m0"] / sum(copied.values()) < 0.7
    assert all(is_copied(1.0, "assistant", who.request_id) for who in map(sender, range(NUM_SENDERS)))
