"""FP8 products of many rows on the GPU (W8A8), used in prefill.

A Triton kernel rounds the activations to e4m3 (no infinity, largest value 448) with one scale per row; torch's scaled product multiplies.
"""

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
    """x [T, N] rounded to FP8: (values float8_e4m3fn [T, N], scales float32 [T, 1]). The last dimension of x is contiguous."""
    tokens, n = x.shape
    assert x.stride(1) == 1
    rounded = empty((tokens, n), torch.float8_e4m3fn, x.device)
    scales = empty((tokens, 1), torch.float32, x.device)
    block = triton.next_power_of_2(n)
    _round_rows_kernel[(tokens,)](x, rounded, scales, x.stride(0), N=n, BLOCK=block, num_warps=4 if block <= 4096 else 8)
    return rounded, scales


def product_of_many(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight [N, K]^T, plus bias [N], in the dtype of x. The product is computed in FP8, with x rounded by `round_rows`.

    weight  float8_e4m3fn; N and K are multiples of 16
    scales  float32 [N], of the weight's outputs

    torch's product with a scale per row writes bfloat16, so the result has the precision of bfloat16 for every dtype of x.
    """
    rows, row_scales = round_rows(x)
    is_narrow = x.dtype == torch.bfloat16
    added = bias if is_narrow else None
    out = torch._scaled_mm(rows, weight.t(), row_scales, scales[None], bias=added, out_dtype=torch.bfloat16, use_fast_accum=True).to(
        x.dtype
    )
    return out if is_narrow or bias is None else out.add_(bias)
