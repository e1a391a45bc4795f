"""Tests which adapters get the places of an engine: shared, kept while unused, given on in turns, and waited for in bounded time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.ids import PreparationId
from headrace.core.request import PriorityClass
from headrace.policy.adapter_places import FIRST_HOLD_S, PATIENCE, AdapterPlaces, PlaceTurn

pytestmark = pytest.mark.pure


class Asked:
    """Places with requests that are named by number; `at` has the place of each that holds one."""

    def __init__(self, num_places: int, max_holders: int = 1000) -> None:
        self.places = AdapterPlaces(num_places, max_holders)
        self.at: dict[int, int] = {}
        self.digests: dict[int, str] = {}
        self.now = 0.0

    def ask(self, digest: str, tenant: str = "t", priority: PriorityClass = PriorityClass.STANDARD) -> int:
        number = len(self.digests) + 1
        self.digests[number] = digest
        if (place := self.places.ask(PreparationId(number), digest, PlaceTurn(priority, tenant), self.now)) is not None:
            self.at[number] = place
        self.places.check()
        return number

    def end(self, number: int) -> list[str]:
        """Returns the adapters that were granted a place."""
        self.at.pop(number, None)
        granted = self.places.end(PreparationId(number), self.now)
        for place, digest, holder in granted:
            assert self.digests[holder] == digest
            self.at[holder] = place
        self.places.check()
        return [digest for _, digest, _ in granted]


def test_an_adapter_keeps_its_place_until_another_one_needs_it() -> None:
    asked = Asked(2)
    first, second = asked.ask("a"), asked.ask("a")
    assert asked.at[first] == asked.at[second] == 1, "requests share it"
    other = asked.ask("b")
    for number in (first, second, other):
        asked.end(number)
    assert asked.places.adapters == ["a", "b"]
    asked.end(asked.ask("a"))
    asked.ask("c")
    assert asked.places.adapters == ["a", "c"], "the least recently held one leaves"


def test_tenants_take_turns_and_each_is_served_in_order() -> None:
    asked = Asked(1)
    held = asked.ask("x")
    for digest, tenant in (("a", "1"), ("b", "1"), ("c", "1"), ("d", "2"), ("b", "2"), ("e", "3")):
        asked.ask(digest, tenant)
    order: list[str] = []
    while len(order) < 6:
        order += asked.end(held)
        held = next(iter(asked.at))
    assert order == ["a", "d", "e", "b", "b", "c"]


def test_the_place_granted_longest_ago_is_closed_for_each_adapter_that_waits() -> None:
    asked = Asked(2)
    a, b = asked.ask("a"), asked.ask("b")
    c = asked.ask("c")
    assert asked.ask("b") in asked.at, "one waits, so that one place is closed"
    late = asked.ask("a")
    assert late not in asked.at
    assert asked.end(a) == ["c"]
    assert asked.at[c] == 1
    asked.end(c)
    assert late in asked.at
    asked.end(b)


def test_a_place_opens_again_when_those_that_waited_have_left() -> None:
    asked = Asked(1)
    asked.ask("a")
    other = asked.ask("b")
    late = asked.ask("a")
    assert asked.end(other) == ["a"]
    assert asked.at[late] == 1


@pytest.mark.parametrize("num_places", [1, 3])
def test_busy_adapters_leave_no_other_one_waiting(num_places: int) -> None:
    """Each busy adapter has a new request every second, and each takes three."""
    asked = Asked(num_places)
    open_until: dict[int, float] = {}
    waited = None
    for second in range(40):
        asked.now = float(second)
        for number in [number for number, ends in open_until.items() if ends <= second]:
            del open_until[number]
            asked.end(number)
        for busy in range(num_places):
            asked.ask(f"busy {busy}")
        if second == 10:
            waited = asked.ask("rare", "another")
        for number in asked.at:
            open_until.setdefault(number, second + 3)
        if waited in asked.at:
            break
    assert 10 < asked.now <= 14


def test_the_time_limit_and_the_retry_time_follow_the_turnover() -> None:
    asked = Asked(2)
    assert PATIENCE * FIRST_HOLD_S == 120.0
    a, b = asked.ask("a"), asked.ask("b")
    c = asked.ask("c")
    assert asked.places.wait_limit_s(1.0) == 120.0, "nothing has ended yet"
    assert asked.places.wait_limit_s(100.0) == 200.0, "one has taken longer already"
    asked.now = 4.0
    asked.end(a)
    asked.end(b)
    asked.now = 5.0
    asked.end(c)
    for digest in "abcde":
        asked.ask(digest)
    assert asked.places.wait_limit_s(5.0) == PATIENCE * 2 * 4.0, "three wait for two places"


def test_a_backlog_holds_no_more_places_than_may_run_soon() -> None:
    """The scenario of one tenant with many requests for all places, and others behind it."""
    asked = Asked(2, max_holders=8)
    backlog = [asked.ask("ab"[number % 2], "busy", PriorityClass.BATCH) for number in range(200)]
    other, same = asked.ask("c", "other", PriorityClass.PREMIUM), asked.ask("a", "other")
    assert len(asked.at) == 8
    granted_after: dict[int, int] = {}
    for num_ended, number in enumerate(backlog, 1):
        asked.end(number)
        for each in asked.at.keys() & {other, same}:
            granted_after.setdefault(each, num_ended)
    assert granted_after[other] <= 8, "those that held the closed place have ended"
    assert granted_after[same] <= 3 * 8, "its adapter has lost that place, and gets the next one"


class Places(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.asked = Asked(3, max_holders=5)
        self.open: list[int] = []

    @rule(digest=st.sampled_from("abcdef"), tenant=st.sampled_from("xyz"))
    def ask(self, digest: str, tenant: str) -> None:
        self.open.append(self.asked.ask(digest, tenant))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.open))
        self.open.remove(number)
        self.asked.end(number)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.asked.now += seconds

    @invariant()
    def each_place_serves_one_adapter(self) -> None:
        by_place = {place: self.asked.digests[number] for number, place in self.asked.at.items()}
        assert len(set(by_place.values())) == len(by_place), "an adapter in two places"
        assert all(self.asked.digests[number] == by_place[place] for number, place in self.asked.at.items())
        assert all(self.asked.places.adapters[place - 1] == digest for place, digest in by_place.items())
        is_full = len(by_place) == 3 or len(self.asked.at) == 5
        assert is_full or set(self.asked.at) == set(self.open), "it waits beside a place that is not used"

    def teardown(self) -> None:
        """Whoever waits has a place once those before it have ended."""
        while self.open:
            holders = [number for number in self.open if number in self.asked.at]
            assert holders
            self.open.remove(holders[0])
            self.asked.end(holders[0])


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
