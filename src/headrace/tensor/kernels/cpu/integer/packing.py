"""Rounds weights to small integers, equal to `rounding.round_weight` to the bit, and packs them into the strips that `quantized`
multiplies.

Weights whose width is no multiple of a register, or that are not in this machine's memory, are rounded by `rounding.round_weight` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from headrace.tensor.host import pages
from headrace.tensor.kernels import rounding
from headrace.tensor.kernels.cpu.integer.simd import BYTE_OFFSET, NIBBLE_OFFSET, STRIP, STRIP_COLUMNS, WORDS
from headrace.tensor.kernels.cpu.jit.launch import compile_kernel, helper, launch, thread_limit, with_counter
from headrace.tensor.kernels.cpu.jit.scalars import as_bf16, as_f32, as_i8, as_i32, as_i64, at, load, read_arguments, store, take_ticket
from headrace.tensor.kernels.cpu.jit.vector_ir import (
    I8,
    I64,
    LANES,
    VECTOR,
    Emit,
    call_llvm,
    constant,
    fma,
    fold_lanes,
    gep,
    larger,
    load_floats,
    splat,
)
from headrace.tensor.kernels.cpu.launch_list import run_pending
from headrace.tensor.kernels.cpu.packing import item_row, shuffled, store_square
from headrace.tensor.kernels.rounding import DEFAULT_GROUP, Precision, RoundedWeight

Pointer = Any

WORK_PER_THREAD = 1 << 17
BYTE_OFFSETS, NIBBLE_OFFSETS, NIBBLES = BYTE_OFFSET * 0x01010101, NIBBLE_OFFSET * 0x01010101, 0x0F0F0F0F
"""A signed number with its sign bit flipped is that number plus the offset."""
ZERO, ONE = np.float32(0.0), np.float32(1.0)
MOST_BYTE, LEAST_NIBBLE, MOST_NIBBLE = np.float32(127.0), np.float32(-8.0), np.float32(7.0)


# --- rounding ---


class RoundingArguments(NamedTuple):
    """All are contiguous; group  0 for int8."""

    weight: int
    values: int
    scales: int
    rows: int
    inputs: int
    group: int


def round_weight(weight: Tensor, precision: Precision, *, group: int = DEFAULT_GROUP) -> RoundedWeight:
    rows, inputs = weight.shape
    fits = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and weight.numel() > 0
    if not fits or inputs % LANES or precision is Precision.NONE:
        return rounding.round_weight(weight, precision, group=group)
    group = rounding.group_for(inputs, group) if precision is Precision.INT4 else 0
    weight = weight.contiguous()
    values = pages.empty(weight.numel(), torch.int8).view(rows, inputs)
    scales = torch.empty((rows, inputs // group) if group else rows, dtype=torch.bfloat16 if group else torch.float32)
    arguments = RoundingArguments(
        weight=weight.data_ptr(), values=values.data_ptr(), scales=scales.data_ptr(), rows=rows, inputs=inputs, group=group
    )
    kernel = _rounding_kernel(Precision.INT4 if group else Precision.INT8, weight.dtype)
    launch(kernel, arguments, _workers(weight.numel()), values, weight, scales)
    run_pending()
    return RoundedWeight(values, scales, group)


def _workers(num_weights: int) -> int:
    return max(1, min(thread_limit(), num_weights // WORK_PER_THREAD))


@intrinsic
def extremes(_: Any, pointer: Any, length: Any) -> tuple[Any, Emit]:
    """(smallest, largest) of `length` floats, a multiple of LANES, and 0, or NaN when one of them is NaN or infinite."""
    result = types.UniTuple(types.float32, 3)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        start, count = arguments
        least, most, poison = (cgutils.alloca_once(builder, VECTOR) for _ in range(3))
        first = load_floats(builder, start, pointer.dtype, VECTOR)
        for slot, value in ((least, first), (most, first), (poison, constant(VECTOR, 0.0))):
            builder.store(value, slot)
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as loop:
            value = load_floats(builder, gep(builder, start, builder.mul(loop.index, I64(LANES))), pointer.dtype, VECTOR)
            builder.store(_smaller(builder, value, builder.load(least)), least)
            builder.store(larger(builder, value, builder.load(most)), most)
            builder.store(fma(builder, value, constant(VECTOR, 0.0), builder.load(poison)), poison)
        low = fold_lanes(builder, builder.load(least), lambda a, b: _smaller(builder, a, b))
        high = fold_lanes(builder, builder.load(most), lambda a, b: larger(builder, a, b))
        return context.make_tuple(builder, result, (low, high, fold_lanes(builder, builder.load(poison), builder.fadd)))

    return result(pointer, types.intp), emit


def _smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@intrinsic
def divide(_: Any, target: Any, source: Any, length: Any, divisor: Any, least: Any, most: Any) -> tuple[Any, Emit]:
    """target[i] = round(source[i] / divisor), ties to even, within least..most. int8 from floats; length a multiple of LANES."""
    stored = ir.VectorType(I8, LANES)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        target_at, source_at, count = arguments[:3]
        divisors, lows, highs = (splat(builder, value) for value in arguments[3:])
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as loop:
            first = builder.mul(loop.index, I64(LANES))
            value = builder.fdiv(load_floats(builder, gep(builder, source_at, first), source.dtype, VECTOR), divisors)
            value = call_llvm(builder, "llvm.minnum", call_llvm(builder, "llvm.maxnum", value, lows), highs)
            whole = builder.fptosi(call_llvm(builder, "llvm.rint", value), WORDS)
            builder.store(builder.trunc(whole, stored), builder.bitcast(gep(builder, target_at, first), stored.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(target, source, types.intp, types.float32, types.float32, types.float32), emit


@helper
def round_bytes(weight: Pointer, values: Pointer, scales: Pointer, rows: int, inputs: int, worker: int, workers: int) -> None:
    for row in range(worker, rows, workers):
        source = at(weight, row * inputs)
        low, high, poison = extremes(source, inputs)
        scale = (max(high, -low) + poison) / MOST_BYTE
        store(scale, scales, row)
        divide(at(values, row * inputs), source, inputs, scale if scale != ZERO else ONE, -MOST_BYTE, MOST_BYTE)


@helper
def farthest(source: Pointer, length: int) -> float:
    low, high, poison = extremes(source, length)
    value: float = high if high > -low else low
    if high == -low:
        index = 0
        while index + 1 < length and abs(load(source, index)) != high:
            index += 1
        value = load(source, index)
    return value + poison  # type: ignore[no-any-return]


@helper
def round_nibbles(weight: Pointer, values: Pointer, scales: Pointer, rows: int, inputs: int, group: int, worker: int, workers: int) -> None:
    for row in range(worker, rows, workers):
        for first in range(row * inputs, (row + 1) * inputs, group):
            source = at(weight, first)
            store(farthest(source, group) / LEAST_NIBBLE, scales, first // group)
            scale = load(scales, first // group)  # as it was rounded
            divide(at(values, first), source, group, scale if scale != ZERO else ONE, LEAST_NIBBLE, MOST_NIBBLE)


def _round_bytes_f32(arguments: int, worker: int, workers: int) -> None:
    a: RoundingArguments = read_arguments(RoundingArguments, arguments)
    round_bytes(as_f32(a.weight), as_i8(a.values), as_f32(a.scales), a.rows, a.inputs, worker, workers)


def _round_bytes_bf16(arguments: int, worker: int, workers: int) -> None:
    a: RoundingArguments = read_arguments(RoundingArguments, arguments)
    round_bytes(as_bf16(a.weight), as_i8(a.values), as_f32(a.scales), a.rows, a.inputs, worker, workers)


def _round_nibbles_f32(arguments: int, worker: int, workers: int) -> None:
    a: RoundingArguments = read_arguments(RoundingArguments, arguments)
    round_nibbles(as_f32(a.weight), as_i8(a.values), as_bf16(a.scales), a.rows, a.inputs, a.group, worker, workers)


def _round_nibbles_bf16(arguments: int, worker: int, workers: int) -> None:
    a: RoundingArguments = read_arguments(RoundingArguments, arguments)
    round_nibbles(as_bf16(a.weight), as_i8(a.values), as_bf16(a.scales), a.rows, a.inputs, a.group, worker, workers)


_ROUNDING: dict[tuple[Precision, torch.dtype], Callable[[int, int, int], None]] = {
    (Precision.INT8, torch.float32): _round_bytes_f32,
    (Precision.INT8, torch.bfloat16): _round_bytes_bf16,
    (Precision.INT4, torch.float32): _round_nibbles_f32,
    (Precision.INT4, torch.bfloat16): _round_nibbles_bf16,
}


@cache
def _rounding_kernel(precision: Precision, dtype: torch.dtype) -> int:
    return compile_kernel(_ROUNDING[precision, dtype])


# --- packing ---


class PackingArguments(NamedTuple):
    """items: words in a row of the result."""

    source: int
    target: int
    rows: int
    items: int
    counter: int


def pack_bytes(values: Tensor) -> Tensor:
    """int8 [out, in] -> int32 [strips, in / 4, STRIP, LANES], the bytes of a word being value + 128 of four inputs."""
    return _packed(values, 4)


def pack_nibbles(values: Tensor) -> Tensor:
    """int8 within -8..7 [out, in] -> int32 [strips, in / 8, STRIP, LANES]: value + 8, inputs 0..3 in the low nibbles, 4..7 in the high."""
    return _packed(values, 8)


def _packed(values: Tensor, per_word: int) -> Tensor:
    rows, inputs = values.shape
    values = values.contiguous()
    strips, items = -(-rows // STRIP_COLUMNS), inputs // per_word
    target = pages.empty(strips * items * STRIP_COLUMNS, torch.int32)
    arguments = PackingArguments(source=values.data_ptr(), target=target.data_ptr(), rows=rows, items=items, counter=0)
    launch(_packing_kernels()[per_word == 8], with_counter(arguments), _workers(values.numel()), target, values)
    run_pending()
    return target.view(strips, items, STRIP, LANES)


@intrinsic
def byte_square(_: Any, source: Any, stride: Any, target: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rows = [item_row(builder, arguments[0], arguments[1], row, 0) for row in range(LANES)]
        store_square(builder, [builder.xor(row, constant(WORDS, BYTE_OFFSETS)) for row in rows], arguments[2], STRIP_COLUMNS)
        return context.get_dummy_value()

    return types.void(source, types.intp, target), emit


@intrinsic
def nibble_square(_: Any, source: Any, stride: Any, target: Any) -> tuple[Any, Emit]:
    """Two neighbours become the nibbles of one word."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rows = []
        for row in range(LANES):
            left, right = (item_row(builder, arguments[0], arguments[1], row, first) for first in (0, LANES))
            halves = [
                builder.and_(builder.xor(shuffled(builder, left, right, range(start, 2 * LANES, 2)), constant(WORDS, NIBBLE_OFFSETS)),
                             constant(WORDS, NIBBLES))
                for start in (0, 1)
            ]  # fmt: skip
            rows.append(builder.or_(halves[0], builder.shl(halves[1], constant(WORDS, 4))))
        store_square(builder, rows, arguments[2], STRIP_COLUMNS)
        return context.get_dummy_value()

    return types.void(source, types.intp, target), emit


