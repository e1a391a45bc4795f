"""The small fused operations of a block for the CPU: RMSNorm (+ residual) and gated activation.

Each is one pass over memory by tokens; a worker takes a contiguous share of them. A token's result depends on that token alone.
All float arithmetic is float32, in the order of `reference`; only the norm's sum and exp differ from it in rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from headrace.tensor.kernels.cpu.jit.launch import compile_kernel, float_bits, float_from_bits, fresh, helper, launch, thread_limit
from headrace.tensor.kernels.cpu.jit.simd import as_bf16, as_f32, as_i64, at, exp, load, store, sum_squares

Pointer = Any

ELEMENTS_PER_THREAD = 1 << 15
"""Elements worth a second thread."""

SILU, GELU_TANH = 0, 1
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}

ONE = np.float32(1.0)
GELU_SLOPE, GELU_CUBE = np.float32(2.0 * 0.7978845608028654), np.float32(0.044715)
"""gelu_tanh(x) = x / 2 (1 + tanh u) = x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x**3)."""


def workers_for(num_elements: int) -> int:
    """Workers worth waking for a pass over so many elements."""
    return max(1, min(thread_limit(), num_elements // ELEMENTS_PER_THREAD))


@helper
def share(count: int, worker: int, workers: int) -> tuple[int, int]:
    """This worker's range of `count` things."""
    return count * worker // workers, count * (worker + 1) // workers


# --- RMSNorm ---


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
def norm(a: Pointer, x: Pointer, weight: Pointer, out: Pointer, residual: Pointer, worker: int, workers: int) -> None:
    """Arguments in the order of `rms_norm`. Rows are tokens x heads; out is contiguous."""
    tokens, heads, dim, eps = load(a, 4), load(a, 5), load(a, 6), float_from_bits(load(a, 10))
    first, last = share(tokens, worker, workers)
    for token in range(first, last):
        for head in range(heads):
            row = at(x, token * load(a, 7) + head * load(a, 8))
            if load(a, 3) != 0:
                total = at(residual, token * load(a, 9))
                add_row(total, row, dim)
                row = total
            norm_row(row, weight, at(out, (token * heads + head) * dim), dim, eps)


def _norm_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    norm(a, as_f32(load(a, 0)), as_f32(load(a, 1)), as_f32(load(a, 2)), as_f32(load(a, 3)), worker, workers)


def _norm_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    norm(a, as_bf16(load(a, 0)), as_bf16(load(a, 1)), as_bf16(load(a, 2)), as_bf16(load(a, 3)), worker, workers)


def _norm_bf16_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    norm(a, as_bf16(load(a, 0)), as_f32(load(a, 1)), as_bf16(load(a, 2)), as_bf16(load(a, 3)), worker, workers)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """See `Kernels.rms_norm`; x [T, E] or [T, heads, D], last dims contiguous; weight of x's dtype or float32."""
    out = fresh(x.shape, x.dtype)
    tokens, dim = x.shape[0], x.shape[-1]
    heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    added, added_stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    arguments = [x.data_ptr(), weight.data_ptr(), out.data_ptr(), added, tokens, heads, dim, x.stride(0), head_stride, added_stride]
    touched = (out, x, weight) if residual is None else (out, x, weight, residual)
    launch(_kernel("norm", x.element_size(), weight.element_size()), [*arguments, float_bits(eps)], workers_for(x.numel()), *touched)
    return out


# --- gated activation ---


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
def gate_rows(a: Pointer, gate_up: Pointer, out: Pointer, worker: int, workers: int) -> None:
    """Arguments in the order of `gated_activation`."""
    dim = load(a, 4)
    first, last = share(load(a, 2), worker, workers)
    for token in range(first, last):
        gate = at(gate_up, token * load(a, 3))
        gate_row(gate, at(gate, dim), at(out, token * dim), dim, load(a, 5))


def _gate_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    gate_rows(a, as_f32(load(a, 0)), as_f32(load(a, 1)), worker, workers)


def _gate_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    gate_rows(a, as_bf16(load(a, 0)), as_bf16(load(a, 1)), worker, workers)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """See `Kernels.gated_activation`."""
    tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = fresh((tokens, dim), gate_up.dtype)
    arguments = [gate_up.data_ptr(), out.data_ptr(), tokens, gate_up.stride(0), dim, ACTIVATIONS[activation]]
    workers = workers_for(8 * out.numel())  # exp costs about eight plain elements
    launch(_kernel("gate", gate_up.element_size(), out.element_size()), arguments, workers, out, gate_up)
    return out


_SOURCES: dict[tuple[str, int, int], Callable[[int, int, int], None]] = {
    ("norm", 4, 4): _norm_f32,
    ("norm", 2, 2): _norm_bf16,
    ("norm", 2, 4): _norm_bf16_f32,
    ("gate", 4, 4): _gate_f32,
    ("gate", 2, 2): _gate_bf16,
}
"""By name, bytes of an element of the input and of the weight."""


@cache
def _kernel(name: str, item_bytes: int, other_bytes: int) -> int:
    return compile_kernel(_SOURCES[name, item_bytes, other_bytes])
