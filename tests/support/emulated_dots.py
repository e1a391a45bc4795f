"""A pytest plugin: kernels take the path of CPUs with `vpdpbusd`, and plain words stand in for that instruction.

`python -m pytest -p tests.support.emulated_dots ...`, with a kernel cache of its own: compiled code on disk is found by source and CPU.
"""

from __future__ import annotations

from llvmlite import ir

from headrace.tensor.kernels.cpu.integer import simd as integer_simd
from headrace.tensor.kernels.cpu.jit.vector_ir import I32, LANES


def dot_bytes(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """As `integer_simd.dot_bytes`, lane by lane."""
    wide = ir.VectorType(I32, 4 * LANES)
    products = builder.mul(
        builder.zext(builder.bitcast(a, integer_simd.BYTES), wide), builder.sext(builder.bitcast(b, integer_simd.BYTES), wide)
    )
    for first in range(4):
        places = ir.Constant(ir.VectorType(I32, LANES), list(range(first, 4 * LANES, 4)))
        total = builder.add(total, builder.shuffle_vector(products, products, places))
    return total


integer_simd.HAS_DOTS = True
integer_simd.dot_bytes = dot_bytes