@helper
def byte_strip(source: Pointer, count: int, target: Pointer, items: int) -> None:
    for left in range(0, STRIP_COLUMNS, LANES):
        whole = items // LANES * LANES if left + LANES <= count else 0
        for item in range(0, whole, LANES):
            byte_square(at(source, left * items + item), items, at(target, item * STRIP_COLUMNS + left))
        for column in range(left, left + LANES):
            for item in range(whole, items):
                word = load(source, column * items + item) if column < count else 0
                store(word ^ BYTE_OFFSETS, target, item * STRIP_COLUMNS + column)


@helper
def nibble_strip(source: Pointer, count: int, target: Pointer, items: int) -> None:
    for left in range(0, STRIP_COLUMNS, LANES):
        whole = items // LANES * LANES if left + LANES <= count else 0
        for item in range(0, whole, LANES):
            nibble_square(at(source, 2 * (left * items + item)), 2 * items, at(target, item * STRIP_COLUMNS + left))
        for column in range(left, left + LANES):
            for item in range(whole, items):
                place = 2 * (column * items + item)
                low, high = (load(source, place), load(source, place + 1)) if column < count else (0, 0)
                word = (low ^ NIBBLE_OFFSETS) & NIBBLES | ((high ^ NIBBLE_OFFSETS) & NIBBLES) << 4
                store(word, target, item * STRIP_COLUMNS + column)


def _pack_bytes(arguments: int, worker: int, workers: int) -> None:
    a: PackingArguments = read_arguments(PackingArguments, arguments)
    source, target, counter = as_i32(a.source), as_i32(a.target), as_i64(a.counter)
    first = take_ticket(counter) * STRIP_COLUMNS
    while first < a.rows:
        byte_strip(at(source, first * a.items), min(STRIP_COLUMNS, a.rows - first), at(target, first * a.items), a.items)
        first = take_ticket(counter) * STRIP_COLUMNS


def _pack_nibbles(arguments: int, worker: int, workers: int) -> None:
    a: PackingArguments = read_arguments(PackingArguments, arguments)
    source, target, counter = as_i32(a.source), as_i32(a.target), as_i64(a.counter)
    first = take_ticket(counter) * STRIP_COLUMNS
    while first < a.rows:
        nibble_strip(at(source, 2 * first * a.items), min(STRIP_COLUMNS, a.rows - first), at(target, first * a.items), a.items)
        first = take_ticket(counter) * STRIP_COLUMNS


@cache
def _packing_kernels() -> tuple[int, int]:
    return compile_kernel(_pack_bytes), compile_kernel(_pack_nibbles)
