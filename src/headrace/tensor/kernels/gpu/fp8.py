"""FP8 (e4m3, no infinity, +-448) for products: rows of inputs rounded on the device, one scale per row.

A row is `(high + low / 16) * scale`. High alone is what products of many rows multiply (W8A8); few rows, whose products wait for memory,
multiply both parts and are as exact as the rounded weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.gpu.formats import MAX_FP8


@triton.jit
def _split_rows_kernel(x_ptr, high_ptr, low_ptr, scale_ptr, x_st, N: tl.constexpr, BLOCK: tl.constexpr, HAS_LOW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(x_ptr + row * x_st + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / MAX_FP8, 1e-12)
    x = x / scale
    high = x.to(high_ptr.dtype.element_ty)
    tl.store(high_ptr + row * N + column, high, mask=inside)
    if HAS_LOW:
        tl.store(low_ptr + row * N + column, ((x - high.to(tl.float32)) * 16.0).to(low_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def split_rows(x: Tensor, *, has_low: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """x [T, N] -> high [T, N] and, with has_low, low [T, N] in float8_e4m3fn; scales float32 [T, 1]."""
    tokens, n = x.shape
    assert x.stride(1) == 1
    high = empty((tokens, n), torch.float8_e4m3fn, x.device)
    low = empty((tokens, n), torch.float8_e4m3fn, x.device) if has_low else None
    scales = empty((tokens, 1), torch.float32, x.device)
    block = triton.next_power_of_2(n)
    _split_rows_kernel[(tokens,)](
        x, high, high if low is None else low, scales, x.stride(0), N=n, BLOCK=block, HAS_LOW=has_low, num_warps=4 if block <= 4096 else 8
    )
    return high, low, scales


def product_of_many(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight [N, K]^T in FP8 by the library, rows of x rounded; scales float32 [N]. N and K are multiples of 16.

    The library's products with a scale per row write bfloat16.
    """
    rows, _, row_scales = split_rows(x, has_low=False)
    is_narrow = x.dtype == torch.bfloat16
    added = bias if is_narrow else None
    out = torch._scaled_mm(rows, weight.t(), row_scales, scales[None], bias=added, out_dtype=torch.bfloat16, use_fast_accum=True).to(
        x.dtype
    )
    return out if is_narrow or bias is None else out.add_(bias)
