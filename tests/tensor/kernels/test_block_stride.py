"""Tests kernels over a layer whose blocks lie among those of the other layers: the bits of a layer with memory of its own."""

from __future__ import annotations

import pytest
import torch

from headrace.tensor.backends import load_backend
from headrace.tensor.batch import LayerKv, allocate_kv
from headrace.tensor.device import CPU
from headrace.tensor.kernels import Kernels

pytestmark = pytest.mark.pure

HEADS, KV_HEADS, DIM, BLOCKS, SIZE, LAYERS = 4, 2, 32, 12, 4, 3


@pytest.fixture(params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "numba":
        pytest.importorskip("numba")
    return load_backend(request.param).kernels


def dense(dtype: torch.dtype) -> LayerKv:
    shape = (BLOCKS, 2, SIZE, KV_HEADS)
    return LayerKv(torch.zeros((*shape, DIM), dtype=dtype), torch.zeros(shape) if dtype == torch.int8 else None)


@pytest.mark.parametrize(
    ("computed", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.int8),
    ],
)
def test_a_layer_among_others_is_written_and_read_as_one_alone(kernels: Kernels, computed: torch.dtype, stored: torch.dtype) -> None:
    """No cache is wider than what is computed with."""
    torch.manual_seed(0)
    pooled = allocate_kv([(KV_HEADS, DIM)] * LAYERS, (0,) * LAYERS, (BLOCKS,), SIZE, stored, CPU)
    table = torch.tensor([[7, 2, 9, 4, 1], [3, 11, 0, 0, 0]], dtype=torch.int32)
    contexts = torch.tensor([19, 6], dtype=torch.int32)
    starts = torch.tensor([0, 19, 25], dtype=torch.int32)
    positions = torch.cat([torch.arange(19), torch.arange(6)])
    rows = torch.tensor([0] * 19 + [1] * 6)
    slots = table[rows, positions // SIZE].long() * SIZE + positions % SIZE
    cos_sin = torch.randn(32, DIM)
    for layer in pooled.layers:
        alone, answers = dense(stored), []
        query, key, value = (torch.randn(25, heads, DIM).to(computed) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for kv in (layer, alone):
            turned = query.clone()
            kernels.rotary_scatter(turned, key.clone(), value, cos_sin, positions, kv.values, slots, kv_scales=kv.scales)
            answers.append(kernels.attention(turned, kv.values, table, starts, contexts, scale=0.2, kv_scales=kv.scales))
        assert torch.equal(*answers)
        assert answers[0].isfinite().all()
        assert torch.equal(layer.values, alone.values)
        if layer.scales is not None:
            assert alone.scales is not None
            assert torch.equal(layer.scales, alone.scales)
