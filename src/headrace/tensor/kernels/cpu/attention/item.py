"""One item of paged attention: a few query vectors of one key/value head against a range of the context (`plan.Item`).

A tile's keys are transposed into strips (inputs by keys), its values copied into strips (keys by outputs), once for all query vectors of
the item; scores and weighted values are then products of panels with strips, as in `linear`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headrace.tensor.kernels.cpu.attention.plan import SPLIT, Item
from headrace.tensor.kernels.cpu.attention.simd import pack_keys, pack_queries, pack_value, softmax_tile
from headrace.tensor.kernels.cpu.jit.launch import helper
from headrace.tensor.kernels.cpu.jit.scalars import as_f32, as_i64, at, exp, load, prefetch, store
from headrace.tensor.kernels.cpu.jit.simd import panel_block
from headrace.tensor.kernels.cpu.jit.vector_ir import LANES, STRIP_COLUMNS
from headrace.tensor.kernels.cpu.linear import panel_rows

TILE = 64
"""Keys in a tile; a multiple of STRIP_COLUMNS."""
AHEAD = 16
ALIGNMENT = 64
NOTHING, ZERO, ONE = np.float32(-3.0e38), np.float32(0.0), np.float32(1.0)

Pointer = Any


class Geometry(NamedTuple):
    """Strides in elements; last dimensions are contiguous; out is [T, H, D] contiguous; scales: contiguous by head."""

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
    is_scaled: bool
    scales: Pointer
    scale_block: int
    scale_value: int
    scale_slot: int


class Scratch(NamedTuple):
    """One worker's memory, float32 but for `keys`. P is D padded to whole strips.

    key_strips    [TILE / STRIP_COLUMNS, D, STRIP_COLUMNS]
    value_strips  [P / STRIP_COLUMNS, TILE, STRIP_COLUMNS]; zeros where there is no output
    zeros         [STRIP_COLUMNS]
    queries       [D, rows], panel by panel
    scores        [vectors, TILE]
    key_scales, value_scales  [SPLIT], of an int8 cache
    keys          int64 [SPLIT]: element offsets into the cache
    """

    key_strips: Pointer
    value_strips: Pointer
    zeros: Pointer
    queries: Pointer
    scores: Pointer
    key_scales: Pointer
    value_scales: Pointer
    keys: Pointer


class Sums(NamedTuple):
    """A running softmax of each query vector, float32: sums [vectors, P] of weighted values and masses [vectors] of weights, both relative
    to peaks [vectors]: a weight is exp(score - peak), where no score is above peak + SLACK."""

    sums: Pointer
    peaks: Pointer
    masses: Pointer


@helper
def padded_dim(head_dim: int) -> int:
    return (head_dim + STRIP_COLUMNS - 1) // STRIP_COLUMNS * STRIP_COLUMNS


class ScratchLayout(NamedTuple):
    """Offsets in float32 from a worker's first cache line. total, part: sums of the item, and of its latest split."""

    value_strips: int
    zeros: int
    queries: int
    scores: int
    total: int
    part: int
    key_scales: int
    value_scales: int
    keys: int
    end: int


@helper
def scratch_layout(vectors: int, head_dim: int) -> ScratchLayout:
    wide = padded_dim(head_dim)
    value_strips = TILE * head_dim
    zeros = value_strips + TILE * wide
    queries = zeros + STRIP_COLUMNS
    scores = queries + vectors * head_dim
    total = scores + vectors * TILE
    part = total + vectors * (wide + 2)
    key_scales = part + vectors * (wide + 2)
    value_scales = key_scales + SPLIT
    keys = value_scales + SPLIT + (value_scales + SPLIT) % 2
    return ScratchLayout(value_strips, zeros, queries, scores, total, part, key_scales, value_scales, keys, keys + 2 * SPLIT)


@helper
def scratch_floats(vectors: int, head_dim: int) -> int:
    return scratch_layout(vectors, head_dim).end + ALIGNMENT // 4


