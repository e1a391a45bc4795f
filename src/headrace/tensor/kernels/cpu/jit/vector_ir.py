"""Functions that emit LLVM instructions, for the intrinsics of `simd`; and what kernels know of the CPU they are compiled for.

Values are float32, scalars or vectors of LANES, one register of this CPU. Stored elements are float32, bfloat16 (seen as uint16) or int8.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils, config

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
Emit = Callable[[Any, ir.IRBuilder, Any, Any], Any]


@functools.cache
def native_features() -> frozenset[str]:
    if named := config.CPU_FEATURES:
        return frozenset(name[1:] for name in named.split(",") if name.startswith("+"))
    return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)


def native_lanes() -> int:
    features = native_features()
    if "avx512f" in features:
        return 16
    return 8 if "avx" in features else 4


LANES = native_lanes()
STRIP_VECTORS = 2
STRIP_COLUMNS = STRIP_VECTORS * LANES

PANEL_ROWS = {16: (12, 8, 4, 2, 1), 8: (6, 4, 2, 1)}.get(LANES, (4, 2, 1))
"""Rows of x that are multiplied at once, largest first. The sums of the largest panel and one strip fill 24 of AVX-512's 32 registers, or
12 of AVX2's 16. No size exceeds LANES, as `simd.pack_queries` requires."""

HAS_BF16_DOTS = LANES == 16 and "avx512bf16" in native_features()

FIRST_LEVEL, SECOND_LEVEL = 3, 2
"""LLVM's numbers of the caches into which memory can be prefetched."""
STREAM_LEVEL = SECOND_LEVEL if HAS_BF16_DOTS else FIRST_LEVEL
"""CPUs with AVX512-BF16 take the second level, which keeps more lines in flight: measured on Zen 4 alone (docs/experiments.md)."""

VECTOR = ir.VectorType(F32, LANES)
ITEM_BYTES = {types.float32: 4, types.uint16: 2, types.int8: 1, types.int16: 2, types.int32: 4, types.int64: 8}
STORED = {types.float32: F32, types.uint16: I16, types.int8: I8, types.int16: I16, types.int32: I32, types.int64: I64}


def shaped(like: ir.Type, scalar: ir.Type) -> ir.Type:
    return ir.VectorType(scalar, like.count) if isinstance(like, ir.VectorType) else scalar


def constant(like: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(like, [value] * like.count) if isinstance(like, ir.VectorType) else ir.Constant(like, value)


def splat(builder: ir.IRBuilder, scalar: ir.Value, scalar_type: ir.Type = F32) -> ir.Value:
    vector = ir.VectorType(scalar_type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, I32(0)), undefined, zeros)


def call_llvm(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> ir.Value:
    result = arguments[0].type
    suffix = f"v{result.count}f32" if isinstance(result, ir.VectorType) else "f32"
    function_type = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"{name}.{suffix}"), arguments)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_llvm(builder, "llvm.fma", a, b, c)


class _BFloat(ir.Type):
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def widened(builder: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """The two bfloat16 of each word as float32, those of the low halves first."""
    low, high = builder.shl(word, constant(word.type, 16)), builder.and_(word, constant(word.type, -65536))
    return [builder.bitcast(half, shaped(word.type, F32)) for half in (low, high)]


def dot_pairs(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """total + the products of the two bfloat16 of each word of a and b.

    The instruction rounds in another order than fused multiply-adds, and takes numbers below 2**-126 for zero.
    """
    if not HAS_BF16_DOTS:
        for left, right in zip(widened(builder, a), widened(builder, b), strict=True):
            total = fma(builder, left, right, total)
        return total
    return emit_dot(builder, total, a, b)


def emit_dot(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    pairs = ir.VectorType(_BFloat(), 32)
    function_type = ir.FunctionType(total.type, [total.type, pairs, pairs])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])


def gep(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
    return builder.gep(pointer, [index if isinstance(index, ir.Value) else I64(index)])


def prefetch_line(builder: ir.IRBuilder, pointer: ir.Value, level: int = FIRST_LEVEL) -> None:
    """The address may be anything: a hint cannot fail."""
    byte_pointer = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, byte_pointer), I32(0), I32(level), I32(1)])


