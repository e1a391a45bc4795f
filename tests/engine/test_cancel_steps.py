"""Tests on virtual time that the memory of a cancelled request is free within a step. Real processes: tests/e2e/test_disconnects.py."""

from __future__ import annotations

import pytest
from virtual_engine import VirtualEngine, asked

from headrace.core.ids import RequestId
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions

pytestmark = pytest.mark.pure

STEP_S = 0.05
NUM_PAD_BLOCKS = 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_turns", range(6))
def test_the_blocks_of_a_cancelled_request_are_free_within_the_steps_that_are_planned(depth: int, num_turns: int) -> None:
    """It is cancelled while it waits, in its prefill, or between any two of its tokens."""
    virtual = VirtualEngine(EngineConfig(model="fake", depth=depth, max_num_batched_tokens=64), FakeOptions(step_seconds=STEP_S))
    virtual.submit(asked("leaving", prompt_tokens=100, output_tokens=3000))
    for _ in range(num_turns):
        virtual.engine.turn()
    left_s = virtual.now
    virtual.engine.cancel(RequestId("leaving"))
    while virtual.engine.turn():
        assert virtual.now - left_s <= depth * STEP_S
    load = virtual.engine.snapshot()
    assert (load.num_running, load.num_waiting, load.kv_blocks_used) == (0, 0, NUM_PAD_BLOCKS)
    virtual.engine.scheduler.check()
