"""Helpers that the sampling kernels share: reading a row's fields, dividing a row of logits into parts, and ordering floats as integers.

A row has PARTS parts of SIZE tokens, one program for each, which reads C tokens at a time. A later kernel adds the parts up: no program
waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.core.sampling import MAX_LOGPROBS
from headrace.tensor.kernels.choice import IN_PROMPT, Chosen, Field

ID, ROW_SLOT, POSITION, CONTEXT = (tl.constexpr(int(name)) for name in Field if name < Field.SLOT)
SLOT, TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = (tl.constexpr(int(name)) for name in Field if Field.SLOT <= name < Field.REPETITION)
REPETITION, FREQUENCY, PRESENCE, NUM_BIAS, NUM_ENDS, MASK, NUM_TOP = (tl.constexpr(int(name)) for name in Field if name >= Field.REPETITION)
TOKEN, LOGPROB, RANK, TOP_ID, TOP_LOGPROB = (tl.constexpr(int(row)) for row in Chosen)
TOPS = tl.constexpr(MAX_LOGPROBS)
GENERATED = tl.constexpr(IN_PROMPT - 1)

MAX_PARTS, MIN_SIZE, MAX_CHUNK = 16, 1024, 1024


def parts_of(vocab: int) -> dict[str, int]:
    size = max(MIN_SIZE, triton.next_power_of_2(-(-vocab // MAX_PARTS)))
    return {"V": vocab, "PARTS": max(2, triton.next_power_of_2(-(-vocab // size))), "SIZE": size, "C": min(MAX_CHUNK, size)}


@triton.jit
def field(fields_ptr, stride, row, NAME: tl.constexpr):
    return tl.load(fields_ptr + NAME * stride + row)


@triton.jit
def real_field(fields_ptr, stride, row, NAME: tl.constexpr):
    return tl.load(fields_ptr + NAME * stride + row).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row_ptr, token, V: tl.constexpr):
    return tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)


@triton.jit
def order(x, BITS: tl.constexpr):
    """Integers in the order of floats, and the same for both zeros. 16 bits are enough for bfloat16."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    if BITS == 16:
        bits = bits >> 16
    return bits


@triton.jit
def value_of(key, BITS: tl.constexpr):
    bits = key
    if BITS == 16:
        bits = key << 16
    bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    if BITS == 16:
        bits = bits & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def is_penalised(fields_ptr, stride, row):
    repetition, frequency = real_field(fields_ptr, stride, row, REPETITION), real_field(fields_ptr, stride, row, FREQUENCY)
    return (repetition != 1.0) | (frequency != 0.0) | (real_field(fields_ptr, stride, row, PRESENCE) != 0.0)
