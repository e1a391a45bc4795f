"""Tests every architecture against transformers on the same random weights in float32, over every path a sequence can take.

Other configurations of each are drawn in test_random_models.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.models import LoadedModel, load_model

pytestmark = pytest.mark.pure

VOCAB = 97
TINY = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0}
GEMMA_ROPES = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20,
                          "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "rope_parameters": GEMMA_ROPES}),
    "phi3-partial-rotary-window": ("Phi3", {"sliding_window": 5, "hidden_size": 96, "rope_parameters":
                                            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
}  # fmt: skip
NUMBA_CASES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "mistral-window": {"head_dim": 16},
    "qwen2": {"hidden_size": 96},
    "qwen3": {},
    "qwen3-moe": {},
    "mixtral": {"head_dim": 16},
    "gemma3": {},
    "phi3-partial-rotary-window": {},
}
"""Case -> fields that bring it to heads of 16 in groups of 3: one shape, compiled once (other shapes: tests of the kernels)."""


@dataclass
class Pair:
    oracle: Any
    folder: Path
    loaded: LoadedModel


@pytest.fixture(scope="module", params=[*((name, "reference") for name in CASES), *((name, "numba") for name in NUMBA_CASES)], ids="-".join)
def pair(request: pytest.FixtureRequest, make_oracle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, kernels = request.param
    family, fields = CASES[name]
    folder = tmp_path_factory.mktemp(name)
    changed = NUMBA_CASES[name] if kernels == "numba" else {}
    oracle = make_oracle(family, folder, **{**TINY, **fields, **changed})
    loaded = load_model(folder, backend=load_backend(kernels), dtype=None, device=CPU, load_format="auto", seed=0, max_model_len=None)
    return Pair(oracle, folder, loaded)


def prompts(*lengths: int) -> list[list[int]]:
    generator = random.Random(str(lengths))
    return [[generator.randrange(VOCAB) for _ in range(length)] for length in lengths]


def test_a_ragged_batch_of_whole_prompts(pair: Pair, paged_run: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    run, tokens = paged_run(pair.loaded.model), prompts(37, 1, 18, 5)
    for row in tokens:
        run.add(row)
    run.finish(chunk=64)
    for index, row in enumerate(tokens):
        assert_close(run.logits(index), pair.oracle.logits(row))


@pytest.mark.parametrize("chunk", [3, 7])
def test_prompts_in_odd_chunks(pair: Pair, paged_run: Callable[..., Any], assert_close: Callable[..., None], chunk: int) -> None:
    run, tokens = paged_run(pair.loaded.model, seed=chunk), prompts(29, 11)
    for row in tokens:
        run.add(row)
    run.finish(chunk)
    for index, row in enumerate(tokens):
        assert_close(run.logits(index), pair.oracle.logits(row))


def test_of_tokens_nobody_asks_about_keys_and_values_are_left(
    pair: Pair, paged_run: Callable[..., Any], assert_close: Callable[..., None]
) -> None:
    run, tokens = paged_run(pair.loaded.model, seed=2), prompts(100, 21)
    first, second = (run.add(row) for row in tokens)
    run.step({first: 12, second: 9}, selected=[])
    run.step({first: 80, second: 11}, selected=[5, 79, 83, 90])
    run.step({first: 8, second: 1}, selected=[7])
    assert_close(run.logits(first), pair.oracle.logits(tokens[0])[[17, 91, 99]])
    assert_close(run.logits(second), pair.oracle.logits(tokens[1])[[12, 19]])


def test_decoding_one_by_one_beside_a_prefill(pair: Pair, paged_run: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    run, tokens = paged_run(pair.loaded.model, seed=1), prompts(22, 13, 9)
    first, second, late = (run.add(row) for row in tokens)
    run.step({second: 8, first: 17})
    run.step({first: 1, late: 9, second: 1})  # a prefill joins running decodes
    run.finish(chunk=1)
    for index, row in enumerate(tokens):
        assert_close(run.logits(index), pair.oracle.logits(row))


def test_a_prefix_hit_reads_another_rows_blocks(pair: Pair, paged_run: Callable[..., Any], assert_close: Callable[..., None]) -> None:
    run, (base, tail) = paged_run(pair.loaded.model, seed=2), prompts(21, 10)
    owner = run.add(base)
    run.finish(chunk=64)
    follower_tokens = base[:12] + tail
    followers = [run.add(follower_tokens, prefix_of=owner, shared_blocks=3) for _ in range(2)]
    run.step({followers[0]: 5})  # the two share blocks while standing at different positions
    run.finish(chunk=4)
    for follower in followers:
        assert_close(run.logits(follower), pair.oracle.logits(follower_tokens)[12:])


def test_facts_match_the_configuration(pair: Pair) -> None:
    loaded, model = pair.loaded, pair.loaded.model
    stored = {id(weight): weight.numel() for weight in pair.oracle.model.parameters()}
    heads = 4 * VOCAB * pair.oracle.model.config.hidden_size * (1 if pair.oracle.model.config.tie_word_embeddings else 0)
    norms_and_biases = 4 * sum(weight.numel() for weight in pair.oracle.model.parameters() if weight.dim() == 1)
    assert loaded.vocab_size == VOCAB
    assert loaded.max_model_len == 128
    assert loaded.eos_token_ids == (2,)
    assert loaded.dtype == torch.float32
    assert sorted(layer for group in model.kv_groups for layer in group.layers) == list(range(len(model.blocks)))
    assert all(index in model.kv_groups[group].layers for index, group in enumerate(model.group_of))
    assert loaded.resident_bytes == 4 * sum(stored.values()) - norms_and_biases + heads + padding_bytes(model)


def padding_bytes(model: Any) -> int:
    """What packed linears hold beyond their weights: outputs that fill up the last strip."""
    linears = [model.head, *(linear for block in model.blocks for linear in (*block.attention.linears, *block.mlp.linears))]
    packed = [linear for linear in linears if hasattr(linear, "columns")]
    return sum(4 * (linear.columns - linear.out_features) * linear.in_features for linear in packed)
