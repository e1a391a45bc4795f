"""Vector code as Numba intrinsics: the inner loops whose arithmetic must be fast *and* fixed.

Numba's auto-vectoriser picks a reduction order per loop and per CPU. Here every order is written down, so a dot product has the same
bits for one row as for one of 32 rows. Vectors have LANES float32, one register of this CPU.

Memory is accessed through typed pointers made from a tensor's address (`as_f32`, ...). The type says how an element is stored, so one
kernel source compiles for float32 and for bfloat16 (uint16 bits: the upper half of a float32). The caller keeps the tensor alive and has
checked its shape: no bounds are checked here. `vector_ir` holds the functions that emit the instructions.

Sums of products add their inputs one by one, with fused multiply-adds, a lane per output (`panel_block`). `exp` is Cephes' expf, within 2
units in the last place.
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
    ITEM_BYTES,
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
    emit_exp,
    fma,
    fold_lanes,
    for_case,
    gep,
    larger,
    load_floats,
    native_features,
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
"""Strips that a single row is multiplied with at once: several streams of weights keep more cache lines in flight than one."""

SEVERAL_STRIPS = 0
"""Stands for one row and ROW_STRIPS strips where `panel_block` chooses by the number of rows."""

SLACK = 8.0
"""Most that a score may exceed the reference of its softmax before sums are rescaled. e**8 costs a float32 no precision, and rescaling is
rare."""

# --- pointers and scalars; LLVM vectorises them where they stand in a plain loop ---


def _cast_to(element: types.Type) -> Any:
    pointer = types.CPointer(element)

    @intrinsic
    def cast(_: Any, address: Any) -> tuple[Any, Emit]:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            return builder.inttoptr(arguments[0], STORED[element].as_pointer())

        return pointer(types.intp), emit

    return cast


as_f32, as_bf16, as_i8, as_i16, as_i32, as_i64 = (
    _cast_to(element) for element in (types.float32, types.uint16, types.int8, types.int16, types.int32, types.int64)
)


@intrinsic
def read_arguments(_: Any, layout: Any, address: Any) -> tuple[Any, Emit]:
    """A kernel's arguments, by name: `layout` is a NamedTuple class, whose fields are the int64 words at `address`, in order."""
    words = types.NamedUniTuple(types.intp, len(layout.instance_class._fields), layout.instance_class)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        first = builder.inttoptr(arguments[1], I64.as_pointer())
        return context.make_tuple(builder, words, [builder.load(gep(builder, first, i), align=8) for i in range(len(words))])

    return words(layout, types.intp), emit


@intrinsic
def at(_: Any, pointer: Any, index: Any) -> tuple[Any, Emit]:
    """pointer + index elements."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return gep(builder, arguments[0], arguments[1])

    return pointer(pointer, types.intp), emit


@intrinsic
def load(_: Any, pointer: Any, index: Any) -> tuple[Any, Emit]:
    """pointer[index], as float32 (stored float32 or bfloat16) or int64 (stored int32 or int64)."""
    is_float = pointer.dtype in (types.float32, types.uint16)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        where = gep(builder, arguments[0], arguments[1])
        if is_float:
            return load_floats(builder, where, pointer.dtype, F32)
        value = builder.load(where, align=ITEM_BYTES[pointer.dtype])
        return builder.sext(value, I64) if pointer.dtype == types.int32 else value

    return (types.float32 if is_float else types.intp)(pointer, types.intp), emit


@intrinsic
def store(_: Any, value: Any, pointer: Any, index: Any) -> tuple[Any, Emit]:
    """pointer[index] = value, for float32, bfloat16 (rounded), int64 and int32 (its low half)."""
    given = types.int64 if pointer.dtype in (types.int64, types.int32) else types.float32

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        value = builder.trunc(arguments[0], I32) if pointer.dtype == types.int32 else arguments[0]
        store_floats(builder, value, gep(builder, arguments[1], arguments[2]), pointer.dtype)
        return context.get_dummy_value()

    return types.void(given, pointer, types.intp), emit


@intrinsic(prefer_literal=True)
def prefetch(_: Any, pointer: Any, index: Any, length: Any) -> tuple[Any, Emit]:
    """Prefetch the cache lines of pointer[index : index + length]. The address may be anything: a hint cannot fail."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        byte_pointer = ir.IntType(8).as_pointer()
        start = builder.bitcast(gep(builder, arguments[0], arguments[1]), byte_pointer)
        num_lines = builder.lshr(builder.add(builder.mul(arguments[2], I64(ITEM_BYTES[pointer.dtype])), I64(63)), I64(6))
        with cgutils.for_range(builder, num_lines) as loop:
            prefetch_line(builder, builder.gep(start, [builder.mul(loop.index, I64(64))]))
        return context.get_dummy_value()

    return types.void(pointer, types.intp, types.intp), emit


