"""Vector code for products of small integers, as Numba intrinsics: the inner loops of `quantized`.

A register holds LANES words of 32 bits, one per output column; a word holds four bytes (or eight nibbles) of consecutive inputs. Weights
are stored as unsigned numbers (value + OFFSET); OFFSET times the sum of the inputs is subtracted at the end, and a zero point per group
with it.

The CPU decides the instructions: `vpdpbusd` where it has VNNI (HAS_DOTS), else `vpmaddwd` (bytes, inputs widened to 16 bits) and
`vpmaddubsw` (nibbles, whose pair sums fit 16 bits), else LLVM's translation of the same arithmetic. Sums are exact in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.tensor.kernels.cpu.jit.vector_ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    STREAM_LEVEL,
    VECTOR,
    Emit,
    call_llvm,
    constant,
    fma,
    fold_lanes,
    for_case,
    gep,
    load_floats,
    native_features,
    prefetch_line,
    splat,
    store_floats,
)

WORDS = ir.VectorType(I32, LANES)
SHORTS = ir.VectorType(I16, 2 * LANES)
BYTES = ir.VectorType(I8, 4 * LANES)
STRIP = 4 if LANES == 16 else 2
"""Registers of LANES columns. The sums of four rows then fill half of the CPU's registers."""
STRIP_COLUMNS = STRIP * LANES
AHEAD = 12
GROUPS_AHEAD, LINE_SCALES = 6, 32
ROWS, PAIR, STRIPS = 4, 2, 4
BLOCKS = ((ROWS, 1), (PAIR, PAIR), (1, STRIPS), (1, 1))
"""(rows, strips) of a block. The sums of all but the last fill the same number of registers."""
KEY = max(strips for _, strips in BLOCKS) + 1
BYTE_OFFSET, NIBBLE_OFFSET = 128, 8
HALF = types.int16
"""The element of pointers to float16, for which Numba has no type on CPUs."""
PAIR_ORDER = (0, 2, 1, 3)
"""The order in which four inputs of 16 bits are stored, so that a word's even and odd bytes match neighbouring inputs."""
NIBBLE_RUN = 32
"""Inputs whose nibble products can be summed in 16 bits: 8 pair sums of at most 2 * 15 * 127."""
HAS_DOTS = ("avx512vnni" if LANES == 16 else "avxvnni") in native_features() and LANES >= 8


def _vector(builder: ir.IRBuilder, pointer: ir.Value, like: ir.Type) -> ir.Value:
    return builder.load(builder.bitcast(pointer, like.as_pointer()), align=1)


