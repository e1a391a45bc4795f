"""One item of paged attention: a few query vectors of one key/value head against a range of the context (`attention_plan.Item`).

Only compiled code lives here, below `attention`, which says what is promised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headrace.tensor.kernels.attention_plan import ROWS, SPLIT, Item
from headrace.tensor.kernels.launch import helper
from headrace.tensor.kernels.simd import as_f32, as_i64, at, dot_block, exp, load, prefetch, softmax_tile, store, value_block
from headrace.tensor.kernels.vector_ir import COLUMNS

TILE = 64
AHEAD = 16
"""Keys between a prefetch and its use."""
NOTHING, ZERO, ONE = np.float32(-3.0e38), np.float32(0.0), np.float32(1.0)

Pointer = Any
"""A typed pointer of `simd`, inside compiled code."""


class Geometry(NamedTuple):
    """Where things are. Strides in elements; last dimensions are contiguous; out is [T, H, D] contiguous.

    scales: float32 of an int8 cache, each [.., heads] side by side; is_scaled says whether there are any.
    """

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
    is_scaled: bool
    scales: Pointer
    scale_block: int
    scale_value: int
    scale_slot: int


class Scratch(NamedTuple):
    """One worker's memory: float32 [vectors, D] (queries, sums, total), [vectors, TILE] (scores), [vectors] (the rest), [SPLIT] (scales of
    keys and values) and int64 [SPLIT] (keys: element offsets into the cache). `sums` is the running split, `total` the folded splits
    before it."""

    queries: Pointer
    sums: Pointer
    total: Pointer
    scores: Pointer
    peaks: Pointer
    masses: Pointer
    total_peaks: Pointer
    total_masses: Pointer
    key_scales: Pointer
    value_scales: Pointer
    keys: Pointer


@helper
def scratch_floats(vectors: int, head_dim: int) -> int:
    return vectors * (3 * head_dim + TILE + 4) + 4 * SPLIT


@helper
def place_scratch(address: int, vectors: int, head_dim: int) -> Scratch:
    """Lay a worker's scratch out in `scratch_floats` float32."""
    memory, row = as_f32(address), vectors * head_dim
    scores, marks = at(memory, 3 * row), at(memory, 3 * row + vectors * TILE)
    key_scales = at(marks, 4 * vectors)
    keys = as_i64(address + (3 * row + vectors * (TILE + 4) + 2 * SPLIT) * 4)
    return Scratch(
        memory,
        at(memory, row),
        at(memory, 2 * row),
        scores,
        marks,
        at(marks, vectors),
        at(marks, 2 * vectors),
        at(marks, 3 * vectors),
        key_scales,
        at(key_scales, SPLIT),
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
def read_scales(g: Geometry, key_scales: Pointer, value_scales: Pointer, item: Item, start: int, low: int, high: int) -> None:
    """Scales of the keys and values that `locate` found; ones where it repeated a key."""
    blocks = at(g.table, item.row * g.table_row)
    for j in range(low, high):
        block = (start + j) // g.block_size
        place = load(blocks, block) * g.scale_block + (start + j - block * g.block_size) * g.scale_slot + item.kv_head
        store(load(g.scales, place), key_scales, j)
        store(load(g.scales, place + g.scale_value), value_scales, j)
    for j in range(low // COLUMNS * COLUMNS, low):
        store(ONE, value_scales, j)
    for j in range(high, (high + COLUMNS - 1) // COLUMNS * COLUMNS):
        store(ONE, value_scales, j)


@helper
def apply_scales(scores: Pointer, scales: Pointer, used: int, low: int, high: int) -> None:
    """scores[v, j] *= scales[j] for j in [low, high) of a tile."""
    for vector in range(used):
        for j in range(low, high):
            store(load(scores, vector * TILE + j) * load(scales, j), scores, vector * TILE + j)


@helper
def attend_tile(g: Geometry, scratch: Scratch, tile: int, position: int, used: int, low: int, high: int, ahead: int) -> None:
    """Scores, softmax step and weighted values of the tile that starts at key `tile` of the split.

    Offsets of its keys are known at [low, high) and, for prefetching, up to `ahead`. position: of the item's first query, counted
    from the tile's start. Values are asked for while scores are computed, keys a few blocks before their turn.
    """
    first, dim, keys = low // COLUMNS * COLUMNS, g.head_dim, at(scratch.keys, tile)
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
    if g.is_scaled:
        apply_scales(scratch.scores, at(scratch.key_scales, tile), used, low, high)
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
    if g.is_scaled:
        apply_scales(scratch.scores, at(scratch.value_scales, tile), used, low, high)
    for vector in range(0, used, ROWS):
        out, weights = at(scratch.sums, vector * dim), at(scratch.scores, vector * TILE)
        for j in range(first, high, COLUMNS):
            value_block(out, at(weights, j), TILE, values, at(keys, j), dim, ROWS)


@helper
def attend_split(g: Geometry, scratch: Scratch, item: Item, used: int, split: int) -> None:
    start = split * SPLIT
    low, high = max(0, item.position - g.window + 1 - start), min(SPLIT, item.position + item.num_tokens - start)
    locate(g, scratch.keys, item, start, low, high)
    if g.is_scaled:
        read_scales(g, scratch.key_scales, scratch.value_scales, item, start, low, high)
    for tile in range(low // TILE * TILE, high, TILE):
        attend_tile(g, scratch, tile, item.position - start - tile, used, max(low - tile, 0), min(high - tile, TILE), high - tile)