@intrinsic
def exp(_: Any, x: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return emit_exp(builder, arguments[0])

    return types.float32(types.float32), emit


@intrinsic
def take_ticket(_: Any, counter: Any) -> tuple[Any, Emit]:
    """Atomically counter[0] += 1; returns the old value. Workers share a list of unequal items by it."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.atomic_rmw("add", arguments[0], I64(1), "monotonic")

    return types.intp(counter), emit


@intrinsic
def increment(_: Any, counter: Any) -> tuple[Any, Emit]:
    """Atomically counter[0] += 1. A thread that reads the new value with `load_acquire` sees what this thread wrote before."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        builder.atomic_rmw("add", arguments[0], I64(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(counter), emit


@intrinsic
def load_acquire(_: Any, counter: Any) -> tuple[Any, Emit]:
    """counter[0], read atomically; see `increment`."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.load_atomic(arguments[0], "acquire", 8)

    return types.intp(counter), emit


@intrinsic
def compare_and_set(_: Any, place: Any, value: Any) -> tuple[Any, Emit]:
    """Atomically place[0] = value if it was 0; returns the value that is there now."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        found = builder.cmpxchg(arguments[0], I64(0), arguments[1], "acq_rel", "acquire")
        return builder.select(builder.extract_value(found, 1), arguments[1], builder.extract_value(found, 0))

    return types.intp(place, types.intp), emit


@intrinsic
def pause(_: Any) -> tuple[Any, Emit]:
    """Hint to the processor that this is a waiting loop."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if "sse2" in native_features():
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


# --- blocks: rows of float32 against strips of STRIP_COLUMNS columns ---

_WORDS = ir.VectorType(I32, LANES)


def _transpose_rows(
    builder: ir.IRBuilder, out: ir.Value, out_stride: ir.Value | int, source: ir.Value, element: types.Type, offsets: ir.Value,
    length: ir.Value, factor: ir.Value | None,
) -> None:  # fmt: skip
    """out[d * out_stride + c] = source[offsets[c] + d] times lane c of `factor`, for d < length, c < LANES; written in the order of d."""
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


def _row_items(builder: ir.IRBuilder, source: ir.Value, index: ir.Value, like: ir.Type, element: types.Type) -> ir.Value:
    """The items of a row of float32 from `index` on, as many as `like` has: float32, or words of two inputs rounded to bfloat16."""
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
    """Elements to add to a prefetch address beyond the end of its piece. Pieces follow each other: where `num_strips` are read at the same
    time, the next piece is already being read, and the first unread one begins num_strips - 1 pieces later."""
    near_end = builder.icmp_signed(">=", builder.add(index, I64(AHEAD)), count)
    return builder.select(near_end, builder.mul(strip_step, I64(num_strips - 1)), I64(0))


class PanelOperands(NamedTuple):
    """The values of `panel_block`'s arguments, in its order up to start_stride."""

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
    rows out_stride and start_stride apart; x float32 [length, rows] or, with spread > 0, [rows, length] with rows that far apart.
    weights: strips strip_stride elements apart, each float32 [length, STRIP_COLUMNS], or bfloat16 seen as int32
    [length / 2, STRIP_COLUMNS], a word holding element k in its low and k + 1 in its high half. To such weights x may come in the same
    words, [length / 2, rows]: then a word is added by `dot_pairs`.

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
    """`panel_block` of one size; 2 * num_rows * num_strips registers hold sums. x, weights: element types."""
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
    """One register of columns of the weights at `where`, for each step of an iteration."""
    if halves == 1:
        return [load_floats(builder, where, types.float32, VECTOR)]
    word = builder.load(builder.bitcast(where, _WORDS.as_pointer()), align=4)
    return [word] if are_pairs else widened(builder, word)


@intrinsic
def sum_squares(_: Any, pointer: Any, length: Any) -> tuple[Any, Emit]:
    """Sum of pointer[:length] squared in float32: four registers of partial sums, then the rest one by one."""
    return types.float32(pointer, types.intp), _emit_sum(pointer, lambda builder, value, total: fma(builder, value, value, total))


@intrinsic
def sum_floats(_: Any, pointer: Any, length: Any) -> tuple[Any, Emit]:
    """Sum of pointer[:length] in float32, in the order of `sum_squares`."""
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


@intrinsic(prefer_literal=True)
def softmax_tile(_: Any, scores: Any, first: Any, last: Any, reference: Any, softcap: Any, tile: Any, is_whole: Any) -> tuple[Any, Emit]:
    """One step of an online softmax, in place over scores[:tile]: entries in [first, last) become exp(score - m), all others 0.

    m is `reference`, unless one of these scores exceeds it by more than SLACK: then it is the largest score. softcap > 0 first maps s to
    softcap * tanh(s / softcap). tile: a literal multiple of LANES. is_whole: a literal, 1 where [first, last) is known to be [0, tile).
    Returns (m, sum of the new entries); where [first, last) is empty, (reference, 0).
    """
    num_chunks, all_seen = tile.literal_value // LANES, bool(is_whole.literal_value)
    result = types.UniTuple(types.float32, 2)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores_at, low, high, start, cap = arguments[:5]
        places = [gep(builder, scores_at, chunk * LANES) for chunk in range(num_chunks)]
        masks = [] if all_seen else _visible(builder, low, high, num_chunks)

        def seen(chunk: int, value: ir.Value, other: ir.Value) -> ir.Value:
            return value if all_seen else builder.select(masks[chunk], value, other)

        raw = [_capped(builder, load_floats(builder, place, types.float32, VECTOR), cap) for place in places]
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

    return result(scores, types.intp, types.intp, types.float32, types.float32, tile, is_whole), emit


def _visible(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, num_chunks: int) -> list[ir.Value]:
    """Per chunk a mask of the lanes whose index in the tile lies in [low, high)."""
    lows, highs = (splat(builder, builder.trunc(bound, I32), I32) for bound in (low, high))
    masks = []
    for chunk in range(num_chunks):
        index = ir.Constant(ir.VectorType(I32, LANES), list(range(chunk * LANES, (chunk + 1) * LANES)))
        masks.append(builder.and_(builder.icmp_signed(">=", index, lows), builder.icmp_signed("<", index, highs)))
    return masks


def _capped(builder: ir.IRBuilder, score: ir.Value, cap: ir.Value) -> ir.Value:
    """cap * tanh(score / cap) where cap > 0, by tanh(y) = 1 - 2 / (e**2y + 1); the score itself otherwise."""
    result = cgutils.alloca_once(builder, score.type)
    builder.store(score, result)
    with builder.if_then(builder.fcmp_ordered(">", cap, F32(0.0)), likely=False):
        limit, one, two = splat(builder, cap), constant(score.type, 1.0), constant(score.type, 2.0)
        power = emit_exp(builder, builder.fmul(builder.fdiv(score, limit), two))
        builder.store(builder.fmul(limit, builder.fsub(one, builder.fdiv(two, builder.fadd(power, one)))), result)
    return builder.load(result)
