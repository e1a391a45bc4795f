"""Rotary embedding and the writing of keys and values into the paged cache, on the CPU.

A token's result depends on that token alone. The cache stores keys after rotation (`Kernels.scatter_kv`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.tensor.kernels.cpu.elementwise import share, workers_for
from headrace.tensor.kernels.cpu.integer.quantized import round_vector
from headrace.tensor.kernels.cpu.jit.launch import compile_kernel, helper, launch
from headrace.tensor.kernels.cpu.jit.scalars import as_bf16, as_f32, as_i8, as_i64, at, load, read_arguments, store

Pointer = Any


class RotaryArguments(NamedTuple):
    """Strides in elements. `half` is half of the rotated dims."""

    query: int
    query_token: int
    query_head: int
    query_heads: int
    key: int
    key_token: int
    key_head: int
    key_heads: int
    cos_sin: int
    cos_sin_row: int
    half: int
    positions: int
    tokens: int


class ScatterArguments(NamedTuple):
    """Strides in elements, by block, by key or value, by slot and by head; scales of a slot's heads are contiguous. scales  0: none."""

    key: int
    key_token: int
    key_head: int
    value: int
    value_token: int
    value_head: int
    slots: int
    tokens: int
    heads: int
    dim: int
    cache: int
    block_size: int
    cache_block: int
    cache_value: int
    cache_slot: int
    cache_head: int
    scales: int
    scale_block: int
    scale_value: int
    scale_slot: int


SCATTER_OFFSET_BYTES = 8 * len(RotaryArguments._fields)
"""Kernels that rotate and write take both: `ScatterArguments` stand behind `RotaryArguments`."""


# --- rotation ---


@helper
def rotate_row(source: Pointer, target: Pointer, angles: Pointer, half: int) -> None:
    """target's pairs (d, d + half) become source's, rotated. angles: half cosines, then half sines. source may be target."""
    for d in range(half):
        cos, sin, first, second = load(angles, d), load(angles, half + d), load(source, d), load(source, half + d)
        store(first * cos - second * sin, target, d)
        store(second * cos + first * sin, target, half + d)


@helper
def rotate_heads(x: Pointer, head_stride: int, heads: int, angles: Pointer, half: int) -> None:
    for head in range(heads):
        row = at(x, head * head_stride)
        rotate_row(row, row, angles, half)


@helper
def rotate_token(r: RotaryArguments, query: Pointer, key: Pointer, token: int) -> None:
    angles = at(as_f32(r.cos_sin), load(as_i64(r.positions), token) * r.cos_sin_row)
    rotate_heads(at(query, token * r.query_token), r.query_head, r.query_heads, angles, r.half)
    rotate_heads(at(key, token * r.key_token), r.key_head, r.key_heads, angles, r.half)


@helper
def rotate(r: RotaryArguments, query: Pointer, key: Pointer, worker: int, workers: int) -> None:
    first, last = share(r.tokens, worker, workers)
    for token in range(first, last):
        rotate_token(r, query, key, token)


# --- writing ---


@helper
def convert(source: Pointer, target: Pointer, dim: int) -> None:
    for d in range(dim):
        store(load(source, d), target, d)


@helper
def write_token(s: ScatterArguments, key: Pointer, value: Pointer, cache_: Pointer, token: int) -> None:
    """A token without a slot (< 0) is padding."""
    number = load(as_i64(s.slots), token)
    if number < 0:
        return
    block, slot = number // s.block_size, number % s.block_size
    for head in range(s.heads):
        target = at(cache_, block * s.cache_block + slot * s.cache_slot + head * s.cache_head)
        convert(at(key, token * s.key_token + head * s.key_head), target, s.dim)
        convert(at(value, token * s.value_token + head * s.value_head), at(target, s.cache_value), s.dim)


@helper
def round_token(s: ScatterArguments, key: Pointer, value: Pointer, cache_: Pointer, token: int) -> None:
    number = load(as_i64(s.slots), token)
    if number < 0:
        return
    block, slot = number // s.block_size, number % s.block_size
    scales = at(as_f32(s.scales), block * s.scale_block + slot * s.scale_slot)
    for head in range(s.heads):
        target = at(cache_, block * s.cache_block + slot * s.cache_slot + head * s.cache_head)
        store(round_vector(at(key, token * s.key_token + head * s.key_head), target, s.dim), scales, head)
        source = at(value, token * s.value_token + head * s.value_head)
        store(round_vector(source, at(target, s.cache_value), s.dim), at(scales, s.scale_value), head)


