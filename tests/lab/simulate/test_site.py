"""Tests a simulated site: times that can be counted by hand, deaths, overload, and what must hold for any load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import WorkloadShape
from headrace.lab.metrics import LoadRecord, summarize
from headrace.lab.simulate.build import SimulatedModel
from headrace.lab.simulate.load import Arrival, Spike, drawn
from headrace.lab.simulate.site import MAX_BLOCKS, Death, SimulatedSite
from headrace.lab.simulate.step_times import FittedLatency
from headrace.policy.config import AdmissionRules

pytestmark = pytest.mark.pure

TEN_MS = FittedLatency(step_s=0.010, row_s=0.0, context_s=0.0, prompt_s=0.0, attention_s=0.0)


def model(latency: FittedLatency = TEN_MS, *, num_blocks: int = 2001, max_num_seqs: int = 8) -> SimulatedModel:
    config = EngineConfig(model="simulated", max_num_seqs=max_num_seqs, num_kv_blocks=num_blocks).checked()
    return SimulatedModel(config, latency, num_blocks, 4096)


def simulated(
    arrivals: Iterable[Arrival],
    deaths: Sequence[Death] = (),
    *,
    replicas: int = 1,
    of: SimulatedModel | None = None,
    rules: AdmissionRules | None = None,
    gateway_s: float = 0.0,
) -> list[LoadRecord]:
    return SimulatedSite([of or model()] * replicas, rules=rules, gateway_s=gateway_s).run(arrivals, deaths)


def prompt(number: int, length: int = 32) -> tuple[int, ...]:
    return (1000 + number,) * length


def test_one_request_takes_its_steps_and_the_gateways_time() -> None:
    (record,) = simulated([Arrival(1.0, prompt(0), 5)], gateway_s=0.004)
    assert record.ttft_s == pytest.approx(0.014)
    assert record.tpot_s == pytest.approx(0.010)
    assert record.output_tokens == 5
    assert record.is_finished


def test_a_request_that_arrives_during_a_step_is_planned_after_it() -> None:
    first, second = sorted(simulated([Arrival(0.0, prompt(0), 50), Arrival(0.0151, prompt(1), 5)]), key=lambda each: each.intended_s)
    assert first.ttft_s == pytest.approx(0.010)
    assert second.ttft_s == pytest.approx(0.030 - 0.0151)


def test_prompts_and_contexts_take_the_time_that_their_numbers_say() -> None:
    latency = FittedLatency(step_s=0.010, row_s=0.001, context_s=1e-5, prompt_s=1e-4, attention_s=0.0)
    (record,) = simulated([Arrival(0.0, prompt(0, 100), 2)], of=model(latency))
    assert record.ttft_s == pytest.approx(0.010 + 100 * 1e-4)
    assert record.tpot_s == pytest.approx(0.010 + 0.001 + 100 * 1e-5)


def test_requests_of_a_dead_replica_go_on_at_another_one() -> None:
    arrivals = [Arrival(0.001 * number, prompt(number), 100) for number in range(8)]
    records = simulated(arrivals, [Death(0.305, 0, 10.0)], replicas=2)
    assert [record.output_tokens for record in records] == [100] * 8
    assert all(record.is_finished for record in records)
    assert max(record.max_stall_s for record in records) < 0.05, "a failover takes a prefill, not a restart"


def test_requests_wait_while_no_replica_runs() -> None:
    records = simulated([Arrival(0.0, prompt(0), 100)], [Death(0.305, 0, 5.0)])
    assert records[0].output_tokens == 100
    assert records[0].max_stall_s == pytest.approx(5.0, abs=0.05)


def test_a_new_request_waits_while_no_replica_runs() -> None:
    arrivals = [Arrival(0.0, prompt(0), 100), Arrival(1.0, prompt(1), 5)]
    first, second = sorted(simulated(arrivals, [Death(0.305, 0, 5.0)]), key=lambda record: record.intended_s)
    assert first.is_finished
    assert second.ttft_s == pytest.approx(0.305 + 5.0 - 1.0, abs=0.1)


def test_a_request_waits_no_longer_for_a_lost_replica_than_the_gateway_lets_it() -> None:
    site = SimulatedSite([model()], failover_s=2.0)
    (record,) = site.run([Arrival(0.0, prompt(0), 100)], [Death(0.305, 0, 5.0)])
    assert (record.status, record.error) == (503, "unavailable")
    assert record.end_s == pytest.approx(2.305)


def test_a_request_that_an_idle_engine_refuses_is_recorded() -> None:
    whole, long = sorted(simulated([Arrival(0.0, prompt(0), 5), Arrival(1.0, prompt(1, 5000), 5)]), key=lambda record: record.intended_s)
    assert whole.is_finished
    assert (long.status, long.error) == (400, "refused")


def test_overload_is_refused_with_a_time_to_come_back() -> None:
    shape = WorkloadShape(input_tokens=64, output_tokens=64)
    records = simulated(drawn(60.0, 20.0, shape), of=model(max_num_seqs=4), rules=AdmissionRules(max_wait_s=1.0))
    refused = [record for record in records if record.was_refused]
    assert refused
    assert all(record.retry_after_s is not None and record.retry_after_s >= 1.0 for record in refused)
    report = summarize([record for record in records if record.is_finished])
    assert report.ttft_s.max < 3.0, "the wait of those that are served is bounded"


def test_replicas_of_one_speed_share_the_load() -> None:
    site = SimulatedSite([model()] * 4)
    site.run(drawn(20.0, 30.0, WorkloadShape(input_tokens=64, output_tokens=64)))
    served = [sum(replica.engine.snapshot().counters.finished.values()) for replica in site.replicas]
    assert min(served) > 0.8 * max(served)


def test_the_same_seed_gives_the_same_times() -> None:
    shape = WorkloadShape(input_tokens=64, output_tokens=32, spread=0.5)
    runs = [simulated(drawn(20.0, 10.0, shape, seed=7), [Death(3.0, 1, 2.0)], replicas=3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert simulated(drawn(20.0, 10.0, shape, seed=8)) != runs[0]


def test_more_blocks_than_can_be_kept_are_refused_before_they_are_made() -> None:
    with pytest.raises(ConfigError, match="num_kv_blocks: 99,999,999,999 blocks in 1 replicas"):
        SimulatedSite([model(num_blocks=99_999_999_999)])
    with pytest.raises(ConfigError, match="in 3 replicas are more than one simulation keeps"):
        SimulatedSite([model(num_blocks=MAX_BLOCKS // 2)] * 3)


def test_a_spike_brings_its_factor_more() -> None:
    shape = WorkloadShape(input_tokens=8, output_tokens=1)
    times = [arrival.at for arrival in drawn(50.0, 60.0, shape, spike=Spike(20.0, 20.0, 4.0))]
    inside = sum(20.0 <= at < 40.0 for at in times)
    assert inside == pytest.approx(4000, rel=0.1)
    assert len(times) - inside == pytest.approx(2000, rel=0.1)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=20),
    st.lists(st.tuples(st.floats(0, 3), st.integers(0, 2), st.floats(0.01, 2)), max_size=4),
    st.integers(1, 3),
    st.integers(40, 400),
)
def test_every_request_ends_once_with_its_tokens_or_an_error(
    asked: list[tuple[float, int, int]], killed: list[tuple[float, int, float]], replicas: int, num_blocks: int
) -> None:
    """Each run ends in the schedulers' `check`."""
    timed = enumerate(sorted(asked))
    arrivals = [Arrival(at + number * 1e-6, prompt(number, length), output) for number, (at, length, output) in timed]
    deaths = [Death(at, place % replicas, back_s) for at, place, back_s in killed]
    records = simulated(arrivals, deaths, replicas=replicas, of=model(num_blocks=num_blocks))
    assert sorted(record.intended_s for record in records) == [arrival.at for arrival in arrivals]
    wanted = {arrival.at: arrival.output_tokens for arrival in arrivals}
    for record in records:
        assert record.is_finished or record.was_refused
        assert not record.is_finished or (record.output_tokens == wanted[record.intended_s] and math.isfinite(record.ttft_s))
