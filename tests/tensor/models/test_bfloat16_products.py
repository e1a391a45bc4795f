"""Tests a model whose strips multiply bfloat16 and whose activations stay float32, on whichever CPU this is.

The results are near those of transformers and of the plain implementation, and have the same bits however a prompt is cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_families import AVX512_BF16
from torch import Tensor

pytest.importorskip("numba")

from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.cpu.linear import Arithmetic, StripLinear
from headrace.tensor.kernels.reference import PlainPacking
from headrace.tensor.models import LoadedModel, load_model
from headrace.tensor.models.steps import MAX_RAGGED_TOKENS

pytestmark = pytest.mark.pure

SHAPE = {"vocab_size": 97, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
FAMILIES: list[tuple[str, dict[str, Any]]] = [("Llama", {}), ("Llama", {"head_dim": 20}), ("Qwen2", {}), ("Gemma3", {}),
                                              ("Mixtral", {"num_local_experts": 3})]  # fmt: skip
TOKENS = random.Random(3).choices(range(97), k=40)


class RoundingPacking(PlainPacking):
    """The reference implementation: rows come in float32 and are rounded by `PlainLinear`."""

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32


STRIPS = load_backend("numba", features=AVX512_BF16)
TWIN = replace(load_backend("reference"), packing=RoundingPacking())


def loaded(folder: Path, backend: Backend) -> LoadedModel:
    return load_model(
        folder, backend=backend, dtype=torch.bfloat16, device=CPU, load_format="auto", seed=0, max_model_len=None
    )  # fmt: skip


def logits(model: LoadedModel, paged_run: Callable[..., Any], chunk: int) -> Tensor:
    run = paged_run(model.model, dtype=model.dtype)
    run.add(TOKENS)
    run.finish(chunk)
    found: Tensor = run.logits(0)
    return found


def errors(got: Tensor, want: Tensor) -> Tensor:
    """Per token, relative to its logits."""
    relative: Tensor = (got - want).norm(dim=-1) / want.norm(dim=-1)
    return relative


@pytest.mark.parametrize(("family", "fields"), FAMILIES)
def test_logits_lie_nearer_to_float32_than_those_of_transformers_in_bfloat16(
    family: str, fields: dict[str, Any], make_oracle: Callable[..., Any], paged_run: Callable[..., Any], tmp_path: Path
) -> None:
    oracle = make_oracle(family, tmp_path, **{**SHAPE, **fields})
    exact = oracle.logits(TOKENS)
    oracle.model.to(torch.bfloat16)
    theirs = errors(oracle.logits(TOKENS), exact)
    model = loaded(tmp_path, STRIPS)
    assert (model.dtype, model.model.activations) == (torch.bfloat16, torch.float32)
    ours = errors(logits(model, paged_run, 16), exact)
    assert ours.median() < min(0.05, float(theirs.median()))


@pytest.mark.parametrize(("family", "fields"), FAMILIES)
def test_logits_equal_the_plain_twins_but_for_roundings_that_fall_the_other_way(
    family: str, fields: dict[str, Any], make_oracle: Callable[..., Any], paged_run: Callable[..., Any], tmp_path: Path
) -> None:
    """Sums in another order differ in their last bit, and now and then an activation is then rounded to the neighbour."""
    make_oracle(family, tmp_path, **{**SHAPE, **fields})
    got, want = (logits(loaded(tmp_path, backend), paged_run, 16) for backend in (STRIPS, TWIN))
    assert errors(got, want).median() < 4e-3


def test_a_prompt_has_the_same_bits_however_it_is_cut(
    make_oracle: Callable[..., Any], paged_run: Callable[..., Any], tmp_path: Path
) -> None:
    make_oracle("Llama", tmp_path, **SHAPE)
    model = loaded(tmp_path, STRIPS)
    layers = [linear for block in model.model.blocks for linear in (*block.attention.linears, *block.mlp.linears)]
    assert all(isinstance(linear, StripLinear) and linear.arithmetic is Arithmetic.BFLOAT16 for linear in layers)
    run = partial(logits, model, paged_run)
    whole = run(len(TOKENS))
    chunks = (1, 2, 7, 16)
    assert all(torch.equal(run(chunk), whole) for chunk in chunks)
    sizes = {size for chunk in (*chunks, len(TOKENS)) for size in (chunk, len(TOKENS) % chunk) if 0 < size <= MAX_RAGGED_TOKENS}
    assert {num_tokens for num_tokens, *_ in model.model._steps._kept} == sizes
