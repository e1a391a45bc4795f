"""Tests that every moment of a sequence, from arrival to end, is in one stage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_kit import DrivenEngine, request
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_plans import Life

from headrace.core.ids import RequestId
from headrace.core.update import StageSeconds
from headrace.policy.sequence import SeqState, Sequence

pytestmark = pytest.mark.pure


def step_takes(driven: DrivenEngine, seconds: float) -> None:
    compute = driven.runner.compute

    def timed(plan: Any) -> Any:
        driven.clock.now += seconds
        return compute(plan)

    driven.runner.compute = timed  # type: ignore[method-assign]


def stages_of(driven: DrivenEngine, name: str) -> StageSeconds:
    (stages,) = [update.stages for update in driven.updates if update.request_id == name and update.stages is not None]
    return stages


def seconds_of(entered: tuple[tuple[int, float], ...], end: float) -> list[float]:
    """Seconds by stage, from the moments at which each was entered."""
    seconds = [0.0] * len(StageSeconds._fields)
    moments = [(0, 0.0), *entered, (0, end)]
    for (stage, start), (_, until) in itertools.pairwise(moments):
        seconds[stage] += until - start
    return seconds


def test_a_plain_request_spends_its_time_on_the_queue_prefill_and_decode() -> None:
    driven = DrivenEngine(max_num_batched_tokens=8)
    step_takes(driven, 2.0)
    driven.submit(request("r", list(range(20)), max_tokens=4))
    driven.clock.now += 5.0
    driven.run()
    assert stages_of(driven, "r") == StageSeconds(queue=5.0, prefill=6.0, decode=6.0)
    first = next(update for update in driven.updates if update.token_ids)
    assert first.queue_time_s == 5.0


def test_waiting_for_prerequisites_and_ending_there_is_queue_time() -> None:
    driven = DrivenEngine()
    driven.submit(request("r", [1, 2]), needs=frozenset({"thing"}))
    driven.turn()
    driven.clock.now += 7.0
    driven.engine.cancel(RequestId("r"))
    driven.run()
    assert stages_of(driven, "r") == StageSeconds(queue=7.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_time_without_a_slot_after_a_preemption_is_preempted_and_recomputing_is_prefill(depth: int) -> None:
    driven = DrivenEngine(depth=depth, caching=False)
    driven.submit(request("r", list(range(20)), max_tokens=30))
    driven.turn(6)
    driven.scheduler.sequences.preempt(driven.scheduler.sequences.slots.running[0], driven.clock.now)
    driven.clock.now += 3.0
    driven.turn(depth)
    driven.clock.now += 4.0
    driven.run()
    stages = stages_of(driven, "r")
    assert stages.preempted == 3.0
    assert stages.prefill == 4.0
    assert stages.decode == 0.0


def test_a_step_made_without_a_running_sequence_is_time_it_stalls() -> None:
    driven = DrivenEngine(max_num_batched_tokens=8, caching=False)
    step_takes(driven, 1.0)
    driven.submit(request("first", list(range(50)), max_tokens=4), request("second", list(range(50)), max_tokens=4))
    driven.run()
    assert stages_of(driven, "first").stalled == 0.0
    stages = stages_of(driven, "second")
    assert stages.stalled >= 3.0, "two long prompts: the second has a slot and its blocks, and the first has the steps"
    assert stages.prefill >= 5.0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_the_stages_of_every_sequence_add_up_to_its_time_from_arrival_to_end(seed: int) -> None:
    life = Life(seed)
    driven = life.driven
    step_takes(driven, 0.25)
    ended: dict[tuple[str, int], float] = {}
    table = driven.scheduler.sequences
    end = table._end
    is_rejecting = [False]

    def noted(seq: Sequence, reason: Any, now: float, **more: Any) -> None:
        if seq.state is not SeqState.DONE and not is_rejecting[0]:  # a request that is rejected has no last update
            ended[str(seq.request.request_id), seq.index] = now - seq.arrival
        end(seq, reason, now, **more)

    table._end = noted  # type: ignore[method-assign]
    withdraw = table.withdraw

    def withdrawn(*given: Any) -> Any:
        is_rejecting[0] = True
        try:
            return withdraw(*given)
        finally:
            is_rejecting[0] = False

    table.withdraw = withdrawn  # type: ignore[method-assign, assignment]
    for _ in range(life.random.randint(20, 60)):
        life.act()
        driven.clock.now += 0.125
    driven.clock.now += 100.0
    driven.run()
    last = {(str(update.request_id), update.index): update for update in driven.updates if update.finish is not None}
    assert last.keys() == ended.keys()
    for key, update in last.items():
        assert update.stages is not None
        assert min(update.stages) >= 0.0
        assert sum(update.stages) == pytest.approx(ended[key], abs=1e-9)
        assert seconds_of(update.entered, ended[key]) == pytest.approx(update.stages, abs=1e-9)
    assert all(update.stages is None for update in driven.updates if update.finish is None)
