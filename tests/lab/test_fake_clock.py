"""Tests the real loop on virtual time: nothing sleeps, and every time it reports is the virtual clock's."""

from __future__ import annotations

import pytest

from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason, Rejected, SequenceUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.lab.fake_runner import FakeOptions, fake_answer, fake_engine

pytestmark = pytest.mark.pure


class VirtualClock:
    """A clock that moves on only when code waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def request(name: str, *, prompt: int = 8, deadline_at: float | None = None, **params: object) -> EngineRequest:
    given = SamplingParams(**{"seed": 1, "max_tokens": 10, **params})  # type: ignore[arg-type]
    return EngineRequest(request_id=RequestId(name), prompt_ids=tuple(range(prompt)), params=given, deadline_at=deadline_at)


def run(engine: Engine, clock: VirtualClock) -> None:
    """Until nothing is left; an idle engine's clock moves on to its next deadline."""
    while engine.turn() or engine.scheduler.sequences.has_work:
        deadline = engine.scheduler.next_deadline()
        if not len(engine.scheduler.sequences.slots) and deadline is not None:
            clock.now = max(clock.now, deadline)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_hour_of_steps_passes_without_sleeping(depth: int) -> None:
    clock = VirtualClock()
    ends: dict[str, SequenceUpdate] = {}

    def outbox(updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate)
            if update.finish is not None:
                ends[update.request_id] = update

    options = FakeOptions(step_seconds=60.0, token_seconds=1.0)
    engine = fake_engine(outbox, options, EngineConfig(model="fake", depth=depth, max_num_seqs=2), clock=clock, wait=clock.wait)
    for number in range(6):
        engine.submit(request(f"r{number}", seed=number))
    engine.submit(request("late", max_tokens=100, deadline_at=clock.now + 1500.0))
    run(engine, clock)
    assert clock.now > 1000.0 + 30 * 61.0
    assert ends["late"].finish is FinishReason.DEADLINE
    for name, update in ends.items():
        assert update.stages is not None
        assert 0.0 < sum(update.stages) <= clock.now - 1000.0
        if name != "late":
            assert update.stages.decode >= 9 * 61.0, "nine steps after the first token, of 61 s at least"
    load = engine.snapshot()
    assert 61.0 * load.counters.steps <= load.counters.step_seconds <= clock.now - 1000.0
    assert (load.loop_age_s, load.step_age_s) == (0.0, None)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_without_kv_runs_without_blocks(depth: int) -> None:
    """Encoders keep nothing: no group, no block table, nothing to find, to share or to run out of."""
    clock = VirtualClock()
    tokens: dict[tuple[str, int], list[int]] = {}

    def outbox(updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            assert isinstance(update, SequenceUpdate), update
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)

    options = FakeOptions(has_kv=False, max_model_len=64)
    config = EngineConfig(model="fake", depth=depth, max_num_seqs=3, max_num_batched_tokens=8)
    engine = fake_engine(outbox, options, config, clock=clock, wait=clock.wait)
    asked = [request(f"r{number}", prompt=3 + 5 * number, seed=number, n=1 + number % 3) for number in range(6)]
    for one in asked:
        engine.submit(one)
    engine.cancel(RequestId("r5"))
    for _ in range(300):
        engine.turn()
        engine.scheduler.check()
    assert not engine.scheduler.sequences.has_work
    for one in asked[:5]:
        for index in range(one.params.n):
            assert tokens[one.request_id, index] == fake_answer(one, index, 10, options)
    assert engine.snapshot().kv_blocks_total == 0
