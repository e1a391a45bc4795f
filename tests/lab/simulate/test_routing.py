"""Tests the shares of replicas of different speed and memory by predicted time, on virtual time.

docs/experiments.md has an earlier comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.engine.config import EngineConfig
from headrace.lab.datasets import WorkloadShape
from headrace.lab.metrics import LoadReport, summarize
from headrace.lab.simulate import site as site_module
from headrace.lab.simulate.build import SimulatedModel
from headrace.lab.simulate.load import drawn
from headrace.lab.simulate.site import SimulatedSite
from headrace.lab.simulate.step_times import FittedLatency
from headrace.policy.routing.choice import Candidate, Decision, cheaper_of_two, cost

pytestmark = pytest.mark.pure

PROMPT, OUTPUT, SEQUENCES = 256, 64, 32


def model(times: float = 1.0, num_blocks: int = 4096) -> SimulatedModel:
    """A replica whose steps take 5 ms and 0.1 ms per token, `times` as long."""
    token_s = 0.0001 * times
    latency = FittedLatency(step_s=0.005 * times, row_s=token_s, context_s=0.0, prompt_s=token_s, attention_s=0.0)
    config = EngineConfig(model="simulated", max_num_seqs=SEQUENCES, num_kv_blocks=num_blocks).checked()
    return SimulatedModel(config, latency, num_blocks, 4096)


def capacity_per_s(times: float = 1.0) -> float:
    """Requests per second that a replica finishes while all its slots are in use."""
    return 1.0 / times / (PROMPT * 0.0001 + OUTPUT * (0.0001 + 0.005 / SEQUENCES))


def run(models: Sequence[SimulatedModel], rate: float, *, seconds: float = 20.0) -> tuple[LoadReport, list[float]]:
    """The report, and each replica's share of the requests."""
    site = SimulatedSite(models)
    records = site.run(drawn(rate, seconds, WorkloadShape(input_tokens=PROMPT, output_tokens=OUTPUT, spread=1.0)))
    served = [sum(replica.engine.snapshot().counters.finished.values()) for replica in site.replicas]
    return summarize(records), [each / sum(served) for each in served]


def by_outstanding(_policy: str, candidates: Sequence[Candidate], decision: Decision, **_: Any) -> Candidate:
    """Two random choices by the number of requests: what is done while no speed is known."""
    size, block_size = decision.size, decision.block_size
    return cheaper_of_two(candidates, lambda each: cost(each, prompt_tokens=size.prompt_tokens, block_size=block_size), decision.random)


FAST_AND_SLOW = (model(), model(4.0))


def test_under_load_the_share_follows_the_speed() -> None:
    """The fast replica has 0.8 of the capacity. At a low load it takes nearly all, since each request is done sooner there."""
    rate = capacity_per_s() + capacity_per_s(4.0)
    assert 0.74 < run(FAST_AND_SLOW, 0.9 * rate)[1][0] < 0.92
    assert run(FAST_AND_SLOW, 0.4 * rate)[1][0] > 0.9


def test_requests_wait_less_than_by_outstanding_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 0.7 * (capacity_per_s() + capacity_per_s(4.0))
    ours, _ = run(FAST_AND_SLOW, rate)
    monkeypatch.setattr(site_module, "choose", by_outstanding)
    theirs, _ = run(FAST_AND_SLOW, rate)
    assert ours.ttft_s.quantiles["p99"] < 0.7 * theirs.ttft_s.quantiles["p99"]
    assert ours.e2el_s.quantiles["p99"] < 0.8 * theirs.e2el_s.quantiles["p99"]


def test_a_replica_with_a_small_cache_gets_what_it_can_hold() -> None:
    """Two replicas of one speed, one with a KV cache for about five sequences."""
    _, shares = run((model(), model(num_blocks=60)), 0.8 * capacity_per_s())
    assert 0.1 < shares[1] < 0.45
