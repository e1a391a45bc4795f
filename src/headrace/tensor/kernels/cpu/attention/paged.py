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

from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.tensor.kernels.cpu.attention.item import (
    ZERO,
    Geometry,
    Sums,
    attend_split,
    fold,
    padded_dim,
    place_scratch,
    place_sums,
    read_queries,
    scratch_floats,
    write_out,
)
from headrace.tensor.kernels.cpu.attention.plan import NO_WINDOW, plan_items, read_item
from headrace.tensor.kernels.cpu.cache_write import scale_arguments
from headrace.tensor.kernels.cpu.jit.launch import (
    compile_kernel,
    entry,
    float_bits,
    float_from_bits,
    helper,
    launch,
    thread_limit,
    with_counter,
)
from headrace.tensor.kernels.cpu.jit.simd import as_bf16, as_f32, as_i8, as_i32, as_i64, at, load, take_ticket
from headrace.tensor.kernels.cpu.jit.vector_ir import LANES
from headrace.tensor.kernels.cpu.together import RecordedLaunches, current_recording, once, run_pending

Pointer = Any
"""A typed pointer of `simd`, inside compiled code."""


@helper
def attend_items(g: Geometry, items: Pointer, num_items: int, counter: Pointer, parts: Pointer, vectors: int) -> None:
    """Take items until none is left. `parts` receives, per item of a shared context, float32 [vectors, P + 2]: sums, peaks, masses.

    vectors: of the largest item. P: see `Scratch`.
    """
    wide = padded_dim(g.head_dim)
    memory = np.empty(scratch_floats(vectors, g.head_dim), np.float32)
    scratch, own, part = place_scratch(memory.ctypes.data, vectors, g.head_dim)
    index = take_ticket(counter)
    while index < num_items:
        item = read_item(items, index)
        used = item.num_tokens * g.group
        total = own if item.part_of < 0 else part_sums(parts, index, vectors, wide)
        read_queries(g, item, scratch.queries, scratch.keys, used)
        attend_split(g, scratch, total, item, used, item.split_first)
        for split in range(item.split_first + 1, item.split_last):
            attend_split(g, scratch, part, item, used, split)
            fold(total, part, used, wide)
        if item.part_of < 0:
            write_out(g, item, total)
        index = take_ticket(counter)
    memory[0] = ZERO  # the memory lives until here


@helper
def part_sums(parts: Pointer, index: int, vectors: int, wide: int) -> Sums:
    return place_sums(at(parts, index * vectors * (wide + 2)), vectors, wide)


@helper
def join_parts(g: Geometry, items: Pointer, num_items: int, parts: Pointer, vectors: int) -> None:
    """Fold the parts of each shared context, first to last, into the first one's place, and write the result."""
    wide = padded_dim(g.head_dim)
    for index in range(num_items):
        item = read_item(items, index)
        if item.part_of < 0:
            continue
        total = part_sums(parts, item.part_of, vectors, wide)
        if index > item.part_of:
            fold(total, part_sums(parts, index, vectors, wide), item.num_tokens * g.group, wide)
        if index + 1 == num_items or read_item(items, index + 1).part_of != item.part_of:
            write_out(g, item, total)


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
        load(a, 23) != 0,
        as_f32(load(a, 23)),
        load(a, 24),
        load(a, 25),
        load(a, 26),
    )


@helper
def attend(a: Pointer, query: Pointer, cache_: Pointer, out: Pointer) -> None:
    g = read_geometry(a, query, cache_, out)
    if load(a, 22) == 0:
        attend_items(g, as_i64(load(a, 18)), load(a, 19), as_i64(load(a, 20)), as_f32(load(a, 21)), load(a, 27))
    else:
        join_parts(g, as_i64(load(a, 18)), load(a, 19), as_f32(load(a, 21)), load(a, 27))


class Planned(NamedTuple):
    """A step's items for one kind of heads; addresses are those of the arrays. tokens: behind the last row there may be padding."""

    items: np.ndarray
    items_at: int
    num_items: int
    parts: np.ndarray
    parts_at: int
    vectors: int
    workers: int
    tokens: int

    @property
    def has_parts(self) -> bool:
        return len(self.parts) > 0


@entry
def plan_batch(
    row_starts: int, context_lens: int, num_rows: int, kv_heads: int, group: int, head_dim: int, window: int, threads: int
) -> tuple[np.ndarray, int, int, np.ndarray, int, int, int, int]:
    """The fields of `Planned`."""
    items, vectors, num_parts, workers = plan_items(row_starts, context_lens, num_rows, kv_heads, group, head_dim, window, threads)
    parts = np.empty(num_parts * vectors * (padded_dim(head_dim) + 2), np.float32)
    tokens = load(as_i32(row_starts), num_rows)
    return items, items.ctypes.data, items.shape[0], parts, parts.ctypes.data, vectors, workers, tokens


