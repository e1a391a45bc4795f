"""Tests how a simulated site adds replicas, holds what no replica can take, and takes replicas away without losing a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.config import EngineConfig
from headrace.lab.simulate.build import SimulatedModel
from headrace.lab.simulate.load import Arrival
from headrace.lab.simulate.scaling import Scaling
from headrace.lab.simulate.site import SimulatedSite
from headrace.lab.simulate.step_times import FittedLatency
from headrace.policy.scaling.autoscaler import Autoscaler, ScalingDecision, ScalingFacts, ScalingRules

pytestmark = pytest.mark.pure

STEP = FittedLatency(step_s=0.5, row_s=0.0, context_s=0.0, prompt_s=0.0, attention_s=0.0)
MODEL = SimulatedModel(EngineConfig(model="simulated", max_num_seqs=4, num_kv_blocks=200).checked(), STEP, 200, 2048)


class Wished:
    """Decides by the time alone, and keeps what it saw."""

    def __init__(self, num_at: Callable[[float], int]) -> None:
        self._num_at = num_at
        self.seen: list[tuple[float, ScalingFacts]] = []

    def decide(self, facts: ScalingFacts, now: float) -> ScalingDecision:
        self.seen.append((now, facts))
        return ScalingDecision(self._num_at(now), "as the test wishes")


def arrivals(seconds: float, rate: float, seed: int = 0) -> Iterator[Arrival]:
    draw, at, number = random.Random(seed), 0.0, 0
    while (at := at + draw.expovariate(rate)) < seconds:
        number += 1
        yield Arrival(at, (number,) * 32, draw.randint(1, 20))


def test_a_replica_serves_once_it_has_loaded_and_costs_from_its_start_on() -> None:
    wished = Wished(lambda now: 2 if now >= 10 else 1)
    site = SimulatedSite([MODEL], scaling=Scaling(policy=wished, load_s=20.0, hold_s=100.0))
    records = site.run(arrivals(60, 1.0))
    assert all(record.is_finished for record in records)
    assert {now: facts.num_serving for now, facts in wished.seen if now in (20.0, 25.0, 35.0)} == {20.0: 1, 25.0: 1, 35.0: 2}
    end = max(record.end_s for record in records)
    assert site.replica_s() == pytest.approx(end + (end - 10))
    assert [(change.at_s, change.num_replicas) for change in site.changes] == [(0.0, 1), (10.0, 2)]


def waits(monkeypatch: pytest.MonkeyPatch | None) -> list[float]:
    """To the first token, of 32 requests at once: one replica takes eight rounds of 10 s for them, and another one comes after 10 s.

    monkeypatch: nothing moves
    """
    if monkeypatch is not None:
        monkeypatch.setattr("headrace.lab.simulate.site.moving", lambda *_, **__: [])
    wished = Wished(lambda now: 2 if now >= 5 else 1)
    site = SimulatedSite([MODEL], scaling=Scaling(policy=wished, load_s=5.0, hold_s=1000.0))
    records = site.run([Arrival(0.01 * number, (number,) * 32, 20) for number in range(32)])
    assert [record.output_tokens for record in records] == [20] * 32
    return sorted(record.ttft_s for record in records if record.ttft_s is not None)


def test_requests_in_a_queue_move_to_a_replica_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    moving, staying = waits(None), waits(monkeypatch)
    assert staying[-1] == pytest.approx(70.0, abs=2.0)
    assert moving[-1] == pytest.approx(40.0, abs=5.0)


def test_what_comes_while_no_replica_is_there_waits_for_one() -> None:
    site = SimulatedSite([MODEL], scaling=Scaling(policy=Wished(lambda now: int(now >= 30)), load_s=15.0, hold_s=100.0))
    (record,) = site.run([Arrival(20.0, (1,) * 32, 4)])
    assert record.is_finished
    assert record.ttft_s == pytest.approx(45.0 - 20.0 + 0.5)


def test_a_request_is_held_no_longer_than_it_may_be() -> None:
    site = SimulatedSite([MODEL], scaling=Scaling(policy=Wished(lambda now: 0), load_s=15.0, hold_s=30.0))
    (record,) = site.run([Arrival(20.0, (1,) * 32, 4)])
    assert (record.status, record.end_s) == (503, 50.0)


def test_a_replica_that_goes_ends_its_streams_first() -> None:
    wished = Wished(lambda now: 2 if now < 20 else 1)
    site = SimulatedSite([MODEL] * 2, scaling=Scaling(policy=wished, load_s=5.0, hold_s=100.0))
    records = site.run([Arrival(0.1 * index, (index,) * 32, 100) for index in range(6)])
    assert all(record.is_finished and record.output_tokens == 100 for record in records)
    assert len(site.replicas) == 1


def test_reports_that_do_not_come_are_seen_as_old() -> None:
    wished = Wished(lambda now: 1)
    SimulatedSite([MODEL], scaling=Scaling(policy=wished, load_s=5.0, hold_s=9.0, blind=((10, 21),))).run(arrivals(30, 1.0))
    seen = {now: (facts.age_s, facts.num_arrived) for now, facts in wished.seen if 10 <= now <= 25}
    reported = seen[10.0][1]
    assert seen[25.0][1] > reported
    assert seen == {10.0: (0.0, reported), 15.0: (5.0, reported), 20.0: (10.0, reported), 25.0: (0.0, seen[25.0][1])}


@given(seed=st.integers(0, 1 << 30), load_s=st.sampled_from([0.0, 5.0, 40.0]), least=st.integers(0, 2))
def test_no_request_is_lost_whatever_is_decided(seed: int, load_s: float, least: int) -> None:
    draw = random.Random(seed)
    site = SimulatedSite([MODEL] * 2, scaling=Scaling(policy=Wished(lambda now: draw.randint(0, 4)), load_s=load_s, hold_s=1e9))
    records = site.run(arrivals(120, 1.5, seed))
    assert all(record.is_finished for record in records)
    rules = ScalingRules(min_replicas=least, max_replicas=4, ttft_s=2.0, load_s=load_s)
    site = SimulatedSite([MODEL], scaling=Scaling(policy=Autoscaler(rules, 1), load_s=load_s, hold_s=1e9))
    assert all(record.is_finished for record in site.run(arrivals(120, 1.5, seed)))
