"""Tests the long prompt's bench on a fake model: streams get a token with every chunk of it."""

from __future__ import annotations

from typing import Any

import pytest

from bench import long_prompt
from bench.harness import Machine
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.lab.offline import Collector
from tests.lab.test_fake_clock import VirtualClock

pytestmark = pytest.mark.pure


def test_streams_get_a_token_with_every_chunk_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, peaks = VirtualClock(), iter((1000, 2000))
    monkeypatch.setattr(long_prompt, "peak_of", lambda pid: next(peaks))
    options = FakeOptions(vocab_size=3000, max_model_len=1024, block_size=16, num_blocks=4097, verify=False, token_seconds=1e-5)
    collector = Collector(clock, clock.wait)
    config = EngineConfig(model="/models/fake", max_num_batched_tokens=64).checked()
    engine = fake_engine(collector, options, config, clock=clock, wait=clock.wait)
    found: dict[str, Any] = long_prompt.measure(
        Machine(engine, collector), streams=2, newcomers=2, tokens=980, step_tokens=64, every_s=1e-3
    )
    assert found["streams_tokens_meanwhile"] in ([count, count] for count in (17, 18, 19))
    assert len(found["newcomers_ttft_s"]) == 2
    assert max(found["newcomers_ttft_s"]) < found["ttft_s"]
    assert found["gap_p50_s"] == pytest.approx(64e-5), "a full step"
    assert found["gap_p50_s"] <= found["worst_gap_s"] < found["ttft_s"]
    assert (found["peak_memory_before_bytes"], found["peak_memory_after_bytes"]) == (1000, 2000)