Kind = tuple[int, ...]
"""Arguments of `plan_batch`."""
ITEMS, NUM_ITEMS, PARTS, JOINS, VECTORS = 18, 19, 21, 22, 27
"""Places in a kernel's arguments that its plan, or its task, decides."""


def make_plan(kind: Kind) -> Planned:
    return Planned(*plan_batch(*kind))


class Replan:
    """Before a recorded step is run again: its plan for the rows' new lengths, in every layer that shares it."""

    def __init__(self, kind: Kind, plan: Planned) -> None:
        self.kind, self.plan = kind, plan
        self.places: list[tuple[array[int], int]] = []

    def __call__(self, recorded: RecordedLaunches) -> bool:
        plan = make_plan(self.kind)
        if (plan.has_parts, plan.tokens) != (self.plan.has_parts, self.plan.tokens):
            return False
        self.plan = plan  # its arrays live as long as they are pointed at
        for memory, place in self.places:
            memory[ITEMS], memory[NUM_ITEMS], memory[PARTS], memory[VECTORS] = plan.items_at, plan.num_items, plan.parts_at, plan.vectors
            if not memory[JOINS]:
                recorded.set_workers(place, plan.workers)
        return True


def _attend_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    attend(a, as_f32(load(a, 0)), as_f32(load(a, 1)), as_f32(load(a, 2)))


def _attend_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    attend(a, as_bf16(load(a, 0)), as_bf16(load(a, 1)), as_bf16(load(a, 2)))


def _attend_f32_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    attend(a, as_f32(load(a, 0)), as_bf16(load(a, 1)), as_f32(load(a, 2)))


def _attend_f32_int8(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    attend(a, as_f32(load(a, 0)), as_i8(load(a, 1)), as_f32(load(a, 2)))


def _attend_bf16_int8(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    attend(a, as_bf16(load(a, 0)), as_i8(load(a, 1)), as_bf16(load(a, 2)))


_SOURCES: dict[tuple[int, int], Callable[[int, int, int], None]] = {
    (4, 4): _attend_f32,
    (2, 2): _attend_bf16,
    (4, 2): _attend_f32_bf16,
    (4, 1): _attend_f32_int8,
    (2, 1): _attend_bf16_int8,
}
"""By bytes of an element of the query and of the cache."""
MIXED = {(torch.float32, torch.bfloat16), (torch.float32, torch.int8), (torch.bfloat16, torch.int8)}
"""Element types of query and cache that may differ."""


@cache
def _kernel(item_bytes: int, cache_bytes: int) -> int:
    return compile_kernel(_SOURCES[item_bytes, cache_bytes])


def supports(head_dim: int) -> bool:
    return head_dim % LANES == 0


def paged_attention(
    query: Tensor,
    cache_: Tensor,
    kv_scales: Tensor | None,
    block_table: Tensor,
    row_starts: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """See `Kernels.attention`; out [T, H, D] of the query's dtype is written. The cache has it, too, or `MIXED` has both; `supports(D)`."""
    (tokens, heads, head_dim), kv_heads = query.shape, cache_.shape[3]
    group, reach = heads // kv_heads, NO_WINDOW if window is None else window
    kind = (row_starts.data_ptr(), context_lens.data_ptr(), context_lens.shape[0], kv_heads, group, head_dim, reach, thread_limit())
    plan = once(kind, lambda: make_plan(kind))
    if plan.tokens < tokens:
        run_pending()  # an earlier layer may still have to read this memory
        out[plan.tokens :] = 0.0
    block, value, slot, head, _ = cache_.stride()
    arguments = [query.data_ptr(), cache_.data_ptr(), out.data_ptr(), query.stride(0), query.stride(1), block, value, slot, head]
    arguments += [cache_.shape[2], block_table.data_ptr(), block_table.stride(0), heads, group, head_dim, reach]
    arguments += [float_bits(scale), float_bits(softcap or 0.0), plan.items_at, plan.num_items, 0, plan.parts_at, 0]
    memory = with_counter([*arguments, *scale_arguments(kv_scales), plan.vectors], 20)
    kernel, recorded = _kernel(query.element_size(), cache_.element_size()), current_recording()
    replan = None if recorded is None else recorded.renewal(kind, lambda: Replan(kind, plan))
    for place, workers in ((memory, plan.workers), (_joining(memory), 1)) if plan.has_parts else ((memory, plan.workers),):
        if recorded is not None and replan is not None:
            replan.places.append((place, recorded.num_entries))
        scales = () if kv_scales is None else (kv_scales,)
        launch(kernel, place, workers, out, query, cache_, block_table, plan.items, plan.parts, *scales)


def _joining(memory: array[int]) -> array[int]:
    """The same arguments for the kernel's second task, `join_parts`."""
    copied = memory[:]
    copied[JOINS] = 1
    return copied