def load_floats(builder: ir.IRBuilder, pointer: ir.Value, element: types.Type, like: ir.Type) -> ir.Value:
    stored = shaped(like, STORED[element])
    value = builder.load(builder.bitcast(pointer, stored.as_pointer()), align=ITEM_BYTES[element])
    if element == types.float32:
        return value
    if element == types.int8:
        return builder.sitofp(builder.sext(value, shaped(like, I32)), like)
    wide = builder.zext(value, shaped(like, I32))
    return builder.bitcast(builder.shl(wide, constant(wide.type, 16)), like)


def rounded_bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """bfloat16 stands in the low halves of words: rounded to nearest, ties to even, NaN stays NaN."""
    bits = builder.bitcast(value, shaped(value.type, I32))
    one, sixteen = constant(bits.type, 1), constant(bits.type, 16)
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(bits.type, 0x7FFF))), sixteen)
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(bits.type, 0x7FC0), rounded)


def store_floats(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, element: types.Type) -> None:
    if element == types.uint16:
        value = builder.trunc(rounded_bits(builder, value), shaped(value.type, I16))
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=ITEM_BYTES[element])


def for_case(builder: ir.IRBuilder, value: ir.Value, cases: Mapping[int, Callable[[], None]]) -> None:
    """Jump to the case whose key is `value`, at run time; the last case serves every other value."""
    *keys, last = cases
    blocks, end = {key: builder.append_basic_block() for key in cases}, builder.append_basic_block()
    switch = builder.switch(value, blocks[last])
    for key in keys:
        switch.add_case(value.type(key), blocks[key])
    for key, emit in cases.items():
        builder.position_at_end(blocks[key])
        emit()
        builder.branch(end)
    builder.position_at_end(end)


def part_of(builder: ir.IRBuilder, value: ir.Value, first: int, count: int) -> ir.Value:
    if count == 1:
        return builder.extract_element(value, I32(first))
    return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, count), list(range(first, first + count))))


def transpose(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """LANES vectors as columns: lane c of the d-th result is lane d of rows[c]."""
    pairs, half = [(i, LANES + i) for i in range(LANES)], LANES // 2
    order = [lane for pair in pairs for lane in pair]
    low, high = (ir.Constant(ir.VectorType(I32, LANES), part) for part in (order[:LANES], order[LANES:]))
    for _ in range(LANES.bit_length() - 1):
        rows = [builder.shuffle_vector(rows[i], rows[i + half], mask) for i in range(half) for mask in (low, high)]
    return rows


def fold_lanes(builder: ir.IRBuilder, value: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        value = join(part_of(builder, value, 0, lanes), part_of(builder, value, lanes, lanes))
    return value


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns b where either is NaN. One instruction on x86, where "llvm.maxnum" takes three."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def emit_exp(builder: ir.IRBuilder, x: ir.Value, *, is_positive: bool = True) -> ir.Value:
    """e**x as x = n ln 2 + r, a polynomial in r, times 2**n. Below -87 it is e**-87, above 88 infinite; NaN stays NaN.

    is_positive: x may be above 88.
    """
    value = functools.partial(constant, x.type)
    given, limit = x, value(88.0)
    x = larger(builder, value(-87.0), x)
    if is_positive:
        x = call_llvm(builder, "llvm.minnum", x, limit)
    n = call_llvm(builder, "llvm.rint", builder.fmul(x, value(1.44269504088896341)))
    r = fma(builder, n, value(-0.693359375), x)
    r = fma(builder, n, value(2.12194440e-4), r)
    p = value(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(builder, p, r, value(coefficient))
    p = builder.fadd(fma(builder, p, builder.fmul(r, r), r), value(1.0))
    integer = shaped(x.type, I32)
    exponent = builder.shl(builder.add(builder.fptosi(n, integer), constant(integer, 127)), constant(integer, 23))
    result = builder.fmul(p, builder.bitcast(exponent, x.type))
    if not is_positive:
        return result
    # Where `given <= limit` is false, `given` is above the limit or NaN, and `given` times infinity is infinite or NaN.
    inside = builder.fcmp_ordered("<=", given, limit)
    return builder.select(inside, result, builder.fmul(given, value(math.inf)))
