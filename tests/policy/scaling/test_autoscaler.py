"""Checks the autoscaler against replicas of a simple kind: each ends so many requests a second, and what is more waits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policy.scaling.autoscaler import IDLE_S, STALE_S, Autoscaler, ScalingFacts, ScalingRules
from headrace.policy.scaling.history import DAY_S, ArrivalHistory

pytestmark = pytest.mark.pure

TICK_S, SLOTS, REPLICA_RATE, TOKENS = 5.0, 16, 0.5, 64
RULES = ScalingRules(min_replicas=1, max_replicas=10, ttft_s=2.0, load_s=60.0)


class Fluid:
    """Requests come at a rate, are ended in their order by the replicas that serve, and are never lost. held: at its longest"""

    def __init__(self, rules: ScalingRules, num_replicas: int = 1, history: ArrivalHistory | None = None) -> None:
        self.scaler = Autoscaler(rules, num_replicas, history)
        self.now, self.load_s = 0.0, rules.load_s
        self.serving, self.loading = num_replicas, [0.0][:0]
        self.arrived = self.finished = 0.0
        self.targets: list[int] = []
        self.reasons: list[str] = []
        self.longest_wait_s = 0.0

    @property
    def open(self) -> float:
        return self.arrived - self.finished

    def facts(self) -> ScalingFacts:
        room = self.serving * SLOTS
        waiting = max(0.0, self.open - room)
        rate = self.serving * REPLICA_RATE
        return ScalingFacts(
            num_serving=self.serving,
            num_arrived=round(self.arrived),
            num_finished=round(self.finished),
            num_tokens=round(self.finished * TOKENS),
            num_running=round(min(self.open, room)),
            num_waiting=math.ceil(waiting),
            num_full=self.serving if waiting > self.serving else 0,
            wait_s=waiting / rate if rate else 0.0,
            fill=min(self.open, room) / SLOTS,
        )

    def tick(self, rate: float, age_s: float = 0.0) -> int:
        self.now += TICK_S
        self.serving += sum(at <= self.now for at in self.loading)
        self.loading = [at for at in self.loading if at > self.now]
        self.arrived += rate * TICK_S
        self.finished += min(self.open, self.serving * REPLICA_RATE * TICK_S)
        facts = self.facts()
        self.longest_wait_s = max(self.longest_wait_s, facts.wait_s)
        decision = self.scaler.decide(replace(facts, age_s=age_s), self.now)
        self.targets.append(decision.num_replicas)
        self.reasons.append(decision.reason)
        while len(self.loading) + self.serving < decision.num_replicas:
            self.loading.append(self.now + self.load_s)
        while len(self.loading) + self.serving > decision.num_replicas:
            if self.loading:
                self.loading.pop()
            else:
                self.serving -= 1
        return decision.num_replicas

    def run(self, seconds: float, rate: Callable[[float], float]) -> None:
        until = self.now + seconds
        while self.now < until:
            self.tick(rate(self.now))


def reversals(targets: list[int]) -> list[int]:
    """Ticks at which the number began to move the other way."""
    found, direction = [], 0
    for tick, (before, after) in enumerate(pairwise(targets)):
        now = (after > before) - (after < before)
        if now and direction and now != direction:
            found.append(tick)
        direction = now or direction
    return found


def test_a_lasting_rise_is_met_by_as_many_as_it_needs_and_no_request_waits_for_ever() -> None:
    site = Fluid(RULES)
    site.run(900, lambda now: 0.2)
    site.run(1800, lambda now: 3.0)
    assert 3.0 / REPLICA_RATE < site.targets[-1] <= 3.0 / REPLICA_RATE / 0.6
    assert site.facts().num_waiting == 0
    assert site.longest_wait_s < 1000


def test_after_a_peak_the_replicas_go_once_it_has_been_calm_for_five_minutes() -> None:
    site = Fluid(RULES)
    site.run(900, lambda now: 0.2)
    site.run(900, lambda now: 2.0)
    most = site.targets[-1]
    site.run(240, lambda now: 0.2)
    assert site.targets[-1] == most
    site.run(600, lambda now: 0.2)
    assert site.targets[-1] == 1
    assert site.reasons[-1].startswith(("requests came", "0.2 requests/s come"))


def test_a_load_that_comes_and_goes_keeps_its_replicas() -> None:
    site = Fluid(RULES)
    site.run(3600, lambda now: 2.5 if now % 240 < 120 else 0.2)
    assert not reversals(site.targets[60:])


def test_without_fresh_facts_nothing_changes_and_afterwards_nothing_goes_at_once() -> None:
    site = Fluid(RULES)
    site.run(900, lambda now: 2.0)
    before = site.targets[-1]
    for _ in range(120):
        assert site.tick(0.0, age_s=STALE_S + 1) == before
    assert "old" in site.reasons[-1]
    site.tick(0.0)
    assert site.targets[-1] == before
    site.run(900, lambda now: 0.0)
    assert site.targets[-1] == 1


def test_the_last_replica_goes_only_where_none_may_be_and_comes_back_for_what_waits() -> None:
    site = Fluid(replace(RULES, min_replicas=0))
    site.run(300, lambda now: 0.2)
    site.run(IDLE_S - 10, lambda now: 0.0)
    assert site.targets[-1] == 1
    site.run(600, lambda now: 0.0)
    assert site.targets[-1] == 0
    site.tick(0.2)
    assert site.targets[-1] >= 1
    site.run(300, lambda now: 0.0)
    assert site.open == 0


def after_full_replica(rate: int, history: ArrivalHistory | None = None) -> tuple[Autoscaler, ScalingFacts]:
    """What a replica can do is known at the time 1800: requests came at `rate` for half an hour and waited."""
    scaler = Autoscaler(ScalingRules(min_replicas=0, max_replicas=1), 1, history)
    full = ScalingFacts(num_serving=1, num_arrived=0, num_finished=0, num_tokens=0, num_running=16, num_waiting=4, num_full=1, fill=1.0)
    for now in range(2, 1802, 2):
        count = now * rate
        facts = replace(full, num_arrived=count, num_finished=count, num_tokens=100 * count)
        scaler.decide(facts, now)
    return scaler, replace(facts, num_running=0, num_waiting=0, num_full=0, fill=0.0)


@pytest.mark.parametrize("rate", [2, 20])
def test_the_last_replica_goes_after_fifteen_minutes_whatever_came_before(rate: int) -> None:
    """A mean of the rate stays above zero for much longer."""
    scaler, idle = after_full_replica(rate)
    gone_at = next(now for now in range(1802, 9000, 2) if not scaler.decide(idle, now).num_replicas)
    assert 1800 + IDLE_S <= gone_at <= 1800 + IDLE_S + 10


@pytest.mark.parametrize(("usual", "num_replicas"), [(0.5 / IDLE_S, 0), (2.0 / IDLE_S, 1)])
def test_earlier_days_keep_the_last_replica_where_a_request_was_usual_in_fifteen_minutes(usual: float, num_replicas: int) -> None:
    history = ArrivalHistory()
    history.weeks = [usual] * len(history.weeks)
    scaler, idle = after_full_replica(2, history)
    for now in range(1802, 9000, 2):
        decision = scaler.decide(idle, now)
    assert decision.num_replicas == num_replicas


def test_requests_that_another_gateway_took_count_as_they_end() -> None:
    scaler = Autoscaler(replace(RULES, min_replicas=0), 1)
    for now in range(0, 7200, 10):
        facts = ScalingFacts(num_serving=1, num_arrived=0, num_finished=now // 600, num_tokens=now)
        assert scaler.decide(facts, float(now)).num_replicas == 1


def test_where_none_serves_no_report_is_missed_and_what_waits_has_a_replica() -> None:
    """Counted by gateways, which go on where no replica has a load to report."""
    scaler = Autoscaler(replace(RULES, min_replicas=0), 0)
    nobody = ScalingFacts(num_serving=0, num_arrived=0, num_finished=0, num_tokens=0, age_s=math.inf)
    assert scaler.decide(nobody, 0.0).num_replicas == 1, "nothing is known of the minutes before"
    assert scaler.decide(nobody, IDLE_S + 5.0).num_replicas == 0
    decision = scaler.decide(replace(nobody, num_arrived=1, num_waiting=1), IDLE_S + 10.0)
    assert (decision.num_replicas, decision.reason) == (1, "1 request waits")
    assert scaler.decide(replace(nobody, num_arrived=1, num_waiting=1), IDLE_S + 15.0).num_replicas == 1, "while it loads"


def test_what_came_on_earlier_days_is_there_before_it_comes() -> None:
    def noon(now: float) -> float:
        return 3.0 if 12 * 3600 <= now % DAY_S < 14 * 3600 else 0.1

    site = Fluid(RULES)
    site.run(2 * DAY_S + 12 * 3600 - 30, noon)
    assert site.serving + len(site.loading) >= 3.0 / REPLICA_RATE
    site.longest_wait_s = 0.0
    site.run(3600, noon)
    assert site.longest_wait_s < RULES.ttft_s
    assert any("earlier days" in reason for reason in site.reasons)


def test_the_number_stays_within_its_bounds_and_says_why() -> None:
    site = Fluid(replace(RULES, min_replicas=2, max_replicas=4), num_replicas=9)
    site.run(600, lambda now: 50.0)
    assert set(site.targets) == {4}
    assert "wait" in site.reasons[-1]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_loads(seed: int) -> None:
    hold_random_load(seed)


@pytest.mark.slow
def test_ten_thousand_random_loads() -> None:
    for seed in range(10_000):
        hold_random_load(seed)


def hold_random_load(seed: int) -> None:
    """Within the bounds, no more than one turn in five minutes, everything ended once the load is calm, and then few replicas."""
    draw = random.Random(seed)
    rules = replace(RULES, min_replicas=draw.choice((0, 1, 2)), max_replicas=draw.randint(2, 12), load_s=draw.choice((5.0, 60.0, 180.0)))
    site = Fluid(rules, num_replicas=rules.within(draw.randint(0, 12)))
    while site.now < 3600:
        rate = draw.choice((0.0, 0.1, draw.uniform(0, 2), draw.uniform(0, rules.max_replicas * REPLICA_RATE)))
        age_s = draw.choice((0.0, 0.0, 0.0, STALE_S + 5, math.inf))
        for _ in range(draw.randint(1, 60)):
            assert rules.min_replicas <= site.tick(rate, age_s) <= rules.max_replicas, seed
    ticks = reversals(site.targets)
    downs = [tick for tick in ticks if site.targets[tick + 1] < site.targets[tick]]
    assert all((later - earlier) * TICK_S >= 300 for earlier, later in pairwise(downs))
    for _ in range(int(5400 / TICK_S)):
        site.tick(0.0)
    assert site.open == 0
    assert site.targets[-1] == rules.min_replicas
