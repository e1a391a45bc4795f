"""Paged attention over a ragged batch for the CPU: online softmax in float32, GQA, window, softcap.

Work is cut into items: one row, one key/value head, a chunk of queries (all query heads of the group together, so that each key is read
once) and a range of context splits. Workers take items from a shared counter, so a long prefill beside short decodes leaves no thread
idle.

Two promises, both tested to the bit:

- A query's result depends on its own row alone. Tiles (TILE keys) and splits (SPLIT keys) stand at absolute positions, each tile's
  arithmetic is written down in `simd`, and splits are folded left to right whether one worker walks them or several shared them.
  So neighbours, the chunking of a prefill, prefix hits and the number of threads change nothing.
- Slots the row may not see are never read: they may hold anything, NaN included.

Head size, group count, block size and window are run-time numbers: the inner loops of `simd` run over whole registers, and fixing these
numbers at compile time gained 0 to 4 % (docs/experiments.md). Only element types are compiled in.
Reference: `reference.ReferenceKernels.attention`. Idea of the splits: flash-decoding, Dao et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from headrace.tensor.kernels.attention_plan import NO_WINDOW, ROWS, SPLIT, Item, padded_vectors, plan_items, read_item
from headrace.tensor.kernels.launch import (
    compile_kernel,
    entry,
    float_bits,
    float_from_bits,
    helper,
    launch,
    thread_limit,
    with_counter,
)
from headrace.tensor.kernels.simd import (
    as_bf16,
    as_f32,
    as_i32,
    as_i64,
    at,
    dot_block,
    exp,
    load,
    prefetch,
    softmax_tile,
    store,
    take_ticket,
    value_block,
)
from headrace.tensor.kernels.vector_ir import COLUMNS, LANES

TILE = 64
AHEAD = 16
"""Keys between a prefetch and its use."""
NOTHING, ZERO, ONE = np.float32(-3.0e38), np.float32(0.0), np.float32(1.0)

Pointer = Any
"""A typed pointer of `simd`, inside compiled code."""


class Geometry(NamedTuple):
    """Where things are. Strides in elements; last dimensions are contiguous; out is [T, H, D] contiguous."""

    query: Pointer
    query_token: int
    query_head: int
    cache: Pointer
    cache_block: int
    cache_value: int
    cache_slot: int
    cache_head: int
    block_size: int
    table: Pointer
    table_row: int
    out: Pointer
    heads: int
    group: int
    head_dim: int
    window: int
    scale: float
    softcap: float


class Scratch(NamedTuple):
    """One worker's memory: float32 [vectors, D] (queries, sums, total), [vectors, TILE] (scores), [vectors] (the rest) and int64 [SPLIT]
    (keys: element offsets into the cache). `sums` is the running split, `total` the folded splits before it."""

    queries: Pointer
    sums: Pointer
    total: Pointer
    scores: Pointer
    peaks: Pointer
    masses: Pointer
    total_peaks: Pointer
    total_masses: Pointer
    keys: Pointer


# --- one item ---


@helper
def scratch_floats(vectors: int, head_dim: int) -> int:
    return vectors * (3 * head_dim + TILE + 4) + 2 * SPLIT


@helper
def place_scratch(address: int, vectors: int, head_dim: int) -> Scratch:
    """Lay a worker's scratch out in `scratch_floats` float32."""
    memory, row = as_f32(address), vectors * head_dim
    scores, marks = at(memory, 3 * row), at(memory, 3 * row + vectors * TILE)
    keys = as_i64(address + (3 * row + vectors * (TILE + 4)) * 4)
    return Scratch(
        memory,
        at(memory, row),
        at(memory, 2 * row),
        scores,
        marks,
        at(marks, vectors),
        at(marks, 2 * vectors),
        at(marks, 3 * vectors),
        keys,
    )


