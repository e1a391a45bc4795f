"""Tests that with rounded weights or a rounded cache, a greedy answer is that of transformers with the same rounding put into it.

The bundled model, through the real loader, runner, scheduler and loop. How exact its answers stay is measured by `bench.quality`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import Checkpoint, PlainLoop
from real_engine import ROOMY, RealEngine, greedy_request
from rounded_loop import RoundedLoop
from torch import Tensor

from headrace import LLM, SamplingParams

pytestmark = pytest.mark.pure

COUNT = 10
NUM_PROMPTS = 5
"""The last of the checkpoint's, the longest among them."""
PRECISIONS = {
    "int8": ("int8", "auto"),
    "int4": ("int4", "auto"),
    "int8 cache": ("none", "int8"),
    "bfloat16 cache": ("none", "bfloat16"),
    "int8, int8 cache": ("int8", "int8"),
    "int4, bfloat16 cache": ("int4", "bfloat16"),
}
MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "depth 2, few blocks": {"depth": 2, "num_kv_blocks": 24, "max_model_len": 60, "enable_prefix_caching": False},
    "reference kernels": {"kernels": "reference"},
}


@cache
def _reference(folder: Path, precision: str) -> RoundedLoop:
    quantization, stored = PRECISIONS[precision]
    return RoundedLoop(folder, quantization=quantization, stored=stored)


@cache
def _answers(folder: Path, precision: str, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [_reference(folder, precision).certain(prompt, COUNT) for prompt in prompts]


def _differing(engine: RealEngine, wanted: list[list[int]]) -> dict[str, tuple[list[int], list[int]]]:
    got = [engine.tokens[f"r{number}", 0][: len(answer)] for number, answer in enumerate(wanted)]
    return {f"r{number}": pair for number, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounded_arithmetic_has_the_tokens_of_its_reference(trained_checkpoint: Checkpoint, precision: str, mode: str) -> None:
    """Asked twice: the second time prompts come from the prefix cache, where there is one."""
    quantization, stored = PRECISIONS[precision]
    prompts = trained_checkpoint.prompts[-NUM_PROMPTS:]
    wanted = _answers(trained_checkpoint.folder, precision, prompts)
    assert sum(map(len, wanted)) >= 0.4 * COUNT * len(wanted), "the model is sure of enough of what it says: 0.46 in int4, more elsewhere"
    requests = [greedy_request(f"r{number}", prompt, max_tokens=COUNT) for number, prompt in enumerate(prompts)]
    with RealEngine(trained_checkpoint.folder, quantization=quantization, kv_cache_dtype=stored, **MODES[mode]) as engine:
        for _ in range(2):
            engine.tokens.clear()
            engine.finish.clear()
            engine.run(*requests)
            assert not _differing(engine, wanted)
        if MODES[mode].get("enable_prefix_caching", True):
            assert all(engine.cached.values())
        else:
            assert engine.preemptions > 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounded_arithmetic_is_that_of_its_reference_and_not_nearly(trained_checkpoint: Checkpoint, precision: str) -> None:
    """Log-probabilities of the prompts' tokens, which no margin hides. The plain kernels round the very same inputs up and down; the fast
    ones sum norms in another order, so of some 100,000 inputs a few are rounded otherwise."""
    quantization, stored = PRECISIONS[precision]
    prompts = trained_checkpoint.prompts[-NUM_PROMPTS:]
    wanted = _told(_reference(trained_checkpoint.folder, precision), prompts)
    rounding = _mean_distance(wanted, _told(trained_checkpoint.plain, prompts))
    for kernels, most in (("reference", 0.01), (ROOMY["kernels"], 0.5)):
        options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 100, "kernels": kernels}
        with LLM(trained_checkpoint.folder, quantization=quantization, kv_cache_dtype=stored, **options) as llm:
            asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            outputs = llm.generate(asked, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1), use_tqdm=False)
        got = [
            (entry or {})[token].logprob
            for prompt, output in zip(prompts, outputs, strict=True)
            for token, entry in zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
        ]
        assert _mean_distance(torch.tensor(got), wanted) < most * rounding, kernels


def _told(loop: PlainLoop, prompts: Iterable[Sequence[int]]) -> Tensor:
    found = [loop.logits(prompt).log_softmax(-1)[range(len(prompt) - 1), prompt[1:]] for prompt in prompts]
    return torch.cat(found)


def _mean_distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())
