"""Tests that every variant that captured and warmed-up steps launch compiles ahead of time for A100 and H100, and that every variant is
launched.

Models are read onto the meta device, so nothing here reads a value of a tensor: an operation that waits for the device fails.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import compiling_for

from headrace.engine.runner.device.graphs import SIZES as ROWS
from headrace.engine.runner.device.graphs import TOKENS
from headrace.engine.runner.warmup import prompt_lengths
from headrace.tensor.batch import ForwardBatch, GroupBatch, KvCache, allocate_kv
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.checkpoint.random_weights import WeightShapes
from headrace.tensor.device import META
from headrace.tensor.kernels import Backend
from headrace.tensor.kernels.gpu.backend import TritonKernels
from headrace.tensor.kernels.gpu.linears import TritonPacking
from headrace.tensor.kernels.gpu.tuning import read_tuning
from headrace.tensor.kernels.rounding import Precision
from headrace.tensor.layers.weights import WeightReader
from headrace.tensor.models import ARCHITECTURES
from headrace.tensor.models.decoder import DecoderModel

pytestmark = [pytest.mark.slow, pytest.mark.process]

MAX_ROWS, MAX_TOKENS, BLOCK_SIZE = 256, 8192, 16
MAX_LOCAL_BYTES = 256
"""Of a thread: a few registers' worth may lie in local memory, a tile of sums may not."""

SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
"""The shape on which the table was measured, with one layer."""
LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0}
GEMMA = {
    **SIZES,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 262208,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 1024,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
ODD_HEADS = {**LLAMA, "hidden_size": 2560, "head_dim": 80, "num_key_value_heads": 32}
TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 90}
"""Heads, and tiles of products, as narrow as the matrix units take or narrower."""
MIXTURE = {**SIZES, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6}

CASES = [
    (90, LLAMA, "none", torch.bfloat16),
    (90, LLAMA, "int8", torch.int8),
    (90, LLAMA, "int4", torch.bfloat16),
    (90, LLAMA, "fp8", torch.float8_e4m3fn),
    (90, GEMMA, "none", torch.int8),
    (90, ODD_HEADS, "none", torch.bfloat16),
    (90, TINY, "fp8", torch.float8_e4m3fn),
    (90, MIXTURE, "none", torch.bfloat16),
    (90, MIXTURE, "int4", torch.bfloat16),
    (90, MIXTURE, "fp8", torch.bfloat16),
    (80, LLAMA, "none", torch.bfloat16),
    (80, LLAMA, "int8", torch.int8),
    (80, LLAMA, "int4", torch.bfloat16),
    (80, GEMMA, "none", torch.bfloat16),
    (80, MIXTURE, "none", torch.bfloat16),
]


def read_model(folder: Path, config: dict[str, Any], precision: str) -> DecoderModel:
    """The model on the meta device."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tuning = read_tuning()
    packing = TritonPacking(tuning)
    backend = Backend(name="triton", kernels=TritonKernels(tuning), packing=packing, group_experts=packing.group_experts)
    reader = WeightReader(WeightShapes(torch.bfloat16), backend, torch.bfloat16, META, precision=Precision(precision))
    return DecoderModel(reader, ARCHITECTURES[config["architectures"][0]](read_config(folder)))


class Step(NamedTuple):
    """Rows of one token, or tokens of a prompt in one row."""

    num_decodes: int = 0
    num_tokens: int = 0


def run(model: DecoderModel, kv: KvCache, step: Step) -> None:
    tokens, rows = (step.num_decodes, step.num_decodes) if step.num_decodes else (step.num_tokens, 1)

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    groups = tuple(GroupBatch(ints(rows, 300), ints(tokens, dtype=torch.int64)) for _ in model.kv_groups)
    largest = 1 if step.num_decodes else tokens
    positions = ints(tokens, dtype=torch.int64)
    batch = ForwardBatch(positions, ints(rows + 1), ints(rows), largest, groups, num_decodes=step.num_decodes)
    model.logits(model.forward(ints(tokens, dtype=torch.int64), batch, kv)[:rows])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's folder of compiled kernels: what two models share is compiled once."""
    return tmp_path_factory.mktemp("triton")


@pytest.mark.parametrize(("capability", "config", "precision", "stored"), CASES)
def test_captured_and_warmed_steps_compile_every_variant_and_each_fits_the_device(
    tmp_path: Path, cache: Path, capability: int, config: dict[str, Any], precision: str, stored: torch.dtype
) -> None:
    with compiling_for(capability, cache) as compiled, torch.inference_mode():
        model = read_model(tmp_path, config, precision)
        kv = allocate_kv(model.kv_shapes, model.group_of, tuple(64 for _ in model.kv_groups), BLOCK_SIZE, stored, META)
        for rows in ROWS[: ROWS.index(MAX_ROWS) + 1]:
            run(model, kv, Step(num_decodes=rows))
        for tokens in sorted({*TOKENS, *prompt_lengths(MAX_TOKENS)}):
            run(model, kv, Step(num_tokens=tokens))
        spilling = [kernel for kernel in compiled if kernel.local_bytes > MAX_LOCAL_BYTES]
        assert not spilling, spilling
        num_warm = len(compiled)
        assert num_warm >= 8
        for rows in (3, 5, 9, 12, 24, 33, 48, 96, 130, 192, 255):
            run(model, kv, Step(num_decodes=rows))
        for tokens in (3, 7, 11, 21, 40, 66, 100, 300, 700, 1500, 5000):
            run(model, kv, Step(num_tokens=tokens))
        assert compiled[num_warm:] == []
