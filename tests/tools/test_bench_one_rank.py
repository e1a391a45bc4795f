"""Tests that of the two engines that `bench.one_rank` compares, one encodes each of its steps for other ranks, and the other none."""

from __future__ import annotations

from typing import Any

import pytest

from bench.one_rank import machine, step_seconds
from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.engine.config import EngineConfig
from headrace.engine.ranks.frames import step_frame

pytestmark = pytest.mark.socket


@pytest.mark.parametrize("has_group", [False, True])
def test_each_step_of_the_group_is_encoded(has_group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(bundled_path(DEFAULT_MODEL)), device="cpu", num_kv_blocks=64, max_num_seqs=2, num_threads=1)
    measured = machine(config.checked(), has_group=has_group)
    num_encoded = 0

    def counted(*arguments: Any) -> bytes:
        nonlocal num_encoded
        num_encoded += 1
        return step_frame(*arguments)

    monkeypatch.setattr("headrace.engine.ranks.leader.step_frame", counted)
    before = measured.engine.snapshot().counters.steps
    assert step_seconds(measured, 2, 8, 0) > 0
    num_steps = measured.engine.snapshot().counters.steps - before
    assert num_steps >= 8
    assert num_encoded == (num_steps if has_group else 0)
    measured.engine.stop()
    measured.engine.run()
