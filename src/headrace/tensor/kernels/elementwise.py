"""The small fused operations of a block for the CPU: RMSNorm (+ residual), rotary, KV write, gated activation.

Each is one pass over memory by tokens; a worker takes a contiguous share of them. A token's result depends on that token alone.
All float arithmetic is float32, in the order of `reference`; only the norm's sum and exp differ from it in rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.tensor.kernels.launch import compile_kernel, float_bits, float_from_bits, helper, launch, thread_limit
from headrace.tensor.kernels.simd import as_bf16, as_f32, as_i64, at, copy, exp, load, store, sum_squares

Pointer = Any

ELEMENTS_PER_THREAD = 1 << 15
"""Elements worth a second thread."""

SILU, GELU_TANH = 0, 1
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}

ONE = np.float32(1.0)
GELU_SLOPE, GELU_CUBE = np.float32(2.0 * 0.7978845608028654), np.float32(0.044715)
"""gelu_tanh(x) = x / 2 (1 + tanh u) = x sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x**3)."""


def _workers(num_elements: int) -> int:
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
    out = torch.empty(x.shape, dtype=x.dtype)
    tokens, dim = x.shape[0], x.shape[-1]
    heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    added, added_stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    arguments = [x.data_ptr(), weight.data_ptr(), out.data_ptr(), added, tokens, heads, dim, x.stride(0), head_stride, added_stride]
    kind = "norm" if weight.dtype == x.dtype else "norm_f32"
    touched = (out, x, weight) if residual is None else (out, x, weight, residual)
    launch(_kernel(kind, x.element_size()), [*arguments, float_bits(eps)], _workers(x.numel()), *touched)
    return out


# --- rotary and KV write ---


@helper
def rotate_row(source: Pointer, target: Pointer, angles: Pointer, half: int) -> None:
    """target's pairs (d, d + half) become source's, turned. angles: half cosines, then half sines. source may be target."""
    for d in range(half):
        cos, sin, first, second = load(angles, d), load(angles, half + d), load(source, d), load(source, half + d)
        store(first * cos - second * sin, target, d)
        store(second * cos + first * sin, target, half + d)


@helper
def rotate_heads(a: Pointer, field: int, x: Pointer, token: int, angles: Pointer, half: int) -> None:
    """Turn one token's heads in place. a[field:]: token stride, head stride, heads."""
    for head in range(load(a, field + 2)):
        row = at(x, token * load(a, field) + head * load(a, field + 1))
        rotate_row(row, row, angles, half)


@helper
def rotate(a: Pointer, query: Pointer, key: Pointer, worker: int, workers: int) -> None:
    """Arguments in the order of `rotary`."""
    cos_sin, positions, half = as_f32(load(a, 2)), as_i64(load(a, 3)), load(a, 6)
    first, last = share(load(a, 4), worker, workers)
    for token in range(first, last):
        angles = at(cos_sin, load(positions, token) * load(a, 5))
        rotate_heads(a, 7, query, token, angles, half)
        rotate_heads(a, 10, key, token, angles, half)


@helper
def write_slots(a: Pointer, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int) -> None:
    """Arguments in the order of `scatter_kv`."""
    slots, heads, dim, block_size = as_i64(load(a, 3)), load(a, 5), load(a, 6), load(a, 7)
    first, last = share(load(a, 4), worker, workers)
    for token in range(first, last):
        slot = load(slots, token)
        if slot < 0:
            continue
        block = slot // block_size
        base = at(cache_, block * load(a, 8) + (slot - block * block_size) * load(a, 10))
        for head in range(heads):
            target = at(base, head * load(a, 11))
            copy(target, at(key, token * load(a, 12) + head * load(a, 13)), dim)
            copy(at(target, load(a, 9)), at(value, token * load(a, 14) + head * load(a, 15)), dim)


@helper
def turn_and_write(a: Pointer, query: Pointer, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int) -> None:
    """`write_slots` with the key turned on its way, and the query turned in place. Arguments in the order of `rotary_scatter`."""
    slots, heads, dim, block_size = as_i64(load(a, 3)), load(a, 5), load(a, 6), load(a, 7)
    cos_sin, positions, half = as_f32(load(a, 17)), as_i64(load(a, 18)), load(a, 20)
    first, last = share(load(a, 4), worker, workers)
    for token in range(first, last):
        angles = at(cos_sin, load(positions, token) * load(a, 19))
        rotate_heads(a, 21, query, token, angles, half)
        slot = load(slots, token)
        if slot < 0:
            continue
        block = slot // block_size
        base = at(cache_, block * load(a, 8) + (slot - block * block_size) * load(a, 10))
        for head in range(heads):
            target, source = at(base, head * load(a, 11)), at(key, token * load(a, 12) + head * load(a, 13))
            rotate_row(source, target, angles, half)
            copy(at(target, 2 * half), at(source, 2 * half), dim - 2 * half)
            copy(at(target, load(a, 9)), at(value, token * load(a, 14) + head * load(a, 15)), dim)


