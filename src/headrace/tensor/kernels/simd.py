"""Vector code as Numba intrinsics: the inner loops whose arithmetic must be fast *and* fixed.

Numba's auto-vectoriser picks a reduction order per loop and per CPU. Here every order is written down, so a dot product has the same
bits whether it is computed for one row or among 31 others. Vectors have LANES float32, one register of this CPU.

Memory is reached through typed pointers made from a tensor's address (`as_f32`, ...). The type says how an element is stored, so one
kernel source compiles for float32 and for bfloat16 (uint16 bits: the upper half of a float32). The caller keeps the tensor alive and has
checked its shape: no bounds are checked here.

Order of a dot product: lane l sums elements l, l + LANES, l + 2 LANES, ... with fused multiply-adds, then neighbouring lanes are added,
round by round. `exp` is Cephes' expf, within 2 units in the last place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_Emit = Callable[[Any, ir.IRBuilder, Any, Any], Any]


def native_lanes() -> int:
    """float32 lanes of the widest vector register of the CPU that Numba compiles for: 16, 8 or 4."""
    named = config.CPU_FEATURES
    features = set(named.replace("+", "").split(",")) if named else {k for k, v in llvmlite.binding.get_host_cpu_features().items() if v}
    if "avx512f" in features:
        return 16
    return 8 if "avx" in features else 4


LANES = native_lanes()
COLUMNS = LANES // 4
"""Columns of a block: with 4 rows its LANES sums fold into one vector."""

_VECTOR = ir.VectorType(_F32, LANES)
_ITEM_BYTES = {types.float32: 4, types.uint16: 2, types.int32: 4, types.int64: 8}
_STORED = {types.float32: _F32, types.uint16: _I16, types.int32: _I32, types.int64: _I64}


# --- words of vector code; values are float32, alone or in vectors ---


def _shaped(like: ir.Type, scalar: ir.Type) -> ir.Type:
    return ir.VectorType(scalar, like.count) if isinstance(like, ir.VectorType) else scalar


def _constant(like: ir.Type, value: float) -> ir.Constant:
    """`value` in every lane of a float or integer type."""
    return ir.Constant(like, [value] * like.count) if isinstance(like, ir.VectorType) else ir.Constant(like, value)


def _splat(builder: ir.IRBuilder, scalar: ir.Value, scalar_type: ir.Type = _F32) -> ir.Value:
    vector = ir.VectorType(scalar_type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, _I32(0)), undefined, zeros)


def _call(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> ir.Value:
    """Call an overloaded LLVM intrinsic of float32 arguments, `name` without its type suffix."""
    result = arguments[0].type
    suffix = f"v{result.count}f32" if isinstance(result, ir.VectorType) else "f32"
    function_type = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"{name}.{suffix}"), arguments)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fma", a, b, c)


def _step(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
    return builder.gep(pointer, [index if isinstance(index, ir.Value) else _I64(index)])


def _load(builder: ir.IRBuilder, pointer: ir.Value, element: types.Type, like: ir.Type) -> ir.Value:
    """float32 values of `like`'s shape at `pointer`."""
    stored = _shaped(like, _STORED[element])
    value = builder.load(builder.bitcast(pointer, stored.as_pointer()), align=_ITEM_BYTES[element])
    if element == types.float32:
        return value
    wide = builder.zext(value, _shaped(like, _I32))
    return builder.bitcast(builder.shl(wide, _constant(wide.type, 16)), like)


def _store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, element: types.Type) -> None:
    """Store float32 values; to bfloat16 by rounding to nearest, ties to even, NaN stays NaN."""
    if element == types.uint16:
        bits = builder.bitcast(value, _shaped(value.type, _I32))
        one, sixteen = _constant(bits.type, 1), _constant(bits.type, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), one)
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _constant(bits.type, 0x7FFF))), sixteen)
        is_nan = builder.fcmp_unordered("uno", value, value)
        value = builder.trunc(builder.select(is_nan, _constant(bits.type, 0x7FC0), rounded), _shaped(value.type, _I16))
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=_ITEM_BYTES[element])


def _slice(builder: ir.IRBuilder, value: ir.Value, first: int, count: int) -> ir.Value:
    if count == 1:
        return builder.extract_element(value, _I32(first))
    return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count))))


