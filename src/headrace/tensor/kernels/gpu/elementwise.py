"""Norms, gates and row lookups: one program per row, or per piece of a row. Sums are in float32. Shape letters: see `tensor.batch`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty


@triton.jit
def tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, stride_t, stride_h, eps,
    HEADS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    column = tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(x_ptr + token * stride_t + head * stride_h + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        target = residual_ptr + row * N + column
        x = (tl.load(target, mask=inside, other=0.0).to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(target, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / N + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + column, (wide * scale * weight).to(x.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """x may be a part of a wider tensor; its last dim, and the residual, are contiguous."""
    assert x.stride(-1) == 1
    assert residual is None or residual.is_contiguous()
    n, heads = x.shape[-1], 1 if x.dim() == 2 else x.shape[1]
    out = empty(x.shape, x.dtype, x.device)
    if rows := x.shape[0] * heads:
        block = triton.next_power_of_2(n)
        _rms_norm_kernel[(rows,)](
            x, out if residual is None else residual, weight, out, x.stride(0), x.stride(1) if heads > 1 else 0, eps,
            HEADS=heads, N=n, BLOCK=block, HAS_RESIDUAL=residual is not None,
            num_warps=1 if block <= 256 else 4 if block <= 2048 else 8,
        )  # fmt: skip
    return out


@triton.jit
def _gated_activation_kernel(gate_up_ptr, out_ptr, F: tl.constexpr, BLOCK: tl.constexpr, IS_SILU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(gate_up_ptr + row * (2 * F) + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * (2 * F) + F + column, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    if IS_SILU:
        y = x / (1.0 + tl.exp(-x))
    else:
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    tl.store(out_ptr + row * F + column, (y * up).to(gate.dtype), mask=inside)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    assert gate_up.is_contiguous()
    assert activation in ("silu", "gelu_tanh"), activation
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty((tokens, size), gate_up.dtype, gate_up.device)
    if tokens:
        block = min(1024, triton.next_power_of_2(size))
        grid = (tokens, triton.cdiv(size, block))
        _gated_activation_kernel[grid](gate_up, out, F=size, BLOCK=block, IS_SILU=activation == "silu", num_warps=4)
    return out


@triton.jit(do_not_specialize_on_alignment=["row_ptr"])
def _select_kernel(x_ptr, row_ptr, out_ptr, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(row_ptr + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    tl.store(out_ptr + row * N + column, tl.load(x_ptr + source * stride + column, mask=inside), mask=inside)


def select(x: Tensor, rows: Tensor) -> Tensor:
    assert x[:1].is_contiguous()
    n = x[:1].numel()
    out = empty((rows.shape[0], *x.shape[1:]), x.dtype, x.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(n))
        _select_kernel[(rows.shape[0], triton.cdiv(n, block))](x, rows, out, x.stride(0), N=n, BLOCK=block, num_warps=4)
    return out