def _rotary_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    rotate(a, as_f32(load(a, 0)), as_f32(load(a, 1)), worker, workers)


def _rotary_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    rotate(a, as_bf16(load(a, 0)), as_bf16(load(a, 1)), worker, workers)


def _scatter_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    write_slots(a, as_f32(load(a, 0)), as_f32(load(a, 1)), as_f32(load(a, 2)), worker, workers)


def _scatter_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    write_slots(a, as_bf16(load(a, 0)), as_bf16(load(a, 1)), as_bf16(load(a, 2)), worker, workers)


def _rotary_scatter_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    turn_and_write(a, as_f32(load(a, 16)), as_f32(load(a, 0)), as_f32(load(a, 1)), as_f32(load(a, 2)), worker, workers)


def _rotary_scatter_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    turn_and_write(a, as_bf16(load(a, 16)), as_bf16(load(a, 0)), as_bf16(load(a, 1)), as_bf16(load(a, 2)), worker, workers)


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """See `Kernels.rotary`."""
    arguments = [query.data_ptr(), key.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(), query.shape[0], cos_sin.stride(0)]
    arguments += [cos_sin.shape[1] // 2, query.stride(0), query.stride(1), query.shape[1], key.stride(0), key.stride(1), key.shape[1]]
    launch(_kernel("rotary", query.element_size()), arguments, _workers(query.numel() + key.numel()), query, key, cos_sin, positions)


def _scatter_arguments(key: Tensor, value: Tensor, cache_: Tensor, slot_mapping: Tensor) -> list[int]:
    block, kind, slot, head, _ = cache_.stride()
    arguments = [key.data_ptr(), value.data_ptr(), cache_.data_ptr(), slot_mapping.data_ptr(), key.shape[0], key.shape[1], key.shape[2]]
    return [*arguments, cache_.shape[2], block, kind, slot, head, key.stride(0), key.stride(1), value.stride(0), value.stride(1)]


def scatter_kv(key: Tensor, value: Tensor, cache_: Tensor, slot_mapping: Tensor) -> None:
    """See `Kernels.scatter_kv`."""
    arguments = _scatter_arguments(key, value, cache_, slot_mapping)
    launch(_kernel("scatter", key.element_size()), arguments, _workers(2 * key.numel()), key, value, cache_, slot_mapping)


def rotary_scatter(
    query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache_: Tensor, slot_mapping: Tensor
) -> None:
    """See `Kernels.rotary_scatter`."""
    arguments = _scatter_arguments(key, value, cache_, slot_mapping)
    arguments += [query.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(), cos_sin.stride(0), cos_sin.shape[1] // 2]
    arguments += [query.stride(0), query.stride(1), query.shape[1]]
    touched = (query, key, value, cos_sin, positions, cache_, slot_mapping)
    launch(_kernel("rotary_scatter", key.element_size()), arguments, _workers(query.numel() + 2 * key.numel()), *touched)


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
    out = torch.empty((tokens, dim), dtype=gate_up.dtype)
    arguments = [gate_up.data_ptr(), out.data_ptr(), tokens, gate_up.stride(0), dim, ACTIVATIONS[activation]]
    workers = _workers(8 * out.numel())  # exp costs about eight plain elements
    launch(_kernel("gate", gate_up.element_size()), arguments, workers, out, gate_up)
    return out


_SOURCES: dict[tuple[str, int], Callable[[int, int, int], None]] = {
    ("norm", 4): _norm_f32,
    ("norm", 2): _norm_bf16,
    ("norm_f32", 2): _norm_bf16_f32,
    ("rotary", 4): _rotary_f32,
    ("rotary", 2): _rotary_bf16,
    ("scatter", 4): _scatter_f32,
    ("scatter", 2): _scatter_bf16,
    ("rotary_scatter", 4): _rotary_scatter_f32,
    ("rotary_scatter", 2): _rotary_scatter_bf16,
    ("gate", 4): _gate_f32,
    ("gate", 2): _gate_bf16,
}


@cache
def _kernel(name: str, item_bytes: int) -> int:
    return compile_kernel(_SOURCES[name, item_bytes])