def _fold_dots(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """A vector whose lane i < len(parts) is the sum of all lanes of parts[i]; len(parts) a power of two <= LANES.

    Each of log2(LANES) rounds adds the even to the odd lanes of a pair of vectors and lays the halves side by side. A part's sum is
    formed in the same order however many parts there are, so blocks of one row and of four rows agree to the bit.
    """
    mask_type, order = ir.VectorType(_I32, LANES), list(range(0, 2 * LANES, 2))
    even, odd = ir.Constant(mask_type, order), ir.Constant(mask_type, [i + 1 for i in order])
    for _ in range(LANES.bit_length() - 1):
        pairs = list(zip(parts[0::2], parts[1::2], strict=True)) if len(parts) > 1 else [(parts[0], parts[0])]
        parts = [builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd)) for x, y in pairs]
    return parts[0]


def _fold_lanes(builder: ir.IRBuilder, value: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """All lanes joined in halves: lane i with lane i + LANES / 2, and so on down to one."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        value = join(_slice(builder, value, 0, lanes), _slice(builder, value, lanes, lanes))
    return value


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x as x = n ln 2 + r, a polynomial in r, times 2**n. Below -87 it is e**-87, above 88 infinite; NaN stays NaN."""
    constant = functools.partial(_constant, x.type)
    given, limit = x, constant(88.0)
    x = _call(builder, "llvm.minnum", _call(builder, "llvm.maxnum", x, constant(-87.0)), limit)
    n = _call(builder, "llvm.rint", builder.fmul(x, constant(1.44269504088896341)))
    r = _fma(builder, n, constant(-0.693359375), x)
    r = _fma(builder, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, constant(coefficient))
    p = builder.fadd(_fma(builder, p, builder.fmul(r, r), r), constant(1.0))
    integer = _shaped(x.type, _I32)
    exponent = builder.shl(builder.add(builder.fptosi(n, integer), _constant(integer, 127)), _constant(integer, 23))
    result = builder.fmul(p, builder.bitcast(exponent, x.type))
    # Not (given <= limit) is "above, or NaN"; given times infinity is then infinite, or NaN.
    inside = builder.fcmp_ordered("<=", given, limit)
    return builder.select(inside, result, builder.fmul(given, constant(math.inf)))


# --- pointers and scalars; LLVM vectorises them where they stand in a plain loop ---


def _cast_to(element: types.Type) -> Any:
    pointer = types.CPointer(element)

    @intrinsic
    def cast(_: Any, address: Any) -> tuple[Any, _Emit]:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            return builder.inttoptr(arguments[0], _STORED[element].as_pointer())

        return pointer(types.intp), emit

    return cast


as_f32, as_bf16, as_i32, as_i64 = (_cast_to(element) for element in (types.float32, types.uint16, types.int32, types.int64))


@intrinsic
def at(_: Any, pointer: Any, index: Any) -> tuple[Any, _Emit]:
    """pointer + index elements."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return _step(builder, arguments[0], arguments[1])

    return pointer(pointer, types.intp), emit


@intrinsic
def load(_: Any, pointer: Any, index: Any) -> tuple[Any, _Emit]:
    """pointer[index]: a float32 from float32 or bfloat16, an int64 from int32 or int64."""
    is_float = pointer.dtype in (types.float32, types.uint16)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        where = _step(builder, arguments[0], arguments[1])
        if is_float:
            return _load(builder, where, pointer.dtype, _F32)
        value = builder.load(where, align=_ITEM_BYTES[pointer.dtype])
        return builder.sext(value, _I64) if pointer.dtype == types.int32 else value

    return (types.float32 if is_float else types.intp)(pointer, types.intp), emit


@intrinsic
def store(_: Any, value: Any, pointer: Any, index: Any) -> tuple[Any, _Emit]:
    """pointer[index] = value, for float32, bfloat16 (rounded) and int64."""
    given = types.int64 if pointer.dtype == types.int64 else types.float32

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        _store(builder, arguments[0], _step(builder, arguments[1], arguments[2]), pointer.dtype)
        return context.get_dummy_value()

    return types.void(given, pointer, types.intp), emit


@intrinsic(prefer_literal=True)
def prefetch(_: Any, pointer: Any, index: Any, length: Any) -> tuple[Any, _Emit]:
    """Ask for the cache lines of pointer[index : index + length] ahead of time. The address may be anything: a hint cannot fail."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        byte_pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        start = builder.bitcast(_step(builder, arguments[0], arguments[1]), byte_pointer)
        num_lines = builder.lshr(builder.add(builder.mul(arguments[2], _I64(_ITEM_BYTES[pointer.dtype])), _I64(63)), _I64(6))
        with cgutils.for_range(builder, num_lines) as loop:
            line = builder.gep(start, [builder.mul(loop.index, _I64(64))])
            builder.call(function, [line, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(pointer, types.intp, types.intp), emit


@intrinsic
def exp(_: Any, x: Any) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return _exp(builder, arguments[0])

    return types.float32(types.float32), emit


@intrinsic
def take_ticket(_: Any, counter: Any) -> tuple[Any, _Emit]:
    """Atomically counter[0] += 1, returning the old value: how workers share a list of unequal items."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.atomic_rmw("add", arguments[0], _I64(1), "monotonic")

    return types.intp(counter), emit


# --- blocks: rows of float32 against COLUMNS strips of stored elements ---


def _columns(builder: ir.IRBuilder, base: ir.Value, offsets: ir.Value) -> list[ir.Value]:
    return [_step(builder, base, builder.load(_step(builder, offsets, c), align=8)) for c in range(COLUMNS)]


@intrinsic(prefer_literal=True)
def dot_block(_: Any, out: Any, out_stride: Any, a: Any, a_stride: Any, b: Any, offsets: Any, length: Any, rows: Any) -> tuple[Any, _Emit]:
    """out[r * out_stride + c] = dot(a[r * a_stride:], b[offsets[c]:]) over `length` elements, for r < rows, c < COLUMNS.

    out, a float32; offsets int64; b float32 or bfloat16; length a multiple of LANES; rows the literal 1 or 4.
    """
    num_rows = rows.literal_value

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        out_at, out_step, a_at, a_step, b_at, offsets_at, count = arguments[:7]
        columns = _columns(builder, b_at, offsets_at)
        starts = [_step(builder, a_at, builder.mul(a_step, _I64(r))) for r in range(num_rows)]
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(num_rows * COLUMNS)]
        for total in sums:
            builder.store(_constant(_VECTOR, 0.0), total)
        with cgutils.for_range(builder, builder.lshr(count, _I64(LANES.bit_length() - 1))) as loop:
            first = builder.mul(loop.index, _I64(LANES))
            right = [_load(builder, _step(builder, column, first), b.dtype, _VECTOR) for column in columns]
            for r, start in enumerate(starts):
                left = _load(builder, _step(builder, start, first), types.float32, _VECTOR)
                for c in range(COLUMNS):
                    total = sums[r * COLUMNS + c]
                    builder.store(_fma(builder, left, right[c], builder.load(total)), total)
        folded = _fold_dots(builder, [builder.load(total) for total in sums])
        for r in range(num_rows):
            where = _step(builder, out_at, builder.mul(out_step, _I64(r)))
            _store(builder, _slice(builder, folded, r * COLUMNS, COLUMNS), where, types.float32)
        return context.get_dummy_value()

    return types.void(out, types.intp, a, types.intp, b, offsets, types.intp, rows), emit


@intrinsic(prefer_literal=True)
def value_block(_: Any, out: Any, weights: Any, weight_stride: Any, b: Any, offsets: Any, length: Any, rows: Any) -> tuple[Any, _Emit]:
    """out[r * length + d] += weights[r * weight_stride + c] * b[offsets[c] + d] for r < rows, d < length, c = 0 .. COLUMNS - 1 in order.

    out, weights float32; offsets int64; b float32 or bfloat16; length a multiple of LANES; rows the literal 1 or 4.
    """
    num_rows = rows.literal_value

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        out_at, weights_at, weight_step, b_at, offsets_at, count = arguments[:6]
        columns = _columns(builder, b_at, offsets_at)
        factors = []
        for r in range(num_rows):
            row = _step(builder, weights_at, builder.mul(weight_step, _I64(r)))
            factors.append([_splat(builder, _load(builder, _step(builder, row, c), types.float32, _F32)) for c in range(COLUMNS)])
        with cgutils.for_range(builder, builder.lshr(count, _I64(LANES.bit_length() - 1))) as loop:
            first = builder.mul(loop.index, _I64(LANES))
            right = [_load(builder, _step(builder, column, first), b.dtype, _VECTOR) for column in columns]
            for r in range(num_rows):
                where = _step(builder, out_at, builder.add(builder.mul(count, _I64(r)), first))
                total = _load(builder, where, types.float32, _VECTOR)
                for c in range(COLUMNS):
                    total = _fma(builder, factors[r][c], right[c], total)
                _store(builder, total, where, types.float32)
        return context.get_dummy_value()

    return types.void(out, weights, types.intp, b, offsets, types.intp, rows), emit


@intrinsic(prefer_literal=True)
def strip_block(_: Any, sums: Any, a: Any, strip: Any, length: Any, rows: Any) -> tuple[Any, _Emit]:
    """sums[r, c, :] += products of row r of `a` and column c of a strip, over `length` elements, for r < rows, c < COLUMNS.

    sums float32 [rows, COLUMNS, LANES], one register per dot product: `fold_block` ends it.
    a: rows interleaved by whole registers, float32 [length / LANES, rows, LANES]; a single row is simply itself.
    strip: COLUMNS weight rows interleaved by whole registers, so that they are read as one stream (see `linear.pack_strips`): float32
    [length / LANES, COLUMNS, LANES], or bfloat16 seen as int32 [length / (2 LANES), COLUMNS, LANES], a word holding element l of a
    register in its low half and element l of the next register in its high half.
    """
    num_rows, halves = rows.literal_value, 2 if strip.dtype == types.int32 else 1
    words = ir.VectorType(_I32, LANES)

    def widen(builder: ir.IRBuilder, where: ir.Value) -> list[ir.Value]:
        if halves == 1:
            return [_load(builder, where, types.float32, _VECTOR)]
        word = builder.load(builder.bitcast(where, words.as_pointer()), align=4)
        low, high = builder.shl(word, _constant(words, 16)), builder.and_(word, _constant(words, -65536))
        return [builder.bitcast(low, _VECTOR), builder.bitcast(high, _VECTOR)]

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        sums_at, a_at, strip_at, count = arguments[:4]
        places = [_step(builder, sums_at, i * LANES) for i in range(num_rows * COLUMNS)]
        totals = [cgutils.alloca_once(builder, _VECTOR) for _ in places]
        for place, total in zip(places, totals, strict=True):
            builder.store(_load(builder, place, types.float32, _VECTOR), total)
        with cgutils.for_range(builder, builder.udiv(count, _I64(LANES * halves))) as loop:
            chunk = _step(builder, strip_at, builder.mul(loop.index, _I64(COLUMNS * LANES)))
            right = [widen(builder, _step(builder, chunk, c * LANES)) for c in range(COLUMNS)]
            for half in range(halves):
                rows_at = _step(builder, a_at, builder.mul(loop.index, _I64(LANES * halves * num_rows)))
                for r in range(num_rows):
                    left = _load(builder, _step(builder, rows_at, (half * num_rows + r) * LANES), types.float32, _VECTOR)
                    for c in range(COLUMNS):
                        total = totals[r * COLUMNS + c]
                        builder.store(_fma(builder, left, right[c][half], builder.load(total)), total)
        for place, total in zip(places, totals, strict=True):
            _store(builder, builder.load(total), place, types.float32)
        return context.get_dummy_value()

    return types.void(sums, a, strip, types.intp, rows), emit


@intrinsic(prefer_literal=True)
def fold_block(_: Any, out: Any, out_stride: Any, sums: Any, rows: Any) -> tuple[Any, _Emit]:
    """out[r * out_stride + c] = sum over lanes of sums[r, c, :], for r < rows, c < COLUMNS, in the order of `dot_block`; sums become 0."""
    num_rows = rows.literal_value

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        out_at, out_step, sums_at = arguments[:3]
        places = [_step(builder, sums_at, i * LANES) for i in range(num_rows * COLUMNS)]
        folded = _fold_dots(builder, [_load(builder, place, types.float32, _VECTOR) for place in places])
        for r in range(num_rows):
            where = _step(builder, out_at, builder.mul(out_step, _I64(r)))
            _store(builder, _slice(builder, folded, r * COLUMNS, COLUMNS), where, types.float32)
        for place in places:
            _store(builder, _constant(_VECTOR, 0.0), place, types.float32)
        return context.get_dummy_value()

    return types.void(out, types.intp, sums, rows), emit


@intrinsic
def sum_squares(_: Any, pointer: Any, length: Any) -> tuple[Any, _Emit]:
    """Sum of pointer[:length] squared in float32: four registers of partial sums, then the rest one by one."""
    num_sums = 4

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        start, count = arguments
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(num_sums)]
        rest = cgutils.alloca_once(builder, _F32)
        for total in (*sums, rest):
            builder.store(_constant(total.type.pointee, 0.0), total)
        whole = builder.udiv(count, _I64(LANES * num_sums))
        with cgutils.for_range(builder, whole) as loop:
            chunk = _step(builder, start, builder.mul(loop.index, _I64(LANES * num_sums)))
            for i, total in enumerate(sums):
                value = _load(builder, _step(builder, chunk, i * LANES), pointer.dtype, _VECTOR)
                builder.store(_fma(builder, value, value, builder.load(total)), total)
        done = builder.mul(whole, _I64(LANES * num_sums))
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            value = _load(builder, _step(builder, start, builder.add(done, loop.index)), pointer.dtype, _F32)
            builder.store(_fma(builder, value, value, builder.load(rest)), rest)
        total = functools.reduce(builder.fadd, [builder.load(total) for total in sums])
        return builder.fadd(_fold_lanes(builder, total, builder.fadd), builder.load(rest))

    return types.float32(pointer, types.intp), emit


@intrinsic
def copy(_: Any, target: Any, source: Any, length: Any) -> tuple[Any, _Emit]:
    """target[:length] = source[:length], bit for bit; they do not overlap."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        cgutils.raw_memcpy(builder, arguments[0], arguments[1], arguments[2], _ITEM_BYTES[source.dtype])
        return context.get_dummy_value()

    return types.void(target, source, types.intp), emit


@intrinsic(prefer_literal=True)
def softmax_tile(_: Any, scores: Any, first: Any, last: Any, maximum: Any, softcap: Any, tile: Any) -> tuple[Any, _Emit]:
    """One step of an online softmax, in place over scores[:tile]: entries in [first, last) become exp(score - m), all others 0.

    m is the larger of `maximum` and those scores; softcap > 0 first maps s to softcap * tanh(s / softcap). tile is a literal multiple
    of LANES. Returns (m, sum of the new entries); where [first, last) is empty, (maximum, 0).
    """
    num_chunks = tile.literal_value // LANES
    result = types.UniTuple(types.float32, 2)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        scores_at, low, high, start, cap = arguments[:5]
        places = [_step(builder, scores_at, chunk * LANES) for chunk in range(num_chunks)]
        visible = _visible(builder, low, high, num_chunks)
        raw = [_capped(builder, _load(builder, place, types.float32, _VECTOR), cap) for place in places]
        best = _splat(builder, start)
        for value, seen in zip(raw, visible, strict=True):
            best = _call(builder, "llvm.maxnum", best, builder.select(seen, value, best))
        peak = _fold_lanes(builder, best, functools.partial(_call, builder, "llvm.maxnum"))
        shift, total = _splat(builder, peak), _constant(_VECTOR, 0.0)
        for place, value, seen in zip(places, raw, visible, strict=True):
            weight = builder.select(seen, _exp(builder, builder.fsub(value, shift)), _constant(_VECTOR, 0.0))
            _store(builder, weight, place, types.float32)
            total = builder.fadd(total, weight)
        return context.make_tuple(builder, result, (peak, _fold_lanes(builder, total, builder.fadd)))

    return result(scores, types.intp, types.intp, types.float32, types.float32, tile), emit


def _visible(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, num_chunks: int) -> list[ir.Value]:
    """Per chunk a mask of the lanes whose index in the tile lies in [low, high)."""
    lows, highs = (_splat(builder, builder.trunc(bound, _I32), _I32) for bound in (low, high))
    masks = []
    for chunk in range(num_chunks):
        index = ir.Constant(ir.VectorType(_I32, LANES), list(range(chunk * LANES, (chunk + 1) * LANES)))
        masks.append(builder.and_(builder.icmp_signed(">=", index, lows), builder.icmp_signed("<", index, highs)))
    return masks


def _capped(builder: ir.IRBuilder, score: ir.Value, cap: ir.Value) -> ir.Value:
    """cap * tanh(score / cap) where cap > 0, by tanh(y) = 1 - 2 / (e**2y + 1); the score itself otherwise."""
    result = cgutils.alloca_once(builder, score.type)
    builder.store(score, result)
    with builder.if_then(builder.fcmp_ordered(">", cap, _F32(0.0)), likely=False):
        limit, one, two = _splat(builder, cap), _constant(score.type, 1.0), _constant(score.type, 2.0)
        power = _exp(builder, builder.fmul(builder.fdiv(score, limit), two))
        builder.store(builder.fmul(limit, builder.fsub(one, builder.fdiv(two, builder.fadd(power, one)))), result)
    return builder.load(result)
