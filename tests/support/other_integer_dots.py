"""Switches integer kernels to the path of other CPUs, as a pytest plugin: without `vpdpbusd` if this CPU has it, else with it.

`python -m pytest -p tests.support.other_integer_dots ...`, with a kernel cache of its own: compiled code is found by source and CPU.
Where this CPU lacks the instruction, plain words stand in for it.
"""

from __future__ import annotations

import torch
from llvmlite import ir

from headrace.tensor.kernels.cpu.integer import simd as integer_simd

WORD_BITS, BYTE_BITS = 32, 8


def dot_bytes(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """As `integer_simd.dot_bytes`. Each byte becomes a word by a shift up and one down, which compiles much faster than shuffled bytes."""
    a, b = (builder.bitcast(each, total.type) for each in (a, b))
    down = ir.Constant(total.type, [WORD_BITS - BYTE_BITS] * total.type.count)
    for up in range(0, WORD_BITS, BYTE_BITS):
        place = ir.Constant(total.type, [up] * total.type.count)
        product = builder.mul(builder.lshr(builder.shl(a, place), down), builder.ashr(builder.shl(b, place), down))
        total = builder.add(total, product)
    return total


HAD_DOTS = integer_simd.HAS_DOTS
integer_simd.HAS_DOTS = not HAD_DOTS
if not HAD_DOTS:
    integer_simd.dot_bytes = dot_bytes

from headrace.tensor.kernels.cpu.integer import quantized  # noqa: E402  # after the change, which it reads at its import

assert (torch.int8 == quantized.BYTE_INPUT) is not HAD_DOTS, "the kernels were imported before this plugin"
