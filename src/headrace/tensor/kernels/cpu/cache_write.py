"""Rotary embedding and the writing of keys and values into the paged cache, for the CPU.

One pass over the step's tokens; a worker takes a contiguous share of them, and a token's result depends on that token alone. What a cache
stores is the key after rotation: in its own float type, or as int8 with one scale per vector (`Kernels.scatter_kv`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from headrace.tensor.kernels.cpu.elementwise import share, workers_for
from headrace.tensor.kernels.cpu.integer.quantized import round_vector
from headrace.tensor.kernels.cpu.jit.launch import compile_kernel, helper, launch
from headrace.tensor.kernels.cpu.jit.simd import as_bf16, as_f32, as_i8, as_i64, at, load, store

Pointer = Any


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


class Slots(NamedTuple):
    """A layer's cache and, for int8, its scales. Strides in elements; heads of `scales` lie side by side."""

    cache: Pointer
    block_size: int
    block: int
    value: int
    slot: int
    head: int
    scales: Pointer
    scale_block: int
    scale_value: int
    scale_slot: int


@helper
def read_slots(a: Pointer, cache_: Pointer) -> Slots:
    """From a kernel's arguments, in the order of `scatter_kv`."""
    scales = as_f32(load(a, 16))
    return Slots(cache_, load(a, 7), load(a, 8), load(a, 9), load(a, 10), load(a, 11), scales, load(a, 17), load(a, 18), load(a, 19))


@helper
def convert(source: Pointer, target: Pointer, dim: int) -> None:
    for d in range(dim):
        store(load(source, d), target, d)


@helper
def write_heads(a: Pointer, s: Slots, key: Pointer, value: Pointer, token: int, slot: int) -> None:
    """One token's keys and values into its slot, as they are or in the cache's own float type."""
    block = slot // s.block_size
    base = at(s.cache, block * s.block + (slot - block * s.block_size) * s.slot)
    for head in range(load(a, 5)):
        target = at(base, head * s.head)
        convert(at(key, token * load(a, 12) + head * load(a, 13)), target, load(a, 6))
        convert(at(value, token * load(a, 14) + head * load(a, 15)), at(target, s.value), load(a, 6))


@helper
def round_heads(a: Pointer, s: Slots, key: Pointer, value: Pointer, token: int, slot: int) -> None:
    """`write_heads` for a cache of int8: each vector rounded by its own scale."""
    block = slot // s.block_size
    base = at(s.cache, block * s.block + (slot - block * s.block_size) * s.slot)
    scales = at(s.scales, block * s.scale_block + (slot - block * s.block_size) * s.scale_slot)
    for head in range(load(a, 5)):
        target = at(base, head * s.head)
        store(round_vector(at(key, token * load(a, 12) + head * load(a, 13)), target, load(a, 6)), scales, head)
        place = at(value, token * load(a, 14) + head * load(a, 15))
        store(round_vector(place, at(target, s.value), load(a, 6)), at(scales, s.scale_value), head)


@helper
def write_slots(a: Pointer, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int) -> None:
    """Arguments in the order of `scatter_kv`."""
    s, slots = read_slots(a, cache_), as_i64(load(a, 3))
    first, last = share(load(a, 4), worker, workers)
    for token in range(first, last):
        if load(slots, token) >= 0:
            write_heads(a, s, key, value, token, load(slots, token))


@helper
def round_slots(a: Pointer, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int) -> None:
    s, slots = read_slots(a, cache_), as_i64(load(a, 3))
    first, last = share(load(a, 4), worker, workers)
    for token in range(first, last):
        if load(slots, token) >= 0:
            round_heads(a, s, key, value, token, load(slots, token))


@helper
def rotate_token(a: Pointer, query: Pointer, key: Pointer, token: int) -> None:
    """Turn one token's query and key in place. Arguments in the order of `rotary_scatter`."""
    angles, half = at(as_f32(load(a, 21)), load(as_i64(load(a, 22)), token) * load(a, 23)), load(a, 24)
    rotate_heads(a, 25, query, token, angles, half)
    for head in range(load(a, 5)):
        row = at(key, token * load(a, 12) + head * load(a, 13))
        rotate_row(row, row, angles, half)


@helper
def rotate_and_write(a: Pointer, query: Pointer, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int) -> None:
    s, slots = read_slots(a, cache_), as_i64(load(a, 3))
    first, last = share(load(a, 4), worker, workers)
    for token in range(first, last):
        rotate_token(a, query, key, token)
        if load(slots, token) >= 0:
            write_heads(a, s, key, value, token, load(slots, token))


@helper
def rotate_and_round(a: Pointer, query: Pointer, key: Pointer, value: Pointer, cache_: Pointer, worker: int, workers: int) -> None:
    s, slots = read_slots(a, cache_), as_i64(load(a, 3))
    first, last = share(load(a, 4), worker, workers)
    for token in range(first, last):
        rotate_token(a, query, key, token)
        if load(slots, token) >= 0:
            round_heads(a, s, key, value, token, load(slots, token))


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


def _scatter_f32_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    write_slots(a, as_f32(load(a, 0)), as_f32(load(a, 1)), as_bf16(load(a, 2)), worker, workers)


