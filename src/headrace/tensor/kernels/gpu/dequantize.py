"""Dequantizes INT8 and INT4 weights (planar words) by a Triton kernel, for products of many rows, which torch computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.gpu.formats import INT4, expand_int4, expand_int8
from headrace.tensor.kernels.gpu.product import StoredWeight, power_in

SLAB_ELEMENTS = 1 << 27
"""Values of a weight that are dense at a time: 256 MiB in bfloat16. A layer's weights fit; a head is done in parts."""
MAX_ROWS = 32


@triton.jit
def _dequantize_kernel(
    w_ptr, scale_ptr, out_ptr, first, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUT: tl.constexpr,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """out [.., K] in the inputs' order, for outputs from `first` on. N: outputs of the whole weight."""
    J: tl.constexpr = 8 if FORMAT == INT4 else 4
    FIELD: tl.constexpr = LAYOUT // J
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block, n = tl.program_id(1), first + local
    column = tl.arange(0, FIELD)
    words = tl.load(w_ptr + n.to(tl.int64)[:, None] * (K // J) + (block * FIELD + column)[None, :])
    target = out_ptr + local.to(tl.int64)[:, None] * K + (block * LAYOUT + column)[None, :]
    if FORMAT == INT4:
        e = expand_int4(words)
        for j in tl.static_range(8):
            scale_at = scale_ptr + (block * (LAYOUT // GROUP) + j * FIELD // GROUP) * N + n
            w = e[j] - tl.load(scale_at + ZEROS)[:, None] if ZEROS else e[j]
            scale = tl.load(scale_at).to(tl.float32)
            tl.store(target + j * FIELD, (w.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty))
    else:
        e = expand_int8(words)
        scale = tl.load(scale_ptr + n)
        for j in tl.static_range(4):
            tl.store(target + j * FIELD, (e[j].to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty))


def dequantize(weight: StoredWeight, outputs: range, dtype: torch.dtype) -> Tensor:
    """Rows `outputs` of a planar weight, dense [len(outputs), K] in `dtype`. Its ends are multiples of what `power_in` allows."""
    out = empty((len(outputs), weight.in_features), dtype, weight.values.device)
    block_n = power_in(len(outputs), MAX_ROWS)
    _dequantize_kernel[(len(outputs) // block_n, weight.in_features // weight.layout)](
        weight.values, weight.scales, out, outputs.start, N=weight.out_features, K=weight.in_features, BLOCK_N=block_n,
        LAYOUT=weight.layout, GROUP=weight.group, ZEROS=weight.zeros_after, FORMAT=weight.format, num_warps=4,
    )  # fmt: skip
    return out


def product_of_many(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight^T + bias -> [T, N], the weight dense for as long as it is read."""
    slabs = list(_slabs(weight))
    if len(slabs) == 1:
        return F.linear(x, dequantize(weight, slabs[0], x.dtype), bias)
    out = empty((x.shape[0], weight.out_features), x.dtype, x.device)
    for slab in slabs:
        part = slice(slab.start, slab.stop)
        out[:, part] = F.linear(x, dequantize(weight, slab, x.dtype), None if bias is None else bias[part])
    return out


def _slabs(weight: StoredWeight) -> Iterator[range]:
    size = max(MAX_ROWS, SLAB_ELEMENTS // weight.in_features // MAX_ROWS * MAX_ROWS)
    return (range(first, min(first + size, weight.out_features)) for first in range(0, weight.out_features, size))
