"""The option `deterministic`, from the configuration to the bits: a sequence alone and in a crowd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_engine import RealEngine, greedy_request

pytest.importorskip("numba")

from headrace import LLM, SamplingParams
from headrace.bundled import bundled_path
from headrace.core.errors import ConfigError
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest


def bundled() -> Path:
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    return folder


def sampled(name: str, length: int, **changes: Any) -> EngineRequest:
    prompt = [(7 * i + 3 * length) % 900 + 4 for i in range(length)]
    return greedy_request(name, prompt, **{"temperature": 1.0, "seed": length, "max_tokens": 24, "logprobs": 3, **changes})


@pytest.mark.parametrize(
    "config",
    [{"dtype": "auto"}, {"dtype": "float32", "quantization": "int8"}, {"dtype": "bfloat16", "depth": 2, "enable_prefix_caching": False}],
    ids=["as the checkpoint", "int8", "bfloat16"],
)
def test_a_request_alone_and_in_a_batch_has_the_same_bits(config: dict[str, Any]) -> None:
    with RealEngine(bundled(), deterministic=True, **config) as engine:
        one = sampled("alone", 37, presence_penalty=0.3)
        engine.run(one)
        crowd = [sampled(f"c{length}", length) for length in (1, 5, 20, 61, 90)]
        engine.run(replace(one, request_id=RequestId("in company")), *crowd)
        assert engine.answer("in company") == engine.answer("alone")
        assert engine.logprobs["in company", 0] == engine.logprobs["alone", 0], "log-probabilities show every bit of the logits"


def test_it_reaches_the_engine_from_llm_and_is_said_at_start() -> None:
    with LLM(deterministic=True, num_gpu_blocks_override=64, dtype="float32") as llm:
        assert any("deterministic" in line for line in llm._engine.info.decided)
        alone = llm.generate("One", SamplingParams(max_tokens=8, temperature=0.0, logprobs=1), use_tqdm=False)[0].outputs[0]
        together = llm.generate(["One", "Two", "Three"], SamplingParams(max_tokens=8, temperature=0.0, logprobs=1), use_tqdm=False)
        assert together[0].outputs[0].logprobs == alone.logprobs


def test_kernels_that_cannot_promise_it_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"deterministic: reference kernels .*numba, which need device cpu"):
        RealEngine(bundled(), deterministic=True, kernels="reference")
