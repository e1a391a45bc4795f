"""The work of a step is what its plan says, and an engine's report has what its process uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.load import EngineCounters, GpuUse
from headrace.core.model_info import KvGroup, ModelInfo
from headrace.core.plan import Plan, int_column
from headrace.engine.utilisation import READ_EVERY_S, EngineMeter, StepWork

pytestmark = pytest.mark.pure

GROUPS = (
    KvGroup(layers=(0, 1), kv_heads=2, head_dim=1000, dtype_bytes=2),
    KvGroup(layers=(2,), kv_heads=2, head_dim=1000, dtype_bytes=2, window=10),
)
INFO = ModelInfo(
    architecture="x", vocab_size=8, max_model_len=64, eos_token_ids=(), kv_groups=GROUPS, block_size=16, num_blocks=(9, 9),
    dtype="bfloat16", weight_bytes=5_000_000, token_flops=3_000_000, pair_flops=2_000_000,
)  # fmt: skip


@given(st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=5), min_size=1, max_size=4))
def test_each_token_attends_to_itself_and_to_those_before_it(steps: list[list[tuple[int, int]]]) -> None:
    counters, work = EngineCounters(), StepWork(INFO)
    read = flops = 0
    for rows in steps:
        starts, counts = int_column([start for start, _ in rows]), int_column([count for _, count in rows])
        work.add(Plan(step_id=1, slots=int_column(range(len(rows))), starts=starts, counts=counts), counters)
        read += INFO.weight_bytes
        for start, count in rows:
            read += 16_000 * (start + count) + 8_000 * min(10, start + count)
            flops += count * INFO.token_flops + sum(range(start + 1, start + count + 1)) * INFO.pair_flops
    assert counters.read_megabytes == read // 10**6
    assert counters.megaflops == flops // 10**6


def test_a_reading_of_the_process_is_taken_again_when_it_is_old() -> None:
    used = iter([GpuUse(1, 8, 0.5), GpuUse(2, 8, None)])
    meter = EngineMeter(INFO, lambda: next(used))
    first = meter.read(10.0)
    assert first["resident_bytes"] > 10**7
    assert first["cpu_s"] > 0.0
    assert (first["gpu_memory_used_bytes"], first["gpu_memory_total_bytes"], first["gpu_utilization"]) == (1, 8, 0.5)
    assert meter.read(10.0 + READ_EVERY_S / 2) is first
    assert meter.read(10.0 + READ_EVERY_S)["gpu_utilization"] is None


def test_tokens_of_experts_count_from_the_meters_start_and_the_hottest_of_each_layer_is_named() -> None:
    tokens = {1: [5, 7, 0], 4: [0, 0, 9]}  # of warm-up
    meter = EngineMeter(INFO, lambda: None, lambda: tokens)
    counters = EngineCounters(steps=3)
    assert meter.with_experts(counters) == counters, "nothing was read yet"
    meter.read(10.0)
    assert meter.with_experts(counters) == counters
    tokens[1][2] += 6
    tokens[1][0] += 2
    meter.read(10.0 + READ_EVERY_S / 2)
    assert meter.with_experts(counters).expert_tokens == 0, "a reading is kept for a while"
    meter.read(10.0 + READ_EVERY_S)
    found = meter.with_experts(counters)
    assert (found.steps, found.expert_tokens, found.hottest_expert_tokens) == (3, 8, {"1/2": 6})
    tokens[4][1] += 10
    meter.read(20.0)
    found = meter.with_experts(counters)
    assert (found.expert_tokens, found.hottest_expert_tokens) == (10, {"1/2": 6, "4/1": 10})
    assert counters.expert_tokens == 0


def test_a_model_without_experts_has_no_series_of_them() -> None:
    meter, counters = EngineMeter(INFO, lambda: None), EngineCounters(steps=3)
    meter.read(10.0)
    assert meter.with_experts(counters) is counters
