"""Tests prompts as long as YaRN allows, through the whole engine: chunks, memory, streams beside them, and the last tokens against
transformers, which computes the sequence at once and without a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import request
from real_engine import RealEngine

from headrace.lab.plan.shapes import read_shape
from headrace.policy.placement.model import KV_BYTES
from headrace.tensor.checkpoint.config import read_config

pytestmark = pytest.mark.socket

FACTOR, BLOCK_SIZE, STEP, ANSWER, STREAM = 4, 16, 2048, 8, 16
SHAPE: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                         "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SHARPNESS = 8.0
"""Of attention: with the scores of random weights the values of many thousand positions would be averaged, and no position be seen."""


def model_of(make_oracle: Callable[..., Any], folder: Path, context: int) -> Any:
    trained = context // FACTOR
    yarn = {"rope_type": "yarn", "factor": float(FACTOR), "original_max_position_embeddings": trained, "rope_theta": 10_000.0}
    oracle = make_oracle("Qwen2", folder, **SHAPE, max_position_embeddings=trained, rope_parameters=yarn)
    with torch.no_grad():
        for layer in oracle.model.model.layers:
            layer.self_attn.q_proj.weight.mul_(SHARPNESS)
    oracle.model.save_pretrained(folder)
    oracle.model.set_attn_implementation("sdpa")  # which keeps no scores of all pairs
    return oracle.model


def last_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[ANSWER, V] of the tokens that follow each of the last ones."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), logits_to_keep=ANSWER).logits[0]
    return logits.float().log_softmax(-1)


def without_scaling(model: Any) -> Any:
    config = deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    plain = type(model)(config).float().eval()
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("sdpa")
    return plain


@pytest.mark.parametrize("context", [8 << 10, pytest.param(128 << 10, marks=pytest.mark.slow)])
def test_the_last_tokens_of_the_longest_prompt_are_those_of_one_forward_pass(
    context: int, make_oracle: Callable[..., Any], tmp_path: Path
) -> None:
    reference = model_of(make_oracle, tmp_path, context)
    prompt = random.Random(1).choices(range(3, 97), k=context - ANSWER)
    num_blocks = 1 + context // BLOCK_SIZE + 2 * STREAM // BLOCK_SIZE
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_blocks": num_blocks, "max_num_batched_tokens": STEP, "max_num_seqs": 2}
    num_used: list[int] = []
    beside: list[int] = []
    with RealEngine(tmp_path, **sizes) as engine:

        def look(_turn: int) -> None:
            num_used.append(engine.engine.snapshot().kv_blocks_used)
            beside.append(len(engine.answer("stream")))

        info = engine.engine.info
        assert info.max_model_len == context, "by the scaling: the model was trained for a quarter"
        engine.run(request("stream", prompt[:STREAM], max_tokens=STREAM), request("long", prompt, logprobs=1), each_turn=look)
        answer = engine.so_far(("long", 0))
    planned = read_shape(read_config(tmp_path), "tiny").num_resident_kv_values(context) * KV_BYTES["fp32"]
    of_long = max(num_used) - 1 - 2 * STREAM // BLOCK_SIZE  # beside the pad block and the stream's
    assert sum(of_long * group.block_bytes(BLOCK_SIZE) for group in info.kv_groups) == planned
    assert len(num_used) >= context // STEP, "the prompt is computed in chunks"
    grown = [later - earlier for earlier, later in pairwise(beside[beside.index(1) : beside.index(STREAM) + 1])]
    assert grown == [1] * (STREAM - 1), "a token in each step beside it"
    expected = last_logprobs(reference, prompt + answer.token_ids[:-1])
    given = torch.tensor([entry.logprob for entry in answer.logprobs])
    assert torch.allclose(given, expected[torch.arange(ANSWER), torch.tensor(answer.token_ids)], atol=2e-3)
    assert (given >= expected.amax(-1) - 2e-3).all(), "each token is the likeliest"
    if context < 128 << 10:
        other = last_logprobs(without_scaling(reference), prompt + answer.token_ids[:-1])
        assert (other - expected).abs().amax(-1).min() > 0.05, "the scaling is seen: this test can fail"
