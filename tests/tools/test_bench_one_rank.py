"""Tests that of the engines that `bench.one_rank` compares, one computes each of its steps through a group of ranks, the other none."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from bench.one_rank import machine, step_seconds
from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.engine.config import EngineConfig
from headrace.engine.ranks.leader import RankGroup

pytestmark = pytest.mark.socket


@pytest.mark.parametrize("has_group", [False, True])
def test_each_step_of_the_group_goes_through_it(has_group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(bundled_path(DEFAULT_MODEL)), device="cpu", num_kv_blocks=64, max_num_seqs=2, num_threads=1)
    measured = machine(config.checked(), has_group=has_group)
    num_computed, computing = 0, RankGroup.computing

    def counted(group: RankGroup) -> AbstractContextManager[None]:
        nonlocal num_computed
        num_computed += 1
        return computing(group)

    monkeypatch.setattr(RankGroup, "computing", counted)
    before = measured.engine.snapshot().counters.steps
    assert step_seconds(measured, 2, 8, 0) > 0
    num_steps = measured.engine.snapshot().counters.steps - before
    assert num_steps >= 8
    assert num_computed >= num_steps if has_group else num_computed == 0
    measured.engine.stop()
    measured.engine.run()
