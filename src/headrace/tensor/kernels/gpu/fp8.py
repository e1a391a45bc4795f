"""FP8 (e4m3, no infinity, +-448) products of many rows (W8A8): rows of inputs rounded on the device, one scale per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.gpu.formats import MAX_FP8


@triton.jit
def _round_rows_kernel(x_ptr, out_ptr, scale_ptr, x_st, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(x_ptr + row * x_st + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / MAX_FP8, 1e-12)
    tl.store(out_ptr + row * N + column, (x / scale).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, N] -> (values [T, N] in float8_e4m3fn, scales float32 [T, 1])."""
    tokens, n = x.shape
    assert x.stride(1) == 1
    rounded = empty((tokens, n), torch.float8_e4m3fn, x.device)
    scales = empty((tokens, 1), torch.float32, x.device)
    block = triton.next_power_of_2(n)
    _round_rows_kernel[(tokens,)](x, rounded, scales, x.stride(0), N=n, BLOCK=block, num_warps=4 if block <= 4096 else 8)
    return rounded, scales


def product_of_many(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight [N, K]^T in FP8 by the library, rows of x rounded; scales float32 [N]. N and K are multiples of 16.

    The library's products with a scale per row write bfloat16.
    """
    rows, row_scales = round_rows(x)
    is_narrow = x.dtype == torch.bfloat16
    added = bias if is_narrow else None
    out = torch._scaled_mm(rows, weight.t(), row_scales, scales[None], bias=added, out_dtype=torch.bfloat16, use_fast_accum=True).to(
        x.dtype
    )
    return out if is_narrow or bias is None else out.add_(bias)
