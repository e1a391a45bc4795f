"""Vector code as Numba intrinsics: the inner loops whose arithmetic must be fast *and* fixed.

Numba's auto-vectoriser picks a reduction order per loop and per CPU. Here every order is written down, so a dot product has the same bits
for one row as for one of 32 rows. No bounds are checked. `vector_ir` emits the instructions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.tensor.kernels.cpu.jit.vector_ir import (
    F32,
    FIRST_LEVEL,
    I32,
    I64,
    LANES,
    PANEL_ROWS,
    STORED,
    STREAM_LEVEL,
    STRIP_COLUMNS,
    STRIP_VECTORS,
    VECTOR,
    Emit,
    constant,
    dot_pairs,
    fma,
    fold_lanes,
    for_case,
    gep,
    load_floats,
    part_of,
    prefetch_line,
    rounded_bits,
    shaped,
    splat,
    store_floats,
    transpose,
    widened,
)

AHEAD = 24 if STREAM_LEVEL == FIRST_LEVEL else 64
"""Iterations by which weights are prefetched: the processor's own prefetching stops at every page (docs/experiments.md)."""

ROW_STRIPS = 4
"""A single row takes several strips at once: several streams of weights keep more cache lines in flight than one."""

SEVERAL_STRIPS = 0
"""Stands for one row and ROW_STRIPS strips where `panel_block` chooses by the number of rows."""

# --- blocks: rows of float32 against strips of STRIP_COLUMNS columns ---

_WORDS = ir.VectorType(I32, LANES)


def _row_items(builder: ir.IRBuilder, source: ir.Value, index: ir.Value, like: ir.Type, element: types.Type) -> ir.Value:
    if element == types.float32:
        return load_floats(builder, gep(builder, source, index), types.float32, shaped(like, F32))
    first = gep(builder, source, builder.mul(index, I64(2)))
    if not isinstance(like, ir.VectorType):
        low, high = (load_floats(builder, gep(builder, first, i), types.float32, F32) for i in range(2))
    else:
        here, there = (load_floats(builder, gep(builder, first, i * LANES), types.float32, VECTOR) for i in range(2))
        low, high = (
            builder.shuffle_vector(here, there, ir.Constant(_WORDS, list(range(start, 2 * LANES, 2)))) for start in range(2)
        )  # fmt: skip
    low, high = rounded_bits(builder, low), rounded_bits(builder, high)
    return builder.or_(low, builder.shl(high, constant(like, 16)))