@helper
def place_scratch(address: int, vectors: int, head_dim: int) -> tuple[Scratch, Sums, Sums]:
    wide, layout = padded_dim(head_dim), scratch_layout(vectors, head_dim)
    first = (address + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    base = as_f32(first)
    value_strips, zeros = at(base, layout.value_strips), at(base, layout.zeros)
    for index in range(TILE * wide):
        store(ZERO, value_strips, index)
    for index in range(STRIP_COLUMNS):
        store(ZERO, zeros, index)
    scratch = Scratch(
        base,
        value_strips,
        zeros,
        at(base, layout.queries),
        at(base, layout.scores),
        at(base, layout.key_scales),
        at(base, layout.value_scales),
        as_i64(first + 4 * layout.keys),
    )
    return scratch, place_sums(at(base, layout.total), vectors, wide), place_sums(at(base, layout.part), vectors, wide)


@helper
def place_sums(start: Pointer, vectors: int, wide: int) -> Sums:
    peaks = at(start, vectors * wide)
    return Sums(start, peaks, at(peaks, vectors))


@helper
def clear(running: Sums, vectors: int, wide: int) -> None:
    for index in range(vectors * wide):
        store(ZERO, running.sums, index)
    for vector in range(vectors):
        store(NOTHING, running.peaks, vector)
        store(ZERO, running.masses, vector)


@helper
def fold(total: Sums, part: Sums, vectors: int, wide: int) -> None:
    for vector in range(vectors):
        old, new = load(total.peaks, vector), load(part.peaks, vector)
        peak = max(old, new)
        keep, add = exp(old - peak), exp(new - peak)
        for d in range(vector * wide, (vector + 1) * wide):
            store(load(total.sums, d) * keep + load(part.sums, d) * add, total.sums, d)
        store(load(total.masses, vector) * keep + load(part.masses, vector) * add, total.masses, vector)
        store(peak, total.peaks, vector)


@helper
def read_queries(g: Geometry, item: Item, queries: Pointer, offsets: Pointer, used: int) -> None:
    """offsets: LANES int64, overwritten."""
    row, place, head = 0, item.token * g.query_token + item.kv_head * g.group * g.query_head, 0
    while row < used:
        count = panel_rows(used - row)
        for vector in range(LANES):
            store(place + head * g.query_head, offsets, vector)
            if vector + 1 < count:
                place, head = next_vector(g, place, head)
        place, head = next_vector(g, place, head)
        pack_queries(at(queries, row * g.head_dim), count, g.query, offsets, g.scale, g.head_dim)
        row += count


@helper
def next_vector(g: Geometry, place: int, head: int) -> tuple[int, int]:
    """Heads are counted, since a division takes as long as forty products."""
    return (place, head + 1) if head + 1 < g.group else (place + g.query_token, 0)


@helper
def write_out(g: Geometry, item: Item, running: Sums) -> None:
    wide, vector = padded_dim(g.head_dim), 0
    for token in range(item.token, item.token + item.num_tokens):
        target = at(g.out, (token * g.heads + item.kv_head * g.group) * g.head_dim)
        for head in range(g.group):
            source, share = at(running.sums, vector * wide), ONE / load(running.masses, vector)
            for d in range(g.head_dim):
                store(load(source, d) * share, target, head * g.head_dim + d)
            vector += 1


@helper
def locate(g: Geometry, scratch: Scratch, item: Item, start: int, low: int, high: int) -> None:
    """The cache offsets of the item's keys at positions start + [low, high), and the scales of an int8 cache.

    Whole blocks of LANES are filled: places outside the range repeat the nearest key inside it, so that no other slot is ever read.
    """
    keys, blocks, block = scratch.keys, at(g.table, item.row * g.table_row), (start + low) // g.block_size
    slot, j = start + low - block * g.block_size, low
    while j < high:
        count = min(g.block_size - slot, high - j)
        base = load(blocks, block) * g.cache_block + slot * g.cache_slot + item.kv_head * g.cache_head
        for i in range(count):
            store(base + i * g.cache_slot, keys, j + i)
        if g.is_scaled:
            scales = at(g.scales, load(blocks, block) * g.scale_block + slot * g.scale_slot + item.kv_head)
            for i in range(count):
                store(load(scales, i * g.scale_slot), scratch.key_scales, j + i)
                store(load(scales, g.scale_value + i * g.scale_slot), scratch.value_scales, j + i)
        block, slot, j = block + 1, 0, j + count
    for j in range(low // LANES * LANES, low):
        store(load(keys, low), keys, j)
    for j in range(high, (high + LANES - 1) // LANES * LANES):
        store(load(keys, high - 1), keys, j)


@helper
def score(out: Pointer, panel: Pointer, strip: Pointer, zeros: Pointer, dim: int, count: int) -> None:
    """STRIP_COLUMNS columns of out [count, TILE] = panel [dim, count] times strip [dim, STRIP_COLUMNS]."""
    panel_block(out, TILE, panel, strip, 0, dim, zeros, 0, count, 1, 0)


@helper
def add_values(sums: Pointer, wide: int, weights: Pointer, strip: Pointer, length: int, count: int) -> None:
    """STRIP_COLUMNS columns of sums [count, wide] += weights [count, TILE], `length` per row, times strip [length, STRIP_COLUMNS]."""
    panel_block(sums, wide, weights, strip, 0, length, sums, wide, count, 1, TILE)


@helper
def transpose_keys(g: Geometry, scratch: Scratch, tile: int, low: int, high: int, ahead: int) -> None:
    """Values are prefetched meanwhile, and the keys that follow, up to `ahead`."""
    keys, values, dim = at(scratch.keys, tile), at(g.cache, g.cache_value), g.head_dim
    for block in range(low // LANES * LANES, high, LANES):
        for k in range(block, block + LANES):
            prefetch(values, load(keys, k), dim)
            if k + AHEAD < ahead:
                prefetch(g.cache, load(keys, k + AHEAD), dim)
        strip, part = block // STRIP_COLUMNS, block % STRIP_COLUMNS
        target = at(scratch.key_strips, strip * dim * STRIP_COLUMNS + part)
        pack_keys(target, g.cache, at(keys, block), at(scratch.key_scales, tile + block), dim)


@helper
def weigh(g: Geometry, scores: Pointer, running: Sums, position: int, used: int, low: int, high: int) -> None:
    """One step of an online softmax, in place."""
    vector, here = 0, position
    while vector < used:
        begin, end = max(low, here - g.window + 1), min(high, here + 1)
        for _ in range(g.group):
            old, own = load(running.peaks, vector), at(scores, vector * TILE)
            if begin == 0 and end == TILE:
                peak, mass = softmax_tile(own, begin, end, old, TILE, 1)
            else:
                peak, mass = softmax_tile(own, begin, end, old, TILE, 0)
            if peak > old:
                if old > NOTHING:
                    shrink(running, vector, padded_dim(g.head_dim), exp(old - peak))
                store(peak, running.peaks, vector)
            store(load(running.masses, vector) + mass, running.masses, vector)
            vector += 1
        here += 1


@helper
def shrink(running: Sums, vector: int, wide: int, factor: float) -> None:
    for d in range(vector * wide, (vector + 1) * wide):
        store(load(running.sums, d) * factor, running.sums, d)
    store(load(running.masses, vector) * factor, running.masses, vector)


@helper
def attend_tile(g: Geometry, scratch: Scratch, running: Sums, tile: int, position: int, used: int, low: int, high: int, ahead: int) -> None:
    """Keys [low, high) of the tile that begins at key `tile` of the split are visible; offsets are known up to `ahead`, for prefetching.
    position: of the item's first query, counted from the tile's first key."""
    dim, wide, values = g.head_dim, padded_dim(g.head_dim), at(g.cache, g.cache_value)
    transpose_keys(g, scratch, tile, low, high, ahead)
    row = 0
    while row < used:
        count = panel_rows(used - row)
        for strip in range(low // STRIP_COLUMNS, (high + STRIP_COLUMNS - 1) // STRIP_COLUMNS):
            out, keys = at(scratch.scores, row * TILE + strip * STRIP_COLUMNS), at(scratch.key_strips, strip * dim * STRIP_COLUMNS)
            score(out, at(scratch.queries, row * dim), keys, scratch.zeros, dim, count)
        row += count
    weigh(g, scratch.scores, running, position, used, low, high)
    for j in range(low, high):
        place = load(scratch.keys, tile + j)
        pack_value(
            at(scratch.value_strips, j * STRIP_COLUMNS), TILE * STRIP_COLUMNS, at(values, place), load(scratch.value_scales, tile + j), dim
        )
    row = 0
    while row < used:
        count = panel_rows(used - row)
        for strip in range(wide // STRIP_COLUMNS):
            sums = at(running.sums, row * wide + strip * STRIP_COLUMNS)
            taken = at(scratch.value_strips, (strip * TILE + low) * STRIP_COLUMNS)
            add_values(sums, wide, at(scratch.scores, row * TILE + low), taken, high - low, count)
        row += count


@helper
def attend_split(g: Geometry, scratch: Scratch, running: Sums, item: Item, used: int, split: int) -> None:
    clear(running, used, padded_dim(g.head_dim))
    start = split * SPLIT
    low, high = max(0, item.position - g.window + 1 - start), min(SPLIT, item.position + item.num_tokens - start)
    locate(g, scratch, item, start, low, high)
    for tile in range(low // TILE * TILE, high, TILE):
        position = item.position - start - tile
        attend_tile(g, scratch, running, tile, position, used, max(low - tile, 0), min(high - tile, TILE), high - tile)
