"""Tests the offline harness on the real scheduler and loop with a fake model: exact counts, and speeds worked out by hand."""

from __future__ import annotations

import pytest

from headrace.core.model_info import KvGroup, ModelInfo
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.lab.datasets import LoadRequest, WorkloadShape, make_requests
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.lab.metrics import LoadRecord, summarize
from headrace.lab.offline import (
    Collector,
    OfflineRun,
    decode_bytes,
    decode_speed,
    dollars_per_million_tokens,
    run_offline,
)
from tests.lab.test_fake_clock import VirtualClock

pytestmark = pytest.mark.pure


def engine_with(config: EngineConfig | None = None, **options: int | float) -> tuple[Engine, Collector]:
    clock = VirtualClock()
    collector = Collector(clock, clock.wait)
    given = FakeOptions(**{"vocab_size": 500, "step_seconds": 0.125, **options})  # type: ignore[arg-type]
    return fake_engine(collector, given, config or EngineConfig(model="fake"), clock=clock, wait=clock.wait), collector


def test_every_token_is_counted_and_stamped() -> None:
    engine, collector = engine_with()
    run = run_offline(engine, collector, make_requests(5, WorkloadShape(input_tokens=20, output_tokens=7, low_id=0, high_id=400)))
    assert [(record.prompt_tokens, record.output_tokens, record.error) for record in run.records] == [(20, 7, None)] * 5
    assert all(record.chunk_s == tuple(run.began_s + 0.125 * step for step in range(1, 8)) for record in run.records)
    assert (run.output_tokens, run.prompt_tokens, run.peak_running, run.preemptions) == (35, 100, 5, 0)
    assert run.step_s == (0.125,) * 7
    assert summarize(run.records).finished == 5
    engine.scheduler.check()


def test_second_run_does_not_see_the_first_but_its_cache_does() -> None:
    engine, collector = engine_with()
    requests = make_requests(2, WorkloadShape(input_tokens=33, output_tokens=2, low_id=0, high_id=400))
    first = run_offline(engine, collector, requests)
    second = run_offline(engine, collector, requests)
    assert [record.cached_tokens for record in first.records] == [0, 0]
    assert [record.cached_tokens for record in second.records] == [32, 32]
    assert len(second.step_s) == 2


def test_arrivals_are_kept_and_latency_counts_from_them() -> None:
    clock = VirtualClock()
    collector = Collector(clock, clock.wait)
    options = FakeOptions(vocab_size=500, step_seconds=0.005)
    engine = fake_engine(collector, options, EngineConfig(model="fake"), clock=clock, wait=clock.wait)
    # An eighth of a second is exact in binary: one that is rounded may leave the clock just short of an arrival, and no wait in between.
    run = run_offline(engine, collector, [LoadRequest((1, 2, 3), 4)] * 3, arrivals_s=[0.0, 0.125, 0.125])
    offsets = [record.intended_s - run.began_s for record in run.records]
    assert offsets == pytest.approx([0.0, 0.125, 0.125])
    assert all(record.sent_s is not None and record.sent_s >= record.intended_s for record in run.records)
    assert run.records[0].end_s < run.records[1].intended_s


def test_refused_request_is_a_record() -> None:
    engine, collector = engine_with(EngineConfig(model="fake", max_waiting=1, max_num_seqs=1, max_num_batched_tokens=8))
    run = run_offline(engine, collector, [LoadRequest((1, 2), 3)] * 4)
    assert sum(record.is_finished for record in run.records) < 4
    assert any(record.error and record.error.startswith("rejected") for record in run.records)


def test_small_pool_shows_as_preemptions() -> None:
    engine, collector = engine_with(num_blocks=8, block_size=4)
    run = run_offline(engine, collector, make_requests(3, WorkloadShape(input_tokens=8, output_tokens=12, low_id=0, high_id=400)))
    assert run.preemptions > 0
    assert all(record.output_tokens == 12 for record in run.records)


INFO = ModelInfo(
    architecture="paper",
    vocab_size=10,
    max_model_len=100,
    eos_token_ids=(),
    kv_groups=(
        KvGroup(layers=(0, 1), kv_heads=2, head_dim=4, dtype_bytes=2),
        KvGroup(layers=(2,), kv_heads=2, head_dim=4, dtype_bytes=2, window=5),
    ),
    block_size=16,
    num_blocks=(9, 9),
    dtype="bfloat16",
    weight_bytes=1000,
)
FULL_TOKEN, WINDOW_TOKEN = 2 * 2 * 2 * 4 * 2, 1 * 2 * 2 * 4 * 2


def paper_run(chunks: list[tuple[float, ...]], prompt: int = 3) -> OfflineRun:
    records = [
        LoadRecord(intended_s=0.0, sent_s=0.0, chunk_s=times, end_s=times[-1], prompt_tokens=prompt, output_tokens=len(times))
        for times in chunks
    ]
    return OfflineRun(tuple(records), 0.0, 10.0, (), len(chunks), 0)


def test_bytes_of_decoding_are_weights_and_every_context_within_its_window() -> None:
    run = paper_run([(1.0, 2.0, 3.0, 4.0)])  # decodes at contexts 4, 5, 6
    assert decode_bytes(INFO, run, steps=4) == 4 * 1000 + (4 + 5 + 6) * FULL_TOKEN + (4 + 5 + 5) * WINDOW_TOKEN


def test_decode_speed_is_measured_where_every_sequence_decodes() -> None:
    run = paper_run([(1.0, 2.0, 3.0, 4.0), (2.0, 3.0, 4.0, 5.0)])
    speed = decode_speed(INFO, run, bandwidth=10_000.0)
    assert speed is not None
    assert (speed.steps, speed.step_s) == (2, 1.0)  # 2.0 .. 4.0
    contexts = (3 + 3) + (3 + 2)  # at 3.0 s the streams have 3 and 2 tokens
    assert speed.bytes_read == 1000 + contexts * FULL_TOKEN + (5 + 5) * WINDOW_TOKEN
    assert speed.mbu == pytest.approx(speed.bytes_read / 10_000.0)
    assert decode_speed(INFO, paper_run([(1.0, 2.0), (5.0, 6.0)]), None) is None


def test_price_of_a_million_tokens() -> None:
    assert dollars_per_million_tokens(tokens=500_000, duration_s=1800, dollars_per_hour=4.0) == pytest.approx(4.0)
