"""Tests a whole model on the CPU kernels: a row's logits have the same bits alone, in company, and however its prompt is cut."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.models import LoadedModel, load_model

pytestmark = pytest.mark.pure

BLOCK_SIZE, BLOCKS_PER_ROW = 16, 8
Step = list[tuple[int, int]]
"""Rows of a step in order: (row, tokens computed now)."""


@cache
def _loaded(dtype: torch.dtype) -> LoadedModel:
    folder = bundled_path(DEFAULT_MODEL)
    if folder is None:
        pytest.skip("no bundled model in this checkout")
    backend = load_backend("numba", deterministic=True)
    return load_model(folder, backend=backend, dtype=dtype, device=CPU, load_format="auto", seed=0, max_model_len=None)


def _batch(step: Step, computed: dict[int, int]) -> ForwardBatch:
    positions = [p for row, count in step for p in range(computed[row], computed[row] + count)]
    slots = [(1 + row * BLOCKS_PER_ROW) * BLOCK_SIZE + p for row, count in step for p in range(computed[row], computed[row] + count)]
    table = torch.tensor([[1 + row * BLOCKS_PER_ROW + i for i in range(BLOCKS_PER_ROW)] for row, _ in step], dtype=torch.int32)
    starts = torch.tensor([0, *(count for _, count in step)]).cumsum(0).int()
    contexts = torch.tensor([computed[row] + count for row, count in step], dtype=torch.int32)
    group = GroupBatch(table, torch.tensor(slots))
    return ForwardBatch(torch.tensor(positions), starts, contexts, max(count for _, count in step), (group,))


@torch.inference_mode()
def _logits(loaded: LoadedModel, prompts: Tensor, steps: list[Step]) -> dict[int, Tensor]:
    """Row -> logits of all its tokens, computed step by step over a fresh cache."""
    model = loaded.model
    kv: KvCache = allocate_kv(
        model.kv_shapes, model.group_of, (1 + len(prompts) * BLOCKS_PER_ROW,), BLOCK_SIZE, loaded.dtype, CPU
    )  # fmt: skip
    computed = dict.fromkeys(range(len(prompts)), 0)
    parts: dict[int, list[Tensor]] = {row: [] for row in computed}
    for step in steps:
        ids = torch.cat([prompts[row, computed[row] : computed[row] + count] for row, count in step])
        logits = model.logits(model.forward(ids, _batch(step, computed), kv))
        for (row, count), part in zip(step, torch.split(logits, [count for _, count in step]), strict=True):
            parts[row].append(part)
            computed[row] += count
    return {row: torch.cat(pieces) for row, pieces in parts.items() if pieces}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_same_bits_in_every_schedule(dtype: torch.dtype) -> None:
    loaded = _loaded(dtype)
    prompts = torch.randint(4, loaded.vocab_size, (6, 100), generator=torch.Generator().manual_seed(0))
    everybody = _logits(loaded, prompts, [[(row, 100) for row in range(6)]])
    alone = _logits(loaded, prompts, [[(2, 100)]])[2]
    assert torch.equal(alone, everybody[2])
    one_by_one = _logits(loaded, prompts, [[(2, 1)] for _ in range(100)])[2]
    assert torch.equal(one_by_one, alone)
    odd: list[Step] = [[(5, 30), (2, 7)], [(2, 1), (5, 1)], [(0, 64), (2, 33), (1, 3)], [(2, 1)], [(3, 5), (2, 58), (5, 2)]]
    assert torch.equal(_logits(loaded, prompts, odd)[2], alone)