@helper
def write(s: ScatterArguments, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int) -> None:
    first, last = share(s.tokens, worker, workers)
    for token in range(first, last):
        write_token(s, key, value, cache_, token)


@helper
def round_and_write(s: ScatterArguments, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int) -> None:
    first, last = share(s.tokens, worker, workers)
    for token in range(first, last):
        round_token(s, key, value, cache_, token)


@helper
def rotate_and_write(
    r: RotaryArguments, s: ScatterArguments, query: Pointer, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int
) -> None:
    first, last = share(s.tokens, worker, workers)
    for token in range(first, last):
        rotate_token(r, query, key, token)
        write_token(s, key, value, cache_, token)


@helper
def rotate_round_and_write(
    r: RotaryArguments, s: ScatterArguments, query: Pointer, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int
) -> None:
    first, last = share(s.tokens, worker, workers)
    for token in range(first, last):
        rotate_token(r, query, key, token)
        round_token(s, key, value, cache_, token)


# --- kernels, by element type ---


def _rotary_f32(arguments: int, worker: int, workers: int) -> None:
    r: RotaryArguments = read_arguments(RotaryArguments, arguments)
    rotate(r, as_f32(r.query), as_f32(r.key), worker, workers)


def _rotary_bf16(arguments: int, worker: int, workers: int) -> None:
    r: RotaryArguments = read_arguments(RotaryArguments, arguments)
    rotate(r, as_bf16(r.query), as_bf16(r.key), worker, workers)


def _scatter_f32(arguments: int, worker: int, workers: int) -> None:
    s: ScatterArguments = read_arguments(ScatterArguments, arguments)
    write(s, as_f32(s.key), as_f32(s.value), as_f32(s.cache), worker, workers)


def _scatter_bf16(arguments: int, worker: int, workers: int) -> None:
    s: ScatterArguments = read_arguments(ScatterArguments, arguments)
    write(s, as_bf16(s.key), as_bf16(s.value), as_bf16(s.cache), worker, workers)


def _scatter_f32_bf16(arguments: int, worker: int, workers: int) -> None:
    s: ScatterArguments = read_arguments(ScatterArguments, arguments)
    write(s, as_f32(s.key), as_f32(s.value), as_bf16(s.cache), worker, workers)


def _scatter_f32_int8(arguments: int, worker: int, workers: int) -> None:
    s: ScatterArguments = read_arguments(ScatterArguments, arguments)
    round_and_write(s, as_f32(s.key), as_f32(s.value), as_i8(s.cache), worker, workers)


def _scatter_bf16_int8(arguments: int, worker: int, workers: int) -> None:
    s: ScatterArguments = read_arguments(ScatterArguments, arguments)
    round_and_write(s, as_bf16(s.key), as_bf16(s.value), as_i8(s.cache), worker, workers)


def _rotary_scatter_f32(arguments: int, worker: int, workers: int) -> None:
    r: RotaryArguments = read_arguments(RotaryArguments, arguments)
    s: ScatterArguments = read_arguments(ScatterArguments, arguments + SCATTER_OFFSET_BYTES)
    rotate_and_write(r, s, as_f32(r.query), as_f32(s.key), as_f32(s.value), as_f32(s.cache), worker, workers)


def _rotary_scatter_bf16(arguments: int, worker: int, workers: int) -> None:
    r: RotaryArguments = read_arguments(RotaryArguments, arguments)
    s: ScatterArguments = read_arguments(ScatterArguments, arguments + SCATTER_OFFSET_BYTES)
    rotate_and_write(r, s, as_bf16(r.query), as_bf16(s.key), as_bf16(s.value), as_bf16(s.cache), worker, workers)


def _rotary_scatter_f32_bf16(arguments: int, worker: int, workers: int) -> None:
    r: RotaryArguments = read_arguments(RotaryArguments, arguments)
    s: ScatterArguments = read_arguments(ScatterArguments, arguments + SCATTER_OFFSET_BYTES)
    rotate_and_write(r, s, as_f32(r.query), as_f32(s.key), as_f32(s.value), as_bf16(s.cache), worker, workers)


def _rotary_scatter_f32_int8(arguments: int, worker: int, workers: int) -> None:
    r: RotaryArguments = read_arguments(RotaryArguments, arguments)
    s: ScatterArguments = read_arguments(ScatterArguments, arguments + SCATTER_OFFSET_BYTES)
    rotate_round_and_write(r, s, as_f32(r.query), as_f32(s.key), as_f32(s.value), as_i8(s.cache), worker, workers)