def _broadcast(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    return splat(builder, builder.load(builder.bitcast(pointer, I32.as_pointer()), align=1), I32)


def _named(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    function_type = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def add_pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """16-bit numbers: word i of the result = a[2i] b[2i] + a[2i + 1] b[2i + 1]."""
    a, b = builder.bitcast(a, SHORTS), builder.bitcast(b, SHORTS)
    if LANES == 16 and "avx512bw" in native_features():
        return _named(builder, "llvm.x86.avx512.pmaddw.d.512", WORDS, a, b)
    if LANES == 8 and "avx2" in native_features():
        return _named(builder, "llvm.x86.avx2.pmadd.wd", WORDS, a, b)
    wide = ir.VectorType(I32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    return _fold_neighbours(builder, products, I32, LANES)


def add_byte_pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """a unsigned bytes, b signed: 16-bit number i of the result = a[2i] b[2i] + a[2i + 1] b[2i + 1], which must fit."""
    a, b = builder.bitcast(a, BYTES), builder.bitcast(b, BYTES)
    if LANES == 16 and "avx512bw" in native_features():
        return _named(builder, "llvm.x86.avx512.pmaddubs.w.512", SHORTS, a, b)
    if LANES == 8 and "avx2" in native_features():
        return _named(builder, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, a, b)
    wide = ir.VectorType(I16, 4 * LANES)
    products = builder.mul(builder.zext(a, wide), builder.sext(b, wide))
    return _fold_neighbours(builder, products, I16, 2 * LANES)


def _fold_neighbours(builder: ir.IRBuilder, values: ir.Value, element: ir.Type, count: int) -> ir.Value:
    even = ir.Constant(ir.VectorType(I32, count), list(range(0, 2 * count, 2)))
    odd = ir.Constant(ir.VectorType(I32, count), list(range(1, 2 * count, 2)))
    return builder.add(builder.shuffle_vector(values, values, even), builder.shuffle_vector(values, values, odd))


def dot_bytes(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """total[i] + the sum of a[4i + j] b[4i + j] over j < 4; a unsigned bytes, b signed. For CPUs with HAS_DOTS."""
    return _named(builder, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", WORDS, total, builder.bitcast(a, WORDS), builder.bitcast(b, WORDS))


# --- inputs: float32 rows to integers ---


@intrinsic
def largest_magnitude(_: Any, pointer: Any, length: Any) -> tuple[Any, Emit]:
    """max |pointer[i]| over `length` float32 or bfloat16, a multiple of LANES; NaN when one of them is NaN or infinite."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        start, count = arguments
        best, poison = (cgutils.alloca_once(builder, VECTOR) for _ in range(2))
        for slot in (best, poison):
            builder.store(constant(VECTOR, 0.0), slot)
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as loop:
            value = load_floats(builder, gep(builder, start, builder.mul(loop.index, I64(LANES))), pointer.dtype, VECTOR)
            builder.store(call_llvm(builder, "llvm.maxnum", builder.load(best), call_llvm(builder, "llvm.fabs", value)), best)
            builder.store(fma(builder, value, constant(VECTOR, 0.0), builder.load(poison)), poison)
        largest = fold_lanes(builder, builder.load(best), partial(call_llvm, builder, "llvm.maxnum"))
        return builder.fadd(largest, fold_lanes(builder, builder.load(poison), builder.fadd))

    return types.float32(pointer, types.intp), emit


@intrinsic
def quantize(_: Any, target: Any, source: Any, length: Any, factor: Any) -> tuple[Any, Emit]:
    """target[i] = round(source[i] * factor), ties to even, within +-127; returns their sum. target int8, or int16 in the order of
    PAIR_ORDER; length a multiple of LANES. NaN becomes any number within the range; its row's scale is NaN."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        target_at, source_at, count, scale = arguments
        stored = ir.VectorType(I8 if target.dtype == types.int8 else I16, LANES)
        scales, total = splat(builder, scale), cgutils.alloca_once(builder, WORDS)
        builder.store(constant(WORDS, 0), total)
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as loop:
            first = builder.mul(loop.index, I64(LANES))
            value = builder.fmul(load_floats(builder, gep(builder, source_at, first), source.dtype, VECTOR), scales)
            value = call_llvm(
                builder, "llvm.minnum", call_llvm(builder, "llvm.maxnum", value, constant(VECTOR, -127.0)), constant(VECTOR, 127.0)
            )
            whole = builder.fptosi(call_llvm(builder, "llvm.rint", value), WORDS)
            builder.store(builder.add(builder.load(total), whole), total)
            if target.dtype == types.int16:
                order = [first + place for first in range(0, LANES, 4) for place in PAIR_ORDER]
                whole = builder.shuffle_vector(whole, whole, ir.Constant(WORDS, order))
            where = builder.bitcast(gep(builder, target_at, first), stored.as_pointer())
            builder.store(builder.trunc(whole, stored), where, align=1)
        return builder.sext(fold_lanes(builder, builder.load(total), builder.add), I64)

    return types.intp(target, source, types.intp, types.float32), emit


# --- blocks: `rows` rows of integers against `strips` strips of STRIP registers of columns ---


def _pointers(builder: ir.IRBuilder, base: ir.Value, stride: ir.Value, count: int) -> list[ir.Value]:
    return [gep(builder, base, builder.mul(stride, I64(i))) for i in range(count)]


def _zeros(builder: ir.IRBuilder, count: int, like: ir.Type) -> list[ir.Value]:
    places = [cgutils.alloca_once(builder, like) for _ in range(count)]
    for place in places:
        builder.store(constant(like, 0), place)
    return places


def _registers(builder: ir.IRBuilder, starts: list[ir.Value]) -> list[ir.Value]:
    return [gep(builder, start, c * LANES) for start in starts for c in range(STRIP)]


def _weights(builder: ir.IRBuilder, places: list[ir.Value]) -> list[ir.Value]:
    words = [_vector(builder, place, WORDS) for place in places]
    for place in places:
        prefetch_line(builder, gep(builder, place, AHEAD * STRIP * LANES), STREAM_LEVEL)
    return words


def _finish(builder: ir.IRBuilder, sums: list[ir.Value], o: BlockOperands, rows: int) -> None:
    registers = len(sums) // rows
    for r in range(rows):
        scale = splat(builder, builder.load(gep(builder, o.row_scales, r)))
        target = gep(builder, o.out, builder.mul(o.out_stride, I64(r)))
        for c in range(registers):
            bias = load_floats(builder, gep(builder, o.bias, c * LANES), types.float32, VECTOR)
            value = fma(builder, sums[r * registers + c], scale, bias)
            store_floats(builder, value, gep(builder, target, c * LANES), types.float32)


class BlockOperands(NamedTuple):
    out: ir.Value
    out_stride: ir.Value
    x: ir.Value
    x_stride: ir.Value
    weights: ir.Value
    strip_stride: ir.Value
    scales: ir.Value
    bias: ir.Value
    row_scales: ir.Value
    sums: ir.Value
    groups: ir.Value
    group: ir.Value
    zeros: ir.Value


@intrinsic
def integer_block(
    _: Any, out: Any, out_stride: Any, x: Any, x_stride: Any, weights: Any, strip_stride: Any, scales: Any, bias: Any, row_scales: Any,
    sums: Any, groups: Any, group: Any, zeros: Any, rows: Any, strips: Any,
) -> tuple[Any, Emit]:  # fmt: skip
    """out[r, c] = row_scales[r] * sum over groups g of scales[g, c] * dot[g, r, c] + bias[c], where dot[g, r, c] = sum over i in g of x[r,
    i] * (weights[i, c] - OFFSET - zeros[g, c]).

    The type of `scales` says which weights these are. float32: bytes, one group, see `_multiply_bytes`; bfloat16 or HALF: nibbles, see
    `_multiply_nibbles`. zeros: HALF; of any other type, there are none. sums int32 [rows, groups]: of x's groups. weights: strips
    strip_stride words apart. rows, strips: one of BLOCKS.
    """
    if scales.dtype == types.float32:
        multiply: Callable[..., None] = _multiply_bytes
    else:
        multiply = partial(_multiply_nibbles, element=scales.dtype, has_zeros=zeros.dtype == HALF)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        operands, given_rows, given_strips = BlockOperands(*arguments[:13]), arguments[13], arguments[14]
        cases = {KEY * rows + strips: partial(multiply, builder, operands, rows, strips) for rows, strips in BLOCKS}
        for_case(builder, builder.add(builder.mul(given_rows, I64(KEY)), given_strips), cases)
        return context.get_dummy_value()

    intp = types.intp
    return types.void(out, intp, x, intp, weights, intp, scales, bias, row_scales, sums, intp, intp, zeros, intp, intp), emit


def _multiply_bytes(builder: ir.IRBuilder, o: BlockOperands, num_rows: int, num_strips: int) -> None:
    """x int8 (HAS_DOTS) or int16 in PAIR_ORDER; weights: per four inputs STRIP registers whose words hold their bytes."""
    registers = num_strips * STRIP
    starts, bases = _pointers(builder, o.x, o.x_stride, num_rows), _pointers(builder, o.weights, o.strip_stride, num_strips)
    totals = _zeros(builder, num_rows * registers, WORDS)
    with cgutils.for_range(builder, builder.udiv(o.group, I64(4))) as loop:
        offset = builder.mul(loop.index, I64(STRIP * LANES))
        words = _weights(builder, _registers(builder, [gep(builder, base, offset) for base in bases]))
        quads = [gep(builder, start, builder.mul(loop.index, I64(4))) for start in starts]
        _add_quads(builder, totals, words, quads)
    scaled = []
    for r in range(num_rows):
        excess = splat(builder, builder.mul(builder.load(gep(builder, o.sums, r)), I32(BYTE_OFFSET)), I32)
        for c in range(registers):
            exact = builder.sub(builder.load(totals[r * registers + c]), excess)
            scale = load_floats(builder, gep(builder, o.scales, c * LANES), types.float32, VECTOR)
            scaled.append(builder.fmul(builder.sitofp(exact, VECTOR), scale))
    _finish(builder, scaled, o, num_rows)


def _add_quads(builder: ir.IRBuilder, totals: list[ir.Value], words: list[ir.Value], quads: list[ir.Value]) -> None:
    even = constant(WORDS, 0x00FF00FF)
    at_once = _at_once(len(quads), len(words))
    for first in range(0, len(words), at_once):
        taken = words[first : first + at_once]
        halves = [] if HAS_DOTS else [(builder.and_(word, even), _high_bytes(builder, word)) for word in taken]
        for r, quad in enumerate(quads):
            inputs = [_broadcast(builder, quad)] if HAS_DOTS else [_broadcast(builder, gep(builder, quad, place)) for place in (0, 2)]
            for c, word in enumerate(taken):
                total = totals[r * len(words) + first + c]
                value = builder.load(total)
                if HAS_DOTS:
                    value = dot_bytes(builder, value, word, inputs[0])
                else:
                    for weights, pairs in zip(halves[c], inputs, strict=True):
                        value = builder.add(value, add_pairs(builder, weights, pairs))
                builder.store(value, total)


def _at_once(rows: int, words: int) -> int:
    """With one or two rows, inputs stay in registers; with more, the words stay."""
    return 1 if rows <= 2 else words


def _high_bytes(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    shorts = builder.bitcast(words, SHORTS)
    return builder.lshr(shorts, constant(SHORTS, 8))


def _multiply_nibbles(
    builder: ir.IRBuilder, o: BlockOperands, num_rows: int, num_strips: int, *, element: types.Type, has_zeros: bool
) -> None:
    """x int8; weights: per eight inputs STRIP registers; the low nibbles of a word's bytes are inputs 0..3, the high ones 4..7. scales
    bfloat16 or HALF, and zero points HALF, strip by strip [groups, STRIP_COLUMNS]. Groups are added in order, by fused multiply-adds."""
    registers, num_runs = num_strips * STRIP, builder.udiv(o.group, I64(NIBBLE_RUN))
    starts, bases = _pointers(builder, o.x, o.x_stride, num_rows), _pointers(builder, o.weights, o.strip_stride, num_strips)
    strip_scales = builder.mul(o.groups, I64(STRIP_COLUMNS))
    scale_bases = _pointers(builder, o.scales, strip_scales, num_strips)
    zero_bases = _pointers(builder, o.zeros, strip_scales, num_strips) if has_zeros else []
    totals, wholes = _zeros(builder, num_rows * registers, VECTOR), _zeros(builder, num_rows * registers, WORDS)
    with cgutils.for_range(builder, o.groups) as group:
        for whole in wholes:
            builder.store(constant(WORDS, 0), whole)
        with cgutils.for_range(builder, num_runs) as run:
            number = builder.add(builder.mul(group.index, num_runs), run.index)
            offset = builder.mul(number, I64(NIBBLE_RUN // 8 * STRIP * LANES))
            quads = [gep(builder, start, builder.mul(number, I64(NIBBLE_RUN))) for start in starts]
            _nibble_run(builder, wholes, quads, [gep(builder, base, offset) for base in bases])
        first = builder.mul(group.index, I64(STRIP_COLUMNS))
        group_scales = [gep(builder, base, first) for base in scale_bases]
        group_zeros = [gep(builder, base, first) for base in zero_bases]
        for place in (*group_scales, *group_zeros):
            for line in range(0, STRIP_COLUMNS, LINE_SCALES):
                prefetch_line(builder, gep(builder, place, GROUPS_AHEAD * STRIP_COLUMNS + line))
        scales_now = [_load_scales(builder, place, element) for place in _registers(builder, group_scales)]
        zeros_now = [_load_scales(builder, place, HALF) for place in _registers(builder, group_zeros)]
        for r in range(num_rows):
            place = builder.add(builder.mul(o.groups, I64(r)), group.index)
            row_sum = builder.load(gep(builder, o.sums, place))
            excess = splat(builder, builder.mul(row_sum, I32(NIBBLE_OFFSET)), I32)
            less = splat(builder, builder.sitofp(builder.neg(row_sum), F32)) if has_zeros else None
            for c, scale in enumerate(scales_now):
                exact = builder.sitofp(builder.sub(builder.load(wholes[r * registers + c]), excess), VECTOR)
                if less is not None:
                    exact = fma(builder, less, zeros_now[c], exact)
                total = totals[r * registers + c]
                builder.store(fma(builder, exact, scale, builder.load(total)), total)
    _finish(builder, [builder.load(total) for total in totals], o, num_rows)


def _load_scales(builder: ir.IRBuilder, place: ir.Value, element: types.Type) -> ir.Value:
    if element != HALF:
        return load_floats(builder, place, element, VECTOR)
    bits = _vector(builder, place, ir.VectorType(I16, LANES))
    if {"avx512f", "f16c"} & native_features():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
    wide = builder.zext(bits, WORDS)
    magnitude = builder.bitcast(builder.shl(builder.and_(wide, constant(WORDS, 0x7FFF)), constant(WORDS, 13)), VECTOR)
    sign = builder.shl(builder.and_(wide, constant(WORDS, 0x8000)), constant(WORDS, 16))
    value = builder.fmul(magnitude, constant(VECTOR, 2.0**112))  # the exponent's other bias
    return builder.bitcast(builder.or_(builder.bitcast(value, WORDS), sign), VECTOR)


def _nibble_run(builder: ir.IRBuilder, wholes: list[ir.Value], quads: list[ir.Value], chunks: list[ir.Value]) -> None:
    low = constant(WORDS, 0x0F0F0F0F)
    like = WORDS if HAS_DOTS else SHORTS
    sums: list[ir.Value] = [constant(like, 0)] * len(wholes)
    for octet in range(NIBBLE_RUN // 8):
        places = _registers(builder, [gep(builder, chunk, octet * STRIP * LANES) for chunk in chunks])
        at_once = _at_once(len(quads), len(places))
        for first in range(0, len(places), at_once):
            words = _weights(builder, places[first : first + at_once])
            halves = [(builder.and_(word, low), builder.and_(builder.lshr(word, constant(WORDS, 4)), low)) for word in words]
            for r, start in enumerate(quads):
                for half in range(2):
                    inputs = _broadcast(builder, gep(builder, start, octet * 8 + half * 4))
                    for c in range(len(words)):
                        place = r * len(places) + first + c
                        if HAS_DOTS:
                            sums[place] = dot_bytes(builder, sums[place], halves[c][half], inputs)
                        else:
                            sums[place] = builder.add(sums[place], add_byte_pairs(builder, halves[c][half], inputs))
    ones = constant(SHORTS, 1)
    for whole, added in zip(wholes, sums, strict=True):
        products = added if HAS_DOTS else add_pairs(builder, added, ones)
        builder.store(builder.add(builder.load(whole), products), whole)
