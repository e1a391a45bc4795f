"""Checks the bound of a day's replica-hours against a count of its own: every replica, from the decision for it until it has left."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policy.scaling.autoscaler import Autoscaler, ScalingDecision, ScalingFacts, ScalingRules
from headrace.policy.scaling.budget import HOUR_S, DayBudget, DayUse
from headrace.policy.scaling.history import DAY_S

pytestmark = pytest.mark.pure

TICK_S = 120.0
DRAIN_S = 600.0


def rules(hours: float, *, least: int = 1, most: int = 4, standby: int = 0, drain_s: float = DRAIN_S) -> ScalingRules:
    budget = DayBudget(hours=hours, num_fixed=least + standby, leave_s=drain_s + TICK_S)
    return ScalingRules(min_replicas=least, max_replicas=most, load_s=60.0, budget=budget)


class Site:
    """used: replica-seconds by day. Decisions fall on midnight, so that none lies within a count."""

    def __init__(self, given: ScalingRules, begin: float = 0.0, use: DayUse | None = None) -> None:
        assert given.budget is not None
        self.rules, self.now = given, begin
        self.standby = given.budget.num_fixed - given.min_replicas
        self.live, self.leaving = given.min_replicas, [0.0][:0]
        self.scaler = Autoscaler(given, self.live, use=use)
        self.used: dict[float, float] = defaultdict(float)
        self.decisions: list[ScalingDecision] = []
        self.decide(0.0)

    def tick(self, fill: float, drain_s: float = 0.0, age_s: float = 0.0) -> int:
        day, since = self.now // DAY_S, self.now
        self.now += TICK_S
        self.used[day] += (self.live + self.standby) * TICK_S
        self.used[day] += sum(min(end, self.now) - since for end in self.leaving)
        self.leaving = [end for end in self.leaving if end > self.now]
        return self.decide(fill, drain_s, age_s)

    def decide(self, fill: float, drain_s: float = 0.0, age_s: float = 0.0) -> int:
        num_existing = self.live + self.standby + len(self.leaving)
        facts = ScalingFacts(num_serving=self.live, num_arrived=0, num_finished=0, num_tokens=0, num_existing=num_existing, fill=fill)
        decision = self.scaler.decide(replace(facts, age_s=age_s), self.now)
        self.leaving += [self.now + drain_s] * max(0, self.live - decision.num_replicas)
        self.live = decision.num_replicas
        self.decisions.append(decision)
        return self.live

    def run(self, seconds: float, fill: float, drain_s: float = 0.0) -> None:
        until = self.now + seconds
        while self.now < until:
            self.tick(fill, drain_s)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_no_day_takes_more_than_its_hours(seed: int) -> None:
    draw = random.Random(seed)
    least, standby, drain_s = draw.randint(0, 2), draw.randint(0, 1), draw.choice((60.0, 600.0, 3600.0))
    most = least + draw.randint(1, 8)
    hours = max(0.5, 24 * (least + standby) + draw.choice((0.0, draw.uniform(0, 2), draw.uniform(0, 24 * (most - least)))))
    given = rules(hours, least=least, most=most, standby=standby, drain_s=drain_s)
    site = Site(given, draw.randrange(0, 86_400, int(TICK_S)))
    closed_until = 0.0
    while site.now < 2.5 * DAY_S:
        fill, age_s = draw.choice((0.0, draw.uniform(0, most), float(most))), draw.choice((0.0, 0.0, 60.0))
        for _ in range(draw.randint(1, 90)):
            number = site.tick(fill, draw.uniform(0, drain_s), age_s)
            assert least <= number <= most
            assert number == least or site.now >= closed_until, "what has ended is not begun again before midnight"
            if "until midnight" in site.decisions[-1].reason:
                closed_until = site.now - site.now % DAY_S + DAY_S
        if draw.random() < 0.2:
            site.scaler = Autoscaler(given, site.live, use=DayUse.of([*astuple(site.scaler.use)]) if site.scaler.use else None)
    assert all(used <= hours * HOUR_S + 1e-3 for used in site.used.values()), (hours, site.used)


def test_a_busy_day_is_served_until_its_hours_end_and_with_the_fewest_until_midnight() -> None:
    site = Site(rules(40))
    site.run(DAY_S - TICK_S, fill=4.0)
    numbers = [decision.num_replicas for decision in site.decisions]
    first_low = next(index for index, number in enumerate(numbers) if index > 1 and number == 1)
    assert set(numbers[1:first_low]) == {4}
    assert set(numbers[first_low:]) == {1}
    assert site.decisions[-1].reason.startswith("the day's 40 replica-hours leave 1 replica until midnight UTC; sequences and KV fill 4.0")
    assert 40 * HOUR_S - 3 * (DRAIN_S + 2 * TICK_S) <= site.used[0] <= 40 * HOUR_S
    site.run(2 * TICK_S, fill=4.0)
    assert site.live == 4, "a new day"


def test_fewer_are_added_than_the_hours_leave_for_a_while() -> None:
    site = Site(rules(24 + 1.5, most=9))
    assert site.tick(9.0) == 1 + math.floor(1.5 * HOUR_S / (site.rules.settle_s + DRAIN_S + TICK_S))
    assert site.decisions[-1].reason.startswith("the day's 25.5 replica-hours leave 6 replicas; ")


def test_hours_that_the_fewest_take_leave_no_other() -> None:
    site = Site(rules(24))
    site.run(2 * DAY_S, fill=4.0)
    assert {decision.num_replicas for decision in site.decisions} == {1}
    assert site.used[0] == 24 * HOUR_S


def test_without_a_replica_the_decision_says_when_the_next_one_may_come() -> None:
    site = Site(rules(1, least=0))
    site.run(2 * HOUR_S, fill=1.0)
    assert (site.live, site.decisions[-1].closed_until) == (0, DAY_S)
    site.run(DAY_S - site.now, fill=0.0)
    assert site.decisions[-1].closed_until is None


def test_old_facts_stop_no_budget() -> None:
    site = Site(rules(40))
    site.run(600, fill=4.0)
    while site.now < DAY_S - TICK_S:
        site.tick(4.0, age_s=1e6)
    assert site.live == 1
    assert "is 1000000 s old" in site.decisions[-1].reason


def test_a_larger_budget_counts_at_once_and_a_lower_one_too() -> None:
    site = Site(rules(30))
    site.run(DAY_S / 2, fill=4.0)
    assert site.live == 1
    site.scaler.rules = rules(60)
    assert site.tick(4.0) == 4
    site.scaler.rules = rules(30)
    assert site.tick(4.0) == 1


def test_hours_that_a_lower_minimum_leaves_are_not_lost() -> None:
    site = Site(rules(25))
    site.run(DAY_S / 4, fill=4.0)
    assert site.live == 1
    site.scaler.rules = rules(25, least=0)
    assert site.tick(1.0) == 2
    assert site.decisions[-1].closed_until is None


def test_replicas_that_were_decided_and_have_not_come_take_no_hours() -> None:
    scaler = Autoscaler(rules(40), 1)
    for second in range(0, 3600, 10):
        facts = ScalingFacts(num_serving=1, num_arrived=0, num_finished=0, num_tokens=0, num_existing=1, fill=4.0)
        assert scaler.decide(facts, second).num_replicas == 4
    assert scaler.use == DayUse(3590.0, 3590.0)


def test_a_clock_that_is_set_back_gives_no_hour_back() -> None:
    use = DayUse(DAY_S + 1000.0, 500.0)
    assert use.later(3, DAY_S + 400.0) == DayUse(DAY_S + 400.0, 500.0)
    assert use.later(3, DAY_S - 400.0).replica_s == 500.0
    assert use.later(3, DAY_S + 1010.0).replica_s == 530.0
    assert use.later(3, 2 * DAY_S + 10.0) == DayUse(2 * DAY_S + 10.0, 30.0)


@pytest.mark.parametrize("given", [None, [1.0], [1.0, 2.0, -1.0], [1.0, math.inf, 0.0], [True, 1.0, 1.0], {"at": 1.0}, [10**400, 0, 0]])
def test_what_is_no_use_of_a_day_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="not the use of a day"):
        DayUse.of(given)