def _rotary_scatter_bf16_int8(arguments: int, worker: int, workers: int) -> None:
    r: RotaryArguments = read_arguments(RotaryArguments, arguments)
    s: ScatterArguments = read_arguments(ScatterArguments, arguments + SCATTER_OFFSET_BYTES)
    rotate_round_and_write(r, s, as_bf16(r.query), as_bf16(s.key), as_bf16(s.value), as_i8(s.cache), worker, workers)


_F32, _BF16, _INT8 = torch.float32, torch.bfloat16, torch.int8
_SOURCES: dict[tuple[str, torch.dtype, torch.dtype], Callable[[int, int, int], None]] = {
    ("rotary", _F32, _F32): _rotary_f32,
    ("rotary", _BF16, _BF16): _rotary_bf16,
    ("scatter", _F32, _F32): _scatter_f32,
    ("scatter", _BF16, _BF16): _scatter_bf16,
    ("scatter", _F32, _BF16): _scatter_f32_bf16,
    ("scatter", _F32, _INT8): _scatter_f32_int8,
    ("scatter", _BF16, _INT8): _scatter_bf16_int8,
    ("rotary_scatter", _F32, _F32): _rotary_scatter_f32,
    ("rotary_scatter", _BF16, _BF16): _rotary_scatter_bf16,
    ("rotary_scatter", _F32, _BF16): _rotary_scatter_f32_bf16,
    ("rotary_scatter", _F32, _INT8): _rotary_scatter_f32_int8,
    ("rotary_scatter", _BF16, _INT8): _rotary_scatter_bf16_int8,
}


@cache
def _kernel(name: str, key_dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
    return compile_kernel(_SOURCES[name, key_dtype, cache_dtype])


# --- launches ---


def rotary_arguments(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> RotaryArguments:
    return RotaryArguments(
        query=query.data_ptr(),
        query_token=query.stride(0),
        query_head=query.stride(1),
        query_heads=query.shape[1],
        key=key.data_ptr(),
        key_token=key.stride(0),
        key_head=key.stride(1),
        key_heads=key.shape[1],
        cos_sin=cos_sin.data_ptr(),
        cos_sin_row=cos_sin.stride(0),
        half=cos_sin.shape[1] // 2,
        positions=positions.data_ptr(),
        tokens=query.shape[0],
    )


def scatter_arguments(key: Tensor, value: Tensor, cache_: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> ScatterArguments:
    cache_block, cache_value, cache_slot, cache_head, _ = cache_.stride()
    scale_block, scale_value, scale_slot, _ = (0, 0, 0, 0) if kv_scales is None else kv_scales.stride()
    return ScatterArguments(
        key=key.data_ptr(),
        key_token=key.stride(0),
        key_head=key.stride(1),
        value=value.data_ptr(),
        value_token=value.stride(0),
        value_head=value.stride(1),
        slots=slot_mapping.data_ptr(),
        tokens=key.shape[0],
        heads=key.shape[1],
        dim=key.shape[2],
        cache=cache_.data_ptr(),
        block_size=cache_.shape[2],
        cache_block=cache_block,
        cache_value=cache_value,
        cache_slot=cache_slot,
        cache_head=cache_head,
        scales=0 if kv_scales is None else kv_scales.data_ptr(),
        scale_block=scale_block,
        scale_value=scale_value,
        scale_slot=scale_slot,
    )


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    workers, arguments = workers_for(query.numel() + key.numel()), rotary_arguments(query, key, cos_sin, positions)
    launch(_kernel("rotary", query.dtype, key.dtype), arguments, workers, query, key, cos_sin, positions)


def scatter_kv(key: Tensor, value: Tensor, cache_: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> None:
    arguments = scatter_arguments(key, value, cache_, slot_mapping, kv_scales)
    scales = () if kv_scales is None else (kv_scales,)
    kernel = _kernel("scatter", key.dtype, cache_.dtype)
    launch(kernel, arguments, workers_for(2 * key.numel()), key, value, cache_, slot_mapping, *scales)


def rotary_scatter(
    query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache_: Tensor, slot_mapping: Tensor,
    kv_scales: Tensor | None,
) -> None:  # fmt: skip
    rotated = rotary_arguments(query, key, cos_sin, positions)
    arguments = (*rotated, *scatter_arguments(key, value, cache_, slot_mapping, kv_scales))
    touched = (query, key, value, cos_sin, positions, cache_, slot_mapping, *(() if kv_scales is None else (kv_scales,)))
    workers = workers_for(query.numel() + 2 * key.numel())
    launch(_kernel("rotary_scatter", key.dtype, cache_.dtype), arguments, workers, *touched)
