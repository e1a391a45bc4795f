"""Attention's own vector code as Numba intrinsics: packing keys, queries and values for `jit.simd.panel_block`, and the softmax of a tile.

No bounds are checked. The exponential is Cephes' expf, within 2 units in the last place.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.tensor.kernels.cpu.jit.vector_ir import (
    F32,
    I32,
    I64,
    LANES,
    STRIP_COLUMNS,
    STRIP_VECTORS,
    VECTOR,
    Emit,
    constant,
    emit_exp,
    fold_lanes,
    gep,
    larger,
    load_floats,
    splat,
    store_floats,
    transpose,
)

SLACK = 8.0
"""Most that a score may exceed the reference of its softmax before sums are rescaled: e**8 costs a float32 no precision."""


def _transpose_rows(
    builder: ir.IRBuilder, out: ir.Value, out_stride: ir.Value | int, source: ir.Value, element: types.Type, offsets: ir.Value,
    length: ir.Value, factor: ir.Value | None,
) -> None:  # fmt: skip
    """out[d * out_stride + c] = source[offsets[c] + d] times lane c of `factor`, for d < length, c < LANES."""
    rows = [gep(builder, source, builder.load(gep(builder, offsets, c), align=8)) for c in range(LANES)]
    with cgutils.for_range(builder, builder.lshr(length, I64(LANES.bit_length() - 1))) as loop:
        first = builder.mul(loop.index, I64(LANES))
        transposed = transpose(builder, [load_floats(builder, gep(builder, row, first), element, VECTOR) for row in rows])
        for d, vector in enumerate(transposed):
            place = builder.mul(builder.add(first, I64(d)), out_stride if isinstance(out_stride, ir.Value) else I64(out_stride))
            store_floats(builder, builder.fmul(vector, factor) if factor else vector, gep(builder, out, place), types.float32)


@intrinsic
def pack_keys(_: Any, out: Any, keys: Any, offsets: Any, scales: Any, length: Any) -> tuple[Any, Emit]:
    """out[d * STRIP_COLUMNS + c] = keys[offsets[c] + d] for d < length, c < LANES; times scales[c] where keys are int8.

    out, scales float32; keys float32, bfloat16 or int8; offsets int64; length a multiple of LANES.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        out_at, keys_at, offsets_at, scales_at, count = arguments
        scale = load_floats(builder, scales_at, types.float32, VECTOR) if keys.dtype == types.int8 else None
        _transpose_rows(builder, out_at, STRIP_COLUMNS, keys_at, keys.dtype, offsets_at, count, scale)
        return context.get_dummy_value()

    return types.void(out, keys, offsets, scales, types.intp), emit


@intrinsic
def pack_queries(_: Any, out: Any, rows: Any, queries: Any, offsets: Any, scale: Any, length: Any) -> tuple[Any, Emit]:
    """out[d * rows + r] = scale * queries[offsets[r] + d] for d < length, r < rows: a panel. Up to LANES - 1 elements behind it are
    overwritten, and offsets up to LANES are followed. out float32; queries float32 or bfloat16; length a multiple of LANES.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        out_at, stride, queries_at, offsets_at, factor, count = arguments
        _transpose_rows(builder, out_at, stride, queries_at, queries.dtype, offsets_at, count, splat(builder, factor))
        return context.get_dummy_value()

    return types.void(out, types.intp, queries, offsets, types.float32, types.intp), emit


@intrinsic
def pack_value(_: Any, out: Any, strip_stride: Any, value: Any, scale: Any, length: Any) -> tuple[Any, Emit]:
    """out[strip * strip_stride + c] = value[strip * STRIP_COLUMNS + c], for all `length` elements; times `scale` where value is int8."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        out_at, strip_step, value_at, factor, count = arguments
        factors, shift = splat(builder, factor), STRIP_VECTORS.bit_length() - 1
        with cgutils.for_range(builder, builder.lshr(count, I64(LANES.bit_length() - 1))) as loop:
            vector = load_floats(builder, gep(builder, value_at, builder.mul(loop.index, I64(LANES))), value.dtype, VECTOR)
            if value.dtype == types.int8:
                vector = builder.fmul(vector, factors)
            strip = gep(builder, out_at, builder.mul(builder.lshr(loop.index, I64(shift)), strip_step))
            part = builder.mul(builder.and_(loop.index, I64(STRIP_VECTORS - 1)), I64(LANES))
            store_floats(builder, vector, gep(builder, strip, part), types.float32)
        return context.get_dummy_value()

    return types.void(out, types.intp, value, types.float32, types.intp), emit


@intrinsic(prefer_literal=True)
def softmax_tile(_: Any, scores: Any, first: Any, last: Any, reference: Any, tile: Any, is_whole: Any) -> tuple[Any, Emit]:
    """In place over scores[:tile]: entries in [first, last) become exp(score - m), all others 0. m is `reference`, unless one of these
    scores exceeds it by more than SLACK: then it is the largest score. Returns (m, sum of the new entries); where [first, last) is empty,
    (reference, 0).

    tile: a literal multiple of LANES. is_whole: a literal, 1 where [first, last) is known to be [0, tile).
    """
    num_chunks, all_seen = tile.literal_value // LANES, bool(is_whole.literal_value)
    result = types.UniTuple(types.float32, 2)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores_at, low, high, start = arguments[:4]
        places = [gep(builder, scores_at, chunk * LANES) for chunk in range(num_chunks)]
        masks = [] if all_seen else _visible(builder, low, high, num_chunks)

        def seen(chunk: int, value: ir.Value, other: ir.Value) -> ir.Value:
            return value if all_seen else builder.select(masks[chunk], value, other)

        raw = [load_floats(builder, place, types.float32, VECTOR) for place in places]
        best = splat(builder, start)
        for chunk, value in enumerate(raw):
            best = larger(builder, seen(chunk, value, best), best)
        largest = fold_lanes(builder, best, functools.partial(larger, builder))
        is_exceeded = builder.fcmp_ordered(">", largest, builder.fadd(start, F32(SLACK)))
        peak = builder.select(is_exceeded, largest, start)
        shift, total = splat(builder, peak), constant(VECTOR, 0.0)
        for chunk, (place, value) in enumerate(zip(places, raw, strict=True)):
            weight = seen(chunk, emit_exp(builder, builder.fsub(value, shift), is_positive=False), constant(VECTOR, 0.0))
            store_floats(builder, weight, place, types.float32)
            total = builder.fadd(total, weight)
        return context.make_tuple(builder, result, (peak, fold_lanes(builder, total, builder.fadd)))

    return result(scores, types.intp, types.intp, types.float32, tile, is_whole), emit


def _visible(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, num_chunks: int) -> list[ir.Value]:
    lows, highs = (splat(builder, builder.trunc(bound, I32), I32) for bound in (low, high))
    masks = []
    for chunk in range(num_chunks):
        index = ir.Constant(ir.VectorType(I32, LANES), list(range(chunk * LANES, (chunk + 1) * LANES)))
        masks.append(builder.and_(builder.icmp_signed(">=", index, lows), builder.icmp_signed("<", index, highs)))
    return masks
