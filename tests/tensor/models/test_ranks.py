"""Each rank's slice of a whole decoder: blocks of all ranks, run side by side and summed, are the unsliced block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.tensor.batch import Batch, GroupBatch, LayerKv
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.checkpoint.folder import Checkpoint
from headrace.tensor.kernels import load_backend
from headrace.tensor.layers.weights import WeightReader
from headrace.tensor.models import ARCHITECTURES
from headrace.tensor.models.decoder import Decoder

TINY = {"vocab_size": 31, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen3": {"head_dim": 16},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 3},
}


def decoder(folder: Path, rank: int, world: int) -> Decoder:
    config = read_config(folder)
    spec = ARCHITECTURES[str(config.items("architectures")[0])](config)
    checkpoint = Checkpoint(folder)
    made = Decoder(WeightReader(checkpoint, load_backend("reference"), torch.float32, "cpu", rank, world), spec)
    checkpoint.check_all_read()
    return made


@pytest.mark.parametrize("family", CASES)
def test_ranks_blocks_sum_to_the_whole_block(family: str, make_oracle: Callable[..., Any], tmp_path: Path) -> None:
    make_oracle(family, tmp_path, **{**TINY, **CASES[family]})
    whole, ranks = decoder(tmp_path, 0, 1), [decoder(tmp_path, rank, 2) for rank in range(2)]
    assert [rank.kv_groups[0].kv_heads for rank in ranks] == [1, 1]
    assert torch.equal(whole.embedding.whole(), ranks[1].embedding.whole())
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    group = GroupBatch(torch.tensor([[2, 1, 3]], dtype=torch.int32), torch.tensor([8, 9, 10, 11, 4, 5, 6, 7, 12]))
    batch = Batch(torch.arange(9), torch.tensor([0, 9], dtype=torch.int32), torch.tensor([9], dtype=torch.int32), 9, (group,))
    for index, block in enumerate(whole.blocks):

        def attention(model: Decoder, at: int = index) -> torch.Tensor:
            heads, dim = model.kv_shapes[at]
            return model.blocks[at].attention(x, batch, group, LayerKv(torch.zeros(4, 2, 4, heads, dim)))

        assert torch.allclose(attention(ranks[0]) + attention(ranks[1]), attention(whole), atol=1e-4)
        assert torch.allclose(ranks[0].blocks[index].mlp(x) + ranks[1].blocks[index].mlp(x), block.mlp(x), atol=1e-4)