@helper
def clear(sums: Pointer, peaks: Pointer, masses: Pointer, vectors: int, head_dim: int) -> None:
    """Start of a running softmax: nothing seen yet."""
    for index in range(vectors * head_dim):
        store(ZERO, sums, index)
    for vector in range(vectors):
        store(NOTHING, peaks, vector)
        store(ZERO, masses, vector)


@helper
def fold(
    total: Pointer, total_peaks: Pointer, total_masses: Pointer, part: Pointer, peaks: Pointer, masses: Pointer, vectors: int, head_dim: int
) -> None:
    """Add a later part of the context to `total`, for `vectors` query vectors; both unnormalised, each relative to its own peak."""
    for vector in range(vectors):
        old, new = load(total_peaks, vector), load(peaks, vector)
        peak = max(old, new)
        keep, add = exp(old - peak), exp(new - peak)
        for d in range(vector * head_dim, (vector + 1) * head_dim):
            store(load(total, d) * keep + load(part, d) * add, total, d)
        store(load(total_masses, vector) * keep + load(masses, vector) * add, total_masses, vector)
        store(peak, total_peaks, vector)


@helper
def read_queries(g: Geometry, item: Item, queries: Pointer, used: int) -> None:
    """The item's query vectors, scaled, token by token and head by head; zeros fill the last block of rows."""
    for vector in range(used):
        token, head = item.token + vector // g.group, item.kv_head * g.group + vector % g.group
        source, target = at(g.query, token * g.query_token + head * g.query_head), at(queries, vector * g.head_dim)
        for d in range(g.head_dim):
            store(load(source, d) * g.scale, target, d)
    for index in range(used * g.head_dim, (used + ROWS - 1) // ROWS * ROWS * g.head_dim):
        store(ZERO, queries, index)


@helper
def write_out(g: Geometry, item: Item, sums: Pointer, masses: Pointer) -> None:
    for vector in range(item.num_tokens * g.group):
        token, head = item.token + vector // g.group, item.kv_head * g.group + vector % g.group
        source, target = at(sums, vector * g.head_dim), at(g.out, (token * g.heads + head) * g.head_dim)
        share = ONE / load(masses, vector)
        for d in range(g.head_dim):
            store(load(source, d) * share, target, d)


@helper
def locate(g: Geometry, keys: Pointer, item: Item, start: int, low: int, high: int) -> None:
    """Cache offsets of the item's keys at positions start + [low, high); a value stands g.cache_value behind its key.

    Whole blocks of COLUMNS are filled: places outside the range repeat the nearest key inside it, so that nothing else is ever read.
    """
    head, blocks = item.kv_head * g.cache_head, at(g.table, item.row * g.table_row)
    block = (start + low) // g.block_size
    slot = start + low - block * g.block_size
    base = head + load(blocks, block) * g.cache_block
    for j in range(low, high):
        if slot == g.block_size:
            block, slot = block + 1, 0
            base = head + load(blocks, block) * g.cache_block
        store(base + slot * g.cache_slot, keys, j)
        slot += 1
    for j in range(low // COLUMNS * COLUMNS, low):
        store(load(keys, low), keys, j)
    for j in range(high, (high + COLUMNS - 1) // COLUMNS * COLUMNS):
        store(load(keys, high - 1), keys, j)


@helper
def attend_tile(g: Geometry, scratch: Scratch, keys: Pointer, position: int, used: int, low: int, high: int, ahead: int) -> None:
    """Scores, softmax step and weighted values of one tile.

    keys: the tile's offsets, filled at [low, high) and, for prefetching, up to `ahead`. position: of the item's first query, counted
    from the tile's start. Values are asked for while scores are computed, keys a few blocks before their turn.
    """
    first, dim = low // COLUMNS * COLUMNS, g.head_dim
    values = at(g.cache, g.cache_value)
    for vector in range(0, used, ROWS):
        left, out = at(scratch.queries, vector * dim), at(scratch.scores, vector * TILE)
        for j in range(first, high, COLUMNS):
            if vector == 0:
                for k in range(j, j + COLUMNS):
                    prefetch(values, load(keys, k), dim)
                    if k + AHEAD < ahead:
                        prefetch(g.cache, load(keys, k + AHEAD), dim)
            dot_block(at(out, j), TILE, left, dim, g.cache, at(keys, j), dim, ROWS)
    for vector in range(used):
        here = position + vector // g.group
        begin, end, old = max(low, here - g.window + 1), min(high, here + 1), load(scratch.peaks, vector)
        peak, mass = softmax_tile(at(scratch.scores, vector * TILE), begin, end, old, g.softcap, TILE)
        if peak > old:
            shrink = exp(old - peak)
            for d in range(vector * dim, (vector + 1) * dim):
                store(load(scratch.sums, d) * shrink, scratch.sums, d)
            store(load(scratch.masses, vector) * shrink, scratch.masses, vector)
            store(peak, scratch.peaks, vector)
        store(load(scratch.masses, vector) + mass, scratch.masses, vector)
    for vector in range(0, used, ROWS):
        out, weights = at(scratch.sums, vector * dim), at(scratch.scores, vector * TILE)
        for j in range(first, high, COLUMNS):
            value_block(out, at(weights, j), TILE, values, at(keys, j), dim, ROWS)


@helper
def attend_split(g: Geometry, scratch: Scratch, item: Item, used: int, split: int) -> None:
    start = split * SPLIT
    low, high = max(0, item.position - g.window + 1 - start), min(SPLIT, item.position + item.num_tokens - start)
    locate(g, scratch.keys, item, start, low, high)
    for tile in range(low // TILE * TILE, high, TILE):
        attend_tile(
            g, scratch, at(scratch.keys, tile), item.position - start - tile, used, max(low - tile, 0), min(high - tile, TILE), high - tile
        )


# --- all items ---


@helper
def attend_items(g: Geometry, items: Pointer, num_items: int, counter: Pointer, parts: Pointer) -> None:
    """Take items until none is left. `parts` receives, per item of a shared context, float32 [vectors, D + 2]: sums, peaks, masses."""
    vectors, dim = padded_vectors(g.group), g.head_dim
    memory = np.empty(scratch_floats(vectors, dim), np.float32)
    scratch = place_scratch(memory.ctypes.data, vectors, dim)
    index = take_ticket(counter)
    while index < num_items:
        item = read_item(items, index)
        used = item.num_tokens * g.group
        total, peaks, masses = scratch.total, scratch.total_peaks, scratch.total_masses
        if item.part_of >= 0:
            total = at(parts, index * vectors * (dim + 2))
            peaks = at(total, vectors * dim)
            masses = at(peaks, vectors)
        read_queries(g, item, scratch.queries, used)
        clear(total, peaks, masses, vectors, dim)
        for split in range(item.split_first, item.split_last):
            clear(scratch.sums, scratch.peaks, scratch.masses, vectors, dim)
            attend_split(g, scratch, item, used, split)
            fold(total, peaks, masses, scratch.sums, scratch.peaks, scratch.masses, used, dim)
        if item.part_of < 0:
            write_out(g, item, total, masses)
        index = take_ticket(counter)
    memory[0] = ZERO  # the memory lives until here


@helper
def join_parts(g: Geometry, items: Pointer, num_items: int, parts: Pointer) -> None:
    """Fold the parts of each shared context, first to last, into the first one's place, and write the result."""
    vectors, dim = padded_vectors(g.group), g.head_dim
    for index in range(num_items):
        item = read_item(items, index)
        if item.part_of < 0:
            continue
        total, part = at(parts, item.part_of * vectors * (dim + 2)), at(parts, index * vectors * (dim + 2))
        peaks, new_peaks = at(total, vectors * dim), at(part, vectors * dim)
        if index > item.part_of:
            fold(total, peaks, at(peaks, vectors), part, new_peaks, at(new_peaks, vectors), item.num_tokens * g.group, dim)
        if index + 1 == num_items or read_item(items, index + 1).part_of != item.part_of:
            write_out(g, item, total, at(peaks, vectors))


@helper
def read_geometry(a: Pointer, query: Pointer, cache_: Pointer, out: Pointer) -> Geometry:
    """The geometry from a kernel's arguments, in the order of `_arguments`."""
    return Geometry(
        query,
        load(a, 3),
        load(a, 4),
        cache_,
        load(a, 5),
        load(a, 6),
        load(a, 7),
        load(a, 8),
        load(a, 9),
        as_i32(load(a, 10)),
        load(a, 11),
        out,
        load(a, 12),
        load(a, 13),
        load(a, 14),
        load(a, 15),
        float_from_bits(load(a, 16)),
        float_from_bits(load(a, 17)),
    )


@helper
def attend(a: Pointer, query: Pointer, cache_: Pointer, out: Pointer) -> None:
    g = read_geometry(a, query, cache_, out)
    if load(a, 22) == 0:
        attend_items(g, as_i64(load(a, 18)), load(a, 19), as_i64(load(a, 20)), as_f32(load(a, 21)))
    else:
        join_parts(g, as_i64(load(a, 18)), load(a, 19), as_f32(load(a, 21)))


@entry
def plan_batch(
    arguments: np.ndarray, row_starts: int, context_lens: int, num_rows: int, kv_heads: int, threads: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Plan the step and fill in the kernel's last arguments. Returns what they point to, and the number of workers."""
    row_words = arguments[12] * arguments[14] * arguments[23] // 4
    for index in range(load(as_i32(row_starts), num_rows) * row_words, arguments[22] * row_words):
        store(ZERO, as_f32(arguments[2]), index)  # padding tokens behind the last row; zero bits are zero in both element types
    group, head_dim, window = arguments[13], arguments[14], arguments[15]
    items, parts, workers = plan_items(row_starts, context_lens, num_rows, kv_heads, group, head_dim, window, threads)
    arguments[18], arguments[19], arguments[21], arguments[22] = items.ctypes.data, items.shape[0], parts.ctypes.data, 0
    return items, parts, workers


def _attend_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    attend(a, as_f32(load(a, 0)), as_f32(load(a, 1)), as_f32(load(a, 2)))


def _attend_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    attend(a, as_bf16(load(a, 0)), as_bf16(load(a, 1)), as_bf16(load(a, 2)))


_SOURCES: dict[int, Callable[[int, int, int], None]] = {4: _attend_f32, 2: _attend_bf16}


@cache
def _kernel(item_bytes: int) -> int:
    return compile_kernel(_SOURCES[item_bytes])


def supports(head_dim: int) -> bool:
    return head_dim % LANES == 0


def paged_attention(
    query: Tensor,
    cache_: Tensor,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """See `Kernels.attention`; out [T, H, D] is written. Element types of query, cache and out agree; `supports(D)` holds."""
    heads, head_dim, kv_heads = query.shape[1], query.shape[2], cache_.shape[3]
    group, reach = heads // kv_heads, NO_WINDOW if window is None else window
    block, value, slot, head, _ = cache_.stride()
    arguments = [query.data_ptr(), cache_.data_ptr(), out.data_ptr(), query.stride(0), query.stride(1), block, value, slot, head]
    arguments += [cache_.shape[2], block_table.data_ptr(), block_table.stride(0), heads, group, head_dim, reach]
    arguments += [float_bits(scale), float_bits(softcap or 0.0), 0, 0, 0, 0, query.shape[0], query.element_size()]
    memory = with_counter(arguments, 20)
    kernel, num_rows = _kernel(query.element_size()), context_lens.shape[0]
    threads = thread_limit()
    items, parts, workers = plan_batch(memory, row_starts.data_ptr(), context_lens.data_ptr(), num_rows, kv_heads, threads)
    launch(kernel, memory, workers, out, query, cache_, block_table, items, parts)
    if parts.shape[0] > 0:
        joining = memory.copy()
        joining[22] = 1
        launch(kernel, joining, 1, out, items, parts)