@intrinsic
def pack_rows(_: Any, panel: Any, source: Any, items: Any, stride: Any, rows: Any) -> tuple[Any, Emit]:
    """panel[i * rows + r] = item i < items of source + r * stride, for r < rows: a panel as `panel_block` reads it.

    source float32. An item is a float32, or where panel is int32 a word of two neighbours rounded to bfloat16, the first in its low half.
    rows: one of PANEL_ROWS.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        def emit_panel(size: int) -> None:
            _pack_panel(builder, arguments[0], arguments[1], arguments[2], arguments[3], size, panel.dtype)

        for_case(builder, arguments[4], {size: functools.partial(emit_panel, size) for size in PANEL_ROWS})
        return context.get_dummy_value()

    return types.void(panel, source, types.intp, types.intp, types.intp), emit


def _pack_panel(
    builder: ir.IRBuilder, panel: ir.Value, source: ir.Value, items: ir.Value, stride: ir.Value, rows: int, element: types.Type
) -> None:  # fmt: skip
    starts = [gep(builder, source, builder.mul(stride, I64(r))) for r in range(rows)]
    whole = builder.and_(items, I64(-LANES))
    with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), intp=I64) as (first, _):
        columns = [_row_items(builder, start, first, _WORDS, element) for start in starts]
        if rows > 1:
            missing = ir.Constant(columns[0].type, ir.Undefined)
            transposed = transpose(builder, columns + [missing] * (LANES - rows))
            columns = [part_of(builder, vector, 0, rows) for vector in transposed]
        for d, vector in enumerate(columns):
            where = gep(builder, panel, builder.mul(builder.add(first, I64(d)), I64(rows)))
            builder.store(vector, builder.bitcast(where, vector.type.as_pointer()), align=4)
    with cgutils.for_range_slice(builder, whole, items, I64(1), intp=I64) as (item, _):
        for r, start in enumerate(starts):
            value = _row_items(builder, start, item, I32, element)
            builder.store(value, gep(builder, panel, builder.add(builder.mul(item, I64(rows)), I64(r))))


def _skipped(builder: ir.IRBuilder, index: ir.Value, count: ir.Value, strip_step: ir.Value, num_strips: int) -> ir.Value:
    """Elements to add to a prefetch address beyond the end of its piece: where `num_strips` are read at the same time, the first unread
    piece begins num_strips - 1 pieces later."""
    near_end = builder.icmp_signed(">=", builder.add(index, I64(AHEAD)), count)
    return builder.select(near_end, builder.mul(strip_step, I64(num_strips - 1)), I64(0))


class PanelOperands(NamedTuple):
    out: ir.Value
    out_stride: ir.Value
    x: ir.Value
    weights: ir.Value
    strip_stride: ir.Value
    length: ir.Value
    start: ir.Value
    start_stride: ir.Value


@intrinsic(prefer_literal=True)
def panel_block(
    _: Any, out: Any, out_stride: Any, x: Any, weights: Any, strip_stride: Any, length: Any, start: Any, start_stride: Any, rows: Any,
    strips: Any, spread: Any,
) -> tuple[Any, Emit]:  # fmt: skip
    """out[r, c] = start[r, c] + sum over k of x[k, r] * weights[k, c], for r < rows and the STRIP_COLUMNS columns c of each strip.

    The sum starts at zero and adds k = 0, 1, ... in order, by fused multiply-adds, whatever `rows` and `strips` are. out, start float32,
    rows out_stride and start_stride apart; x float32 [length, rows] or, with spread > 0, [rows, length] with rows that far apart. weights:
    strips strip_stride elements apart, each float32 [length, STRIP_COLUMNS], or bfloat16 seen as int32 [length / 2, STRIP_COLUMNS], a word
    holding element k in its low and k + 1 in its high half. To such weights x may come in the same words, [length / 2, rows]: then a word
    is added by `dot_pairs`.

    rows    one of PANEL_ROWS, known at run time
    strips  the literal 1; or a number known at run time, 1 or, for one row, ROW_STRIPS
    spread  a literal
    """
    sizes = {size: (size, 1) for size in PANEL_ROWS}
    if not isinstance(strips, types.Literal):
        sizes = {SEVERAL_STRIPS: (1, ROW_STRIPS), **sizes}

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        operands, given_rows, given_strips = PanelOperands(*arguments[:8]), arguments[8], arguments[9]

        def emit_size(num_rows: int, num_strips: int) -> None:
            _multiply_panel(builder, operands, x.dtype, weights.dtype, num_rows, num_strips, spread.literal_value)

        key = given_rows
        if not isinstance(strips, types.Literal):
            are_several = builder.icmp_signed(">", given_strips, I64(1))
            key = builder.select(are_several, I64(SEVERAL_STRIPS), given_rows)
        for_case(builder, key, {number: functools.partial(emit_size, *size) for number, size in sizes.items()})
        return context.get_dummy_value()

    number = strips if isinstance(strips, types.Literal) else types.intp
    return types.void(out, types.intp, x, weights, types.intp, types.intp, start, types.intp, types.intp, number, spread), emit


def _multiply_panel(
    builder: ir.IRBuilder, o: PanelOperands, x: types.Type, weights: types.Type, num_rows: int, num_strips: int, spread: int
) -> None:  # fmt: skip
    """2 * num_rows * num_strips registers hold sums."""
    halves, are_pairs = (2 if weights == types.int32 else 1), x == types.int32
    steps, add = (1, dot_pairs) if are_pairs else (halves, lambda builder, total, left, right: fma(builder, left, right, total))
    by_depth, by_row = (1, spread) if spread else (num_rows, 1)
    vectors = [(strip, part) for strip in range(num_strips) for part in range(STRIP_VECTORS)]
    totals = [[cgutils.alloca_once(builder, VECTOR) for _ in vectors] for _ in range(num_rows)]
    for total in itertools.chain.from_iterable(totals):
        builder.store(constant(VECTOR, 0.0), total)
    bases = [gep(builder, o.weights, builder.mul(o.strip_stride, I64(strip))) for strip in range(num_strips)]
    iterations = builder.udiv(o.length, I64(halves))
    with cgutils.for_range(builder, iterations) as loop:
        offset = builder.mul(loop.index, I64(STRIP_COLUMNS))
        places = [gep(builder, gep(builder, bases[strip], offset), part * LANES) for strip, part in vectors]
        right = [_columns(builder, place, halves, are_pairs) for place in places]
        reach = builder.add(I64(AHEAD * STRIP_COLUMNS), _skipped(builder, loop.index, iterations, o.strip_stride, num_strips))
        for place in places:
            prefetch_line(builder, gep(builder, place, reach), STREAM_LEVEL)
        left_at = gep(builder, o.x, builder.mul(loop.index, I64(by_depth * steps)))
        for number in range(steps):
            for r in range(num_rows):
                left = splat(builder, builder.load(gep(builder, left_at, number * by_depth + r * by_row)), STORED[x])
                for total, columns in zip(totals[r], right, strict=True):
                    builder.store(add(builder, builder.load(total), left, columns[number]), total)
    for r in range(num_rows):
        target = gep(builder, o.out, builder.mul(o.out_stride, I64(r)))
        before = gep(builder, o.start, builder.mul(o.start_stride, I64(r)))
        for total, (strip, part) in zip(totals[r], vectors, strict=True):
            column = strip * STRIP_COLUMNS + part * LANES
            value = builder.fadd(load_floats(builder, gep(builder, before, column), types.float32, VECTOR), builder.load(total))
            store_floats(builder, value, gep(builder, target, column), types.float32)


def _columns(builder: ir.IRBuilder, where: ir.Value, halves: int, are_pairs: bool) -> list[ir.Value]:
    if halves == 1:
        return [load_floats(builder, where, types.float32, VECTOR)]
    word = builder.load(builder.bitcast(where, _WORDS.as_pointer()), align=4)
    return [word] if are_pairs else widened(builder, word)


@intrinsic
def sum_squares(_: Any, pointer: Any, length: Any) -> tuple[Any, Emit]:
    return types.float32(pointer, types.intp), _emit_sum(pointer, lambda builder, value, total: fma(builder, value, value, total))


@intrinsic
def sum_floats(_: Any, pointer: Any, length: Any) -> tuple[Any, Emit]:
    return types.float32(pointer, types.intp), _emit_sum(pointer, lambda builder, value, total: builder.fadd(value, total))


def _emit_sum(pointer: Any, add: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Emit:
    num_sums = 4

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        start, count = arguments
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(num_sums)]
        rest = cgutils.alloca_once(builder, F32)
        for total in (*sums, rest):
            builder.store(constant(total.type.pointee, 0.0), total)
        whole = builder.udiv(count, I64(LANES * num_sums))
        with cgutils.for_range(builder, whole) as loop:
            chunk = gep(builder, start, builder.mul(loop.index, I64(LANES * num_sums)))
            for i, total in enumerate(sums):
                value = load_floats(builder, gep(builder, chunk, i * LANES), pointer.dtype, VECTOR)
                builder.store(add(builder, value, builder.load(total)), total)
        done = builder.mul(whole, I64(LANES * num_sums))
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            value = load_floats(builder, gep(builder, start, builder.add(done, loop.index)), pointer.dtype, F32)
            builder.store(add(builder, value, builder.load(rest)), rest)
        total = functools.reduce(builder.fadd, [builder.load(total) for total in sums])
        return builder.fadd(fold_lanes(builder, total, builder.fadd), builder.load(rest))

    return emit


@intrinsic
def add_rows(_: Any, out: Any, source: Any, stride: Any, rows: Any, length: Any) -> tuple[Any, Emit]:
    """out[i] = source[i] + source[stride + i] + ... for i < length, over at least one row, in this order, in float32, rounded once."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        target, first, step, count, size = arguments

        def add_column(index: ir.Value, like: ir.Type) -> None:
            total = cgutils.alloca_once(builder, like)
            builder.store(load_floats(builder, gep(builder, first, index), source.dtype, like), total)
            with cgutils.for_range_slice(builder, I64(1), count, I64(1), intp=I64) as (row, _):
                where = gep(builder, first, builder.add(builder.mul(row, step), index))
                builder.store(builder.fadd(builder.load(total), load_floats(builder, where, source.dtype, like)), total)
            store_floats(builder, builder.load(total), gep(builder, target, index), out.dtype)

        whole = builder.and_(size, I64(-LANES))
        with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES), intp=I64) as (index, _):
            add_column(index, VECTOR)
        with cgutils.for_range_slice(builder, whole, size, I64(1), intp=I64) as (index, _):
            add_column(index, F32)
        return context.get_dummy_value()

    return types.void(out, source, types.intp, types.intp, types.intp), emit
