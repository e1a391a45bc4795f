"""The small fused operations of a transformer block on the CPU: RMSNorm (with or without a residual) and gated activation.

A token's result depends on that token alone. Arithmetic is float32; only the norm's sum and exp differ from `reference` in rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.tensor.kernels.cpu.jit.launch import (
    allocate_result,
    compile_kernel,
    float_bits,
    float_from_bits,
    helper,
    launch,
    thread_limit,
)
from headrace.tensor.kernels.cpu.jit.scalars import as_bf16, as_f32, at, exp, load, read_arguments, store
from headrace.tensor.kernels.cpu.jit.simd import sum_squares

Pointer = Any

ELEMENTS_PER_THREAD = 1 << 15
SILU, GELU_TANH = 0, 1
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
EXP_COST = 8

ONE = np.float32(1.0)
GELU_SLOPE, GELU_CUBE = np.float32(2.0 * 0.7978845608028654), np.float32(0.044715)
"""gelu_tanh(x) = x / 2 (1 + tanh u) = x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x**3)."""


def workers_for(num_elements: int) -> int:
    return max(1, min(thread_limit(), num_elements // ELEMENTS_PER_THREAD))


@helper
def share(count: int, worker: int, workers: int) -> tuple[int, int]:
    return count * worker // workers, count * (worker + 1) // workers


# --- RMSNorm ---


class NormArguments(NamedTuple):
    """Strides in elements; out is contiguous. residual  0: none."""

    x: int
    weight: int
    out: int
    residual: int
    tokens: int
    heads: int
    dim: int
    x_token: int
    x_head: int
    residual_token: int
    eps_bits: int


@helper
def norm_row(x: Pointer, weight: Pointer, out: Pointer, dim: int, eps: float) -> None:
    scale = ONE / np.sqrt(sum_squares(x, dim) / np.float32(dim) + eps)
    for i in range(dim):
        store(load(x, i) * scale * load(weight, i), out, i)


@helper
def add_row(residual: Pointer, x: Pointer, dim: int) -> None:
    for i in range(dim):
        store(load(residual, i) + load(x, i), residual, i)


@helper
def norm(a: NormArguments, x: Pointer, weight: Pointer, out: Pointer, residual: Pointer, worker: int, workers: int) -> None:
    eps = float_from_bits(a.eps_bits)
    first, last = share(a.tokens, worker, workers)
    for token in range(first, last):
        for head in range(a.heads):
            row = at(x, token * a.x_token + head * a.x_head)
            if a.residual != 0:
                total = at(residual, token * a.residual_token)
                add_row(total, row, a.dim)
                row = total
            norm_row(row, weight, at(out, (token * a.heads + head) * a.dim), a.dim, eps)


def _norm_f32(arguments: int, worker: int, workers: int) -> None:
    a: NormArguments = read_arguments(NormArguments, arguments)
    norm(a, as_f32(a.x), as_f32(a.weight), as_f32(a.out), as_f32(a.residual), worker, workers)


def _norm_bf16(arguments: int, worker: int, workers: int) -> None:
    a: NormArguments = read_arguments(NormArguments, arguments)
    norm(a, as_bf16(a.x), as_bf16(a.weight), as_bf16(a.out), as_bf16(a.residual), worker, workers)


def _norm_bf16_f32(arguments: int, worker: int, workers: int) -> None:
    a: NormArguments = read_arguments(NormArguments, arguments)
    norm(a, as_bf16(a.x), as_f32(a.weight), as_bf16(a.out), as_bf16(a.residual), worker, workers)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """x [T, E] or [T, heads, D], last dims contiguous; weight in x's dtype or float32."""
    out = allocate_result(x.shape, x.dtype)
    has_heads = x.dim() == 3
    arguments = NormArguments(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        tokens=x.shape[0],
        heads=x.shape[1] if has_heads else 1,
        dim=x.shape[-1],
        x_token=x.stride(0),
        x_head=x.stride(1) if has_heads else 0,
        residual_token=0 if residual is None else residual.stride(0),
        eps_bits=float_bits(eps),
    )
    touched = (out, x, weight) if residual is None else (out, x, weight, residual)
    launch(_kernel("norm", x.dtype, weight.dtype), arguments, workers_for(x.numel()), *touched)
    return out


# --- gated activation ---


class GateArguments(NamedTuple):
    """gate_up_token is a stride in elements; out is contiguous."""

    gate_up: int
    out: int
    tokens: int
    gate_up_token: int
    dim: int
    activation: int


@helper
def gate_row(gate: Pointer, up: Pointer, out: Pointer, dim: int, activation: int) -> None:
    """x sigmoid(slope) * up, where slope is x (silu) or the gelu_tanh argument."""
    if activation == SILU:
        for i in range(dim):
            x = load(gate, i)
            store(x / (ONE + exp(-x)) * load(up, i), out, i)
    else:
        for i in range(dim):
            x = load(gate, i)
            slope = GELU_SLOPE * (x + GELU_CUBE * x * x * x)
            store(x / (ONE + exp(-slope)) * load(up, i), out, i)


@helper
def gate_rows(a: GateArguments, gate_up: Pointer, out: Pointer, worker: int, workers: int) -> None:
    first, last = share(a.tokens, worker, workers)
    for token in range(first, last):
        gate = at(gate_up, token * a.gate_up_token)
        gate_row(gate, at(gate, a.dim), at(out, token * a.dim), a.dim, a.activation)


def _gate_f32(arguments: int, worker: int, workers: int) -> None:
    a: GateArguments = read_arguments(GateArguments, arguments)
    gate_rows(a, as_f32(a.gate_up), as_f32(a.out), worker, workers)


def _gate_bf16(arguments: int, worker: int, workers: int) -> None:
    a: GateArguments = read_arguments(GateArguments, arguments)
    gate_rows(a, as_bf16(a.gate_up), as_bf16(a.out), worker, workers)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = allocate_result((tokens, dim), gate_up.dtype)
    arguments = GateArguments(
        gate_up=gate_up.data_ptr(),
        out=out.data_ptr(),
        tokens=tokens,
        gate_up_token=gate_up.stride(0),
        dim=dim,
        activation=ACTIVATIONS[activation],
    )
    launch(_kernel("gate", gate_up.dtype, out.dtype), arguments, workers_for(EXP_COST * out.numel()), out, gate_up)
    return out


_SOURCES: dict[tuple[str, torch.dtype, torch.dtype], Callable[[int, int, int], None]] = {
    ("norm", torch.float32, torch.float32): _norm_f32,
    ("norm", torch.bfloat16, torch.bfloat16): _norm_bf16,
    ("norm", torch.bfloat16, torch.float32): _norm_bf16_f32,
    ("gate", torch.float32, torch.float32): _gate_f32,
    ("gate", torch.bfloat16, torch.bfloat16): _gate_bf16,
}


@cache
def _kernel(name: str, dtype: torch.dtype, second_dtype: torch.dtype) -> int:
    return compile_kernel(_SOURCES[name, dtype, second_dtype])
