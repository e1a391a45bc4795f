"""Pointers and scalars as Numba intrinsics: what a kernel is written in beside the vector code of `jit.simd`.

A typed pointer made from a tensor's address (`as_f32`, ...) says how an element is stored, so one kernel source compiles for float32 and
for bfloat16 (uint16 bits). The caller keeps the tensor alive and has checked its shape: no bounds are checked here.
"""

from __future__ import annotations

import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.tensor.kernels.cpu.jit.vector_ir import (
    F32,
    I32,
    I64,
    ITEM_BYTES,
    STORED,
    Emit,
    emit_exp,
    gep,
    load_floats,
    native_features,
    prefetch_line,
    store_floats,
)


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
as_f16 = as_i16
"""Numba has no float16 on CPUs; what reads it takes the bits (`integer.simd.HALF`)."""


@intrinsic
def read_arguments(_: Any, layout: Any, address: Any) -> tuple[Any, Emit]:
    """`layout` is a NamedTuple class, whose fields are the int64 words at `address`, in order."""
    words = types.NamedUniTuple(types.intp, len(layout.instance_class._fields), layout.instance_class)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        first = builder.inttoptr(arguments[1], I64.as_pointer())
        return context.make_tuple(builder, words, [builder.load(gep(builder, first, i), align=8) for i in range(len(words))])

    return words(layout, types.intp), emit


@intrinsic
def at(_: Any, pointer: Any, index: Any) -> tuple[Any, Emit]:
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
    """Atomically counter[0] += 1; returns the old value."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.atomic_rmw("add", arguments[0], I64(1), "monotonic")

    return types.intp(counter), emit


@intrinsic
def increment(_: Any, counter: Any) -> tuple[Any, Emit]:
    """Atomically counter[0] += 1; returns the old value. A thread that reads the new value with `load_acquire`, or increments it, sees what
    this thread wrote before."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.atomic_rmw("add", arguments[0], I64(1), "acq_rel")

    return types.intp(counter), emit


@intrinsic
def load_acquire(_: Any, counter: Any) -> tuple[Any, Emit]:
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
def monotonic_ns(_: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        clock = cgutils.alloca_once(builder, I64, size=2)
        function_type = ir.FunctionType(I32, [I32, clock.type])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "clock_gettime"), [I32(time.CLOCK_MONOTONIC), clock])
        seconds, nanoseconds = (builder.load(gep(builder, clock, i)) for i in range(2))
        return builder.add(builder.mul(seconds, I64(1_000_000_000)), nanoseconds)

    return types.intp(), emit


@intrinsic
def pause(_: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        if "sse2" in native_features():
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit
