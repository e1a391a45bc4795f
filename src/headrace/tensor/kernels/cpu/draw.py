"""Draws one token for each random row of logits, on all threads. `filters` defines which tokens are kept, and is the test oracle.

A token depends on its row, its limits and u alone.

Weights may differ from the oracle's in the last place of exp, and sums in the order of additions: where u is that close to a border between
two tokens, the other one is drawn.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from headrace.tensor.kernels.cpu.elementwise import share
from headrace.tensor.kernels.cpu.jit.launch import (
    bits_of_float,
    compile_kernel,
    double_from_bits,
    float_from_bits,
    helper,
    launch,
    thread_limit,
)
from headrace.tensor.kernels.cpu.jit.scalars import as_f32, as_i32, as_i64, at, exp, load, read_arguments, store
from headrace.tensor.kernels.cpu.jit.simd import sum_floats
from headrace.tensor.kernels.filters import Doubles, FilterLimits, Floats, Ints

Pointer = Any

BLOCK = 256
LEAST_BITS, ONE_BITS = 0x00800000, 0x3F800000
"""Bits of the smallest normal float32, which no weight above zero is below; and of 1, the largest weight."""
SPARE = 64
"""Tokens beyond 2k that may be gathered for top_k: the exact k-th weight is searched among the gathered ones only."""
UNDERFLOW = np.float32(-87.0)
ZERO, ONE = np.float32(0.0), np.float32(1.0)
ELEMENTS_PER_THREAD = 1 << 14


@helper
def weigh(logits: Pointer, weights: Pointer, sums: Pointer, vocab: int, peak: float, temperature: float) -> float:
    """Returns the whole sum. Below e**-87 a weight is 0 (the oracle keeps denormal numbers)."""
    mass = 0.0
    for first in range(0, vocab, BLOCK):
        length = min(BLOCK, vocab - first)
        source, target = at(logits, first), at(weights, first)
        for i in range(length):
            x = (load(source, i) - peak) / temperature
            store(exp(x) * (ONE if x > UNDERFLOW else ZERO), target, i)  # no branch: LLVM makes vectors of it
        total = sum_floats(target, length)
        store(total, sums, first // BLOCK)
        mass += total
    return mass


@helper
def first_beyond(weights: Pointer, count: int, running: float, target: float) -> int:
    """The first place at which `running` plus the weights up to it exceed target; the last weight above zero if none does."""
    found = 0
    for i in range(count):
        weight = load(weights, i)
        if weight > ZERO:
            found = i
            running += weight
            if running > target:
                break
    return found


@helper
def pick_any(weights: Pointer, sums: Pointer, vocab: int, target: float) -> int:
    block, before, running = 0, 0.0, 0.0
    for i in range((vocab + BLOCK - 1) // BLOCK):
        total = load(sums, i)
        if total > ZERO:
            block, before = i, running
            running += total
            if running > target:
                break
    first = block * BLOCK
    return first + first_beyond(at(weights, first), min(BLOCK, vocab - first), before, target)


@helper
def num_at_least(weights: Pointer, count: int, floor: float) -> int:
    found = 0
    for i in range(count):
        found += 1 if load(weights, i) >= floor else 0
    return found


@helper
def floor_of_best(weights: Pointer, vocab: int, k: int) -> float:
    """A weight that at least k tokens reach and few more than 2k, unless many are equal."""
    low, high = LEAST_BITS, ONE_BITS + 1
    if num_at_least(weights, vocab, float_from_bits(low)) <= 2 * k + SPARE:
        high = low
    while high - low > 1:
        middle = (low + high) // 2
        count = num_at_least(weights, vocab, float_from_bits(middle))
        if count < k:
            high = middle
        else:
            low = middle
            if count <= 2 * k + SPARE:
                break
    floor: float = float_from_bits(low)
    return floor


@helper
def gather(weights: Pointer, vocab: int, floor: float, values: Pointer, ids: Pointer) -> int:
    """Ids are written in their order; returns the number of weights at or above the floor."""
    found = 0
    for first in range(0, vocab, BLOCK):
        length = min(BLOCK, vocab - first)
        block = at(weights, first)
        if num_at_least(block, length, floor) > 0:
            for i in range(length):  # no branch: it could not be predicted
                weight = load(block, i)
                store(weight, values, found)
                store(first + i, ids, found)
                found += 1 if weight >= floor else 0
    return found


@helper
def keep(values: Pointer, ids: Pointer, count: int, least: float, ties: int) -> int:
    """Keep, in place, the weights above `least` and the first `ties` weights equal to it; returns their number."""
    kept = 0
    for i in range(count):
        weight = load(values, i)
        is_tied = weight == least and ties > 0
        store(weight, values, kept)
        store(load(ids, i), ids, kept)
        kept += 1 if weight > least or is_tied else 0
        ties -= 1 if is_tied else 0
    return kept


@helper
def cut(values: Pointer, spare: Pointer, ids: Pointer, count: int, floor: float, wanted: float, is_mass: bool) -> int:
    """Keep the fewest heaviest weights that reach `wanted`, in mass or in number. spare: memory for `count` weights."""
    for i in range(count):
        store(load(values, i), spare, i)
    low, high, above, left = bits_of_float(floor), ONE_BITS, 0.0, count
    while low < high and left > 0:
        middle = (low + high + 1) // 2
        border = float_from_bits(middle)
        found: Any = 0.0
        for i in range(left):
            weight = load(spare, i)
            found += (weight if is_mass else ONE) if weight >= border else ZERO
        is_within = above + found >= wanted
        kept = 0
        for i in range(left):
            weight = load(spare, i)
            store(weight, spare, kept)
            kept += 1 if (weight >= border) == is_within else 0
        left = kept
        if is_within:
            low = middle
        else:
            above += found
            high = middle - 1
    least, ties = float_from_bits(low), 0
    while ties < count and above < wanted:
        above += least if is_mass else 1.0
        ties += 1
    return keep(values, ids, count, least, ties)


@helper
def mass_of(values: Pointer, count: int) -> float:
    total = 0.0
    for i in range(count):
        total += load(values, i)
    return total


@helper
def pick_kept(scratch: Pointer, ids: Pointer, vocab: int, mass: float, u: float, top_k: int, top_p: float, min_p: float) -> int:
    """The floor for top_p is (1 - top_p) of the mean weight: lighter tokens together weigh less than (1 - top_p) of the whole. It is one
    per cent lower, for rounding. scratch: see `DrawArguments`."""
    weights, values, spare = scratch, at(scratch, vocab), at(scratch, 2 * vocab)
    if top_k < vocab:
        floor = floor_of_best(weights, vocab, top_k)
        count = gather(weights, vocab, floor, values, ids)
        if count > top_k:
            count = cut(values, spare, ids, count, floor, float(top_k), False)
        mass = mass_of(values, count)
    else:
        floor = max(np.float32(0.99 * (1.0 - top_p) * mass / vocab), min_p, float_from_bits(LEAST_BITS))
        count = gather(weights, vocab, floor, values, ids)
    if top_p < 1.0:
        count = cut(values, spare, ids, count, floor, top_p * mass, True)
    if min_p > 0.0:
        count = keep(values, ids, count, min_p, count)
    token: int = load(ids, first_beyond(values, count, 0.0, u * mass_of(values, count)))
    return token


class DrawArguments(NamedTuple):
    """All but logits_row (a stride in elements), rows and vocab are addresses.

    peak, temperature, min_p float32 [rows]; u, top_p float64 [rows]; top_k, tokens int64 [rows]
    scratch  float32 [workers, 4, vocab]: a worker's weights, values, spare and block sums
    ids      int32 [workers, vocab]
    """

    logits: int
    logits_row: int
    rows: int
    vocab: int
    peak: int
    temperature: int
    u: int
    top_k: int
    top_p: int
    min_p: int
    scratch: int
    ids: int
    tokens: int


def _draw(arguments: int, worker: int, workers: int) -> None:
    a: DrawArguments = read_arguments(DrawArguments, arguments)
    vocab = a.vocab
    scratch = at(as_f32(a.scratch), worker * 4 * vocab)
    sums = at(scratch, 3 * vocab)
    ids = at(as_i32(a.ids), worker * vocab)
    first, last = share(a.rows, worker, workers)
    for row in range(first, last):
        logits = at(as_f32(a.logits), row * a.logits_row)
        peak, temperature = load(as_f32(a.peak), row), load(as_f32(a.temperature), row)
        mass = weigh(logits, scratch, sums, vocab, peak, temperature)
        u, top_k = double_from_bits(load(as_i64(a.u), row)), load(as_i64(a.top_k), row)
        top_p, min_p = double_from_bits(load(as_i64(a.top_p), row)), load(as_f32(a.min_p), row)
        if top_k >= vocab and top_p >= 1.0 and min_p <= ZERO:
            token = pick_any(scratch, sums, vocab, u * mass)
        else:
            token = pick_kept(scratch, ids, vocab, mass, u, top_k, top_p, min_p)
        store(token, as_i64(a.tokens), row)


@cache
def kernel() -> int:
    return compile_kernel(_draw)


def draw(logits: Floats, peak: Floats, u: Doubles, limits: FilterLimits) -> Ints:
    """See `filters.draw`; rows of logits may be strided. Raises ValueError where the logits of a row are not contiguous."""
    rows, vocab = logits.shape
    if logits.dtype != np.float32 or logits.strides[1] != logits.itemsize:
        raise ValueError(f"logits of {logits.dtype} with strides {logits.strides}: float32 is needed, a row's numbers one behind the other")
    columns = {
        name: np.ascontiguousarray(column, dtype)
        for name, column, dtype in (
            ("peak", peak, np.float32),
            ("temperature", limits.temperature, np.float32),
            ("u", u, np.float64),
            ("top_k", limits.top_k, np.int64),
            ("top_p", limits.top_p, np.float64),
            ("min_p", limits.min_p, np.float32),
        )
    }
    workers = max(1, min(thread_limit(), rows, rows * vocab // ELEMENTS_PER_THREAD))
    scratch, ids = np.empty((workers, 4, vocab), dtype=np.float32), np.empty((workers, vocab), dtype=np.int32)
    tokens = np.empty(rows, dtype=np.int64)
    arguments = DrawArguments(
        logits=logits.ctypes.data,
        logits_row=logits.strides[0] // logits.itemsize,
        rows=rows,
        vocab=vocab,
        scratch=scratch.ctypes.data,
        ids=ids.ctypes.data,
        tokens=tokens.ctypes.data,
        **{name: column.ctypes.data for name, column in columns.items()},
    )
    launch(kernel(), arguments, workers, tokens, logits, scratch, ids, *columns.values())
    return tokens