def _scatter_f32_int8(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    round_slots(a, as_f32(load(a, 0)), as_f32(load(a, 1)), as_i8(load(a, 2)), worker, workers)


def _scatter_bf16_int8(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    round_slots(a, as_bf16(load(a, 0)), as_bf16(load(a, 1)), as_i8(load(a, 2)), worker, workers)


def _rotary_scatter_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    rotate_and_write(a, as_f32(load(a, 20)), as_f32(load(a, 0)), as_f32(load(a, 1)), as_f32(load(a, 2)), worker, workers)


def _rotary_scatter_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    rotate_and_write(a, as_bf16(load(a, 20)), as_bf16(load(a, 0)), as_bf16(load(a, 1)), as_bf16(load(a, 2)), worker, workers)


def _rotary_scatter_f32_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    rotate_and_write(a, as_f32(load(a, 20)), as_f32(load(a, 0)), as_f32(load(a, 1)), as_bf16(load(a, 2)), worker, workers)


def _rotary_scatter_f32_int8(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    rotate_and_round(a, as_f32(load(a, 20)), as_f32(load(a, 0)), as_f32(load(a, 1)), as_i8(load(a, 2)), worker, workers)


def _rotary_scatter_bf16_int8(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    rotate_and_round(a, as_bf16(load(a, 20)), as_bf16(load(a, 0)), as_bf16(load(a, 1)), as_i8(load(a, 2)), worker, workers)


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """See `Kernels.rotary`."""
    arguments = [query.data_ptr(), key.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(), query.shape[0], cos_sin.stride(0)]
    arguments += [cos_sin.shape[1] // 2, query.stride(0), query.stride(1), query.shape[1], key.stride(0), key.stride(1), key.shape[1]]
    launch(
        _kernel("rotary", query.element_size(), key.element_size()),
        arguments,
        workers_for(query.numel() + key.numel()),
        query,
        key,
        cos_sin,
        positions,
    )


def _scatter_arguments(key: Tensor, value: Tensor, cache_: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> list[int]:
    block, kind, slot, head, _ = cache_.stride()
    arguments = [key.data_ptr(), value.data_ptr(), cache_.data_ptr(), slot_mapping.data_ptr(), key.shape[0], key.shape[1], key.shape[2]]
    arguments += [cache_.shape[2], block, kind, slot, head, key.stride(0), key.stride(1), value.stride(0), value.stride(1)]
    return [*arguments, *scale_arguments(kv_scales)]


def scale_arguments(kv_scales: Tensor | None) -> list[int]:
    """Address of the scales of an int8 cache, 0 where there are none, and their strides by block, value and slot."""
    return [0, 0, 0, 0] if kv_scales is None else [kv_scales.data_ptr(), *kv_scales.stride()[:3]]


def scatter_kv(key: Tensor, value: Tensor, cache_: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> None:
    """See `Kernels.scatter_kv`."""
    arguments = _scatter_arguments(key, value, cache_, slot_mapping, kv_scales)
    touched = (key, value, cache_, slot_mapping) if kv_scales is None else (key, value, cache_, slot_mapping, kv_scales)
    launch(_kernel("scatter", key.element_size(), cache_.element_size()), arguments, workers_for(2 * key.numel()), *touched)


def rotary_scatter(
    query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache_: Tensor, slot_mapping: Tensor,
    kv_scales: Tensor | None,
) -> None:  # fmt: skip
    """See `Kernels.rotary_scatter`."""
    arguments = _scatter_arguments(key, value, cache_, slot_mapping, kv_scales)
    arguments += [query.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(), cos_sin.stride(0), cos_sin.shape[1] // 2]
    arguments += [query.stride(0), query.stride(1), query.shape[1]]
    scales = () if kv_scales is None else (kv_scales,)
    kernel = _kernel("rotary_scatter", key.element_size(), cache_.element_size())
    launch(
        kernel,
        arguments,
        workers_for(query.numel() + 2 * key.numel()),
        query,
        key,
        value,
        cos_sin,
        positions,
        cache_,
        slot_mapping,
        *scales,
    )


_SOURCES: dict[tuple[str, int, int], Callable[[int, int, int], None]] = {
    ("rotary", 4, 4): _rotary_f32,
    ("rotary", 2, 2): _rotary_bf16,
    ("scatter", 4, 4): _scatter_f32,
    ("scatter", 2, 2): _scatter_bf16,
    ("scatter", 4, 2): _scatter_f32_bf16,
    ("scatter", 4, 1): _scatter_f32_int8,
    ("scatter", 2, 1): _scatter_bf16_int8,
    ("rotary_scatter", 4, 4): _rotary_scatter_f32,
    ("rotary_scatter", 2, 2): _rotary_scatter_bf16,
    ("rotary_scatter", 4, 2): _rotary_scatter_f32_bf16,
    ("rotary_scatter", 4, 1): _rotary_scatter_f32_int8,
    ("rotary_scatter", 2, 1): _rotary_scatter_bf16_int8,
}
"""By name, bytes of an element of the key and of the cache."""


@cache
def _kernel(name: str, item_bytes: int, other_bytes: int) -> int:
    return compile_kernel(_SOURCES[name, item_bytes, other_bytes])
