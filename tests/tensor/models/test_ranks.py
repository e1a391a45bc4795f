"""Tests each rank's slice of a whole decoder: blocks of all ranks, summed, are the unsliced block, and ranks that sum answer as
the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.tensor.backends import load_backend
from headrace.tensor.batch import ForwardBatch, GroupBatch, LayerKv, allocate_kv
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.device import CPU
from headrace.tensor.layers.weights import Reduce, WeightReader, no_reduce
from headrace.tensor.models import ARCHITECTURES
from headrace.tensor.models.decoder import DecoderModel

pytestmark = pytest.mark.pure

TINY = {"vocab_size": 31, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen3": {"head_dim": 16},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 3},
}


class Ranks:
    """Two ranks in one process, each on a thread: `reduce` waits for both, and both get the same sum."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = [torch.empty(0)] * 2
        self._barrier = threading.Barrier(2, timeout=60)

    def reduce(self, rank: int, x: Tensor) -> Tensor:
        self._parts[rank] = x
        self._barrier.wait()
        total = self._parts[0] + self._parts[1]
        self._barrier.wait()
        return total


def own_part(x: Tensor) -> Tensor:
    return x


def decoder(folder: Path, rank: int, world: int, reduce: Reduce = no_reduce) -> DecoderModel:
    config = read_config(folder)
    spec = ARCHITECTURES[str(config.items("architectures")[0])](config)
    checkpoint = Checkpoint(folder)
    made = DecoderModel(WeightReader(checkpoint, load_backend("reference"), torch.float32, CPU, rank, world, reduce=reduce), spec)
    checkpoint.check_all_read()
    return made


@pytest.mark.parametrize("family", CASES)
def test_ranks_blocks_sum_to_the_whole_block(family: str, make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    make_oracle(family, tmp_path, **{**TINY, **CASES[family]})
    whole, ranks = decoder(tmp_path, 0, 1), [decoder(tmp_path, rank, 2, own_part) for rank in range(2)]
    assert [rank.kv_groups[0].kv_heads for rank in ranks] == [1, 1]
    assert torch.equal(whole.embedding.whole(), ranks[1].embedding.whole())
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    group = GroupBatch(torch.tensor([[2, 1, 3]], dtype=torch.int32), torch.tensor([8, 9, 10, 11, 4, 5, 6, 7, 12]))
    batch = ForwardBatch(torch.arange(9), torch.tensor([0, 9], dtype=torch.int32), torch.tensor([9], dtype=torch.int32), 9, (group,))
    for index, block in enumerate(whole.blocks):

        def attention(model: DecoderModel, at: int = index) -> torch.Tensor:
            heads, dim = model.kv_shapes[at]
            return model.blocks[at].attention(x, batch, group, LayerKv(torch.zeros(4, 2, 4, heads, dim)))

        assert torch.allclose(attention(ranks[0]) + attention(ranks[1]), attention(whole), atol=1e-4)
        assert torch.allclose(ranks[0].blocks[index].mlp(x, batch) + ranks[1].blocks[index].mlp(x, batch), block.mlp(x, batch), atol=1e-4)


def forward(model: DecoderModel) -> Tensor:
    """Logits [11, V] of a prompt of 9 tokens and 2 decode steps."""
    kv = allocate_kv(model.kv_shapes, model.group_of, (4,) * len(model.kv_groups), 4, torch.float32, CPU)
    table, found = torch.tensor([[2, 1, 3]], dtype=torch.int32), []
    slots = torch.tensor([8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14])
    for first, last in ((0, 9), (9, 10), (10, 11)):
        starts, context = torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
        groups = tuple(GroupBatch(table, slots[first:last]) for _ in model.kv_groups)
        batch = ForwardBatch(torch.arange(first, last), starts, context, last - first, groups)
        found.append(model.logits(model.forward(torch.arange(first, last) + 3, batch, kv)))
    return torch.cat(found)


@pytest.mark.socket
@torch.inference_mode()
@pytest.mark.parametrize("family", CASES)
def test_ranks_that_sum_their_parts_answer_as_the_whole(family: str, make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    make_oracle(family, tmp_path, **{**TINY, **CASES[family]})
    together = Ranks()
    ranks = [decoder(tmp_path, rank, 2, partial(together.reduce, rank)) for rank in range(2)]

    def answer(rank: int) -> Tensor:
        with torch.inference_mode():
            return forward(ranks[rank])

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(answer, range(2))
    assert torch.equal(first, second)
    assert torch.allclose(first, forward(decoder(tmp_path, 0, 1)), atol=1e-4)


def test_several_ranks_without_a_reduce_are_refused(make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    make_oracle("Llama", tmp_path, **TINY)
    with pytest.raises(AssertionError, match="need a reduce"):
        decoder(tmp_path, 0, 2)
