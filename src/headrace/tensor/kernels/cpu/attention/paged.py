"""Paged attention over a ragged batch for the CPU: online softmax in float32, GQA, window. Two promises, both tested to the bit:

- A query's result depends on its own row alone. Tiles and splits begin at absolute positions, `simd` fixes the order of each tile's
  additions, and splits are added left to right whether one worker computes them or several.
- Slots that the row may not see are never read: they may hold anything, NaN included.

Only element types are compiled in: fixing head size, group count, block size and window gained 0 to 4 % (docs/experiments.md). Idea of the
splits: flash-decoding, Dao et al. 2023.
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
from headrace.tensor.kernels.cpu.jit.scalars import as_bf16, as_f32, as_i8, as_i32, as_i64, at, load, read_arguments, take_ticket
from headrace.tensor.kernels.cpu.jit.vector_ir import LANES
from headrace.tensor.kernels.cpu.launch_list import RecordedLaunches, cached_in_step, current_recording, run_pending

Pointer = Any


@helper
def attend_items(g: Geometry, items: int, num_items: int, counter: Pointer, parts: Pointer, vectors: int) -> None:
    """`parts` receives, per item of a shared context, float32 [vectors, P + 2]: sums, peaks, masses. P: see `Scratch`."""
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
def join_parts(g: Geometry, items: int, num_items: int, parts: Pointer, vectors: int) -> None:
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


class AttentionArguments(NamedTuple):
    """Strides in elements, by block, by key or value, slot and head.

    joins: 0 walks the items, 1 joins the parts of shared contexts.
    """

    query: int
    query_token: int
    query_head: int
    cache: int
    cache_block: int
    cache_value: int
    cache_slot: int
    cache_head: int
    block_size: int
    table: int
    table_row: int
    out: int
    heads: int
    group: int
    head_dim: int
    window: int
    scale_bits: int
    scales: int
    scale_block: int
    scale_value: int
    scale_slot: int
    items: int
    num_items: int
    parts: int
    vectors: int
    joins: int
    counter: int


@helper
def geometry(a: AttentionArguments, query: Pointer, cache_: Pointer, out: Pointer) -> Geometry:
    return Geometry(
        query,
        a.query_token,
        a.query_head,
        cache_,
        a.cache_block,
        a.cache_value,
        a.cache_slot,
        a.cache_head,
        a.block_size,
        as_i32(a.table),
        a.table_row,
        out,
        a.heads,
        a.group,
        a.head_dim,
        a.window,
        float_from_bits(a.scale_bits),
        a.scales != 0,
        as_f32(a.scales),
        a.scale_block,
        a.scale_value,
        a.scale_slot,
    )


@helper
def attend(a: AttentionArguments, query: Pointer, cache_: Pointer, out: Pointer) -> None:
    g = geometry(a, query, cache_, out)
    if a.joins == 0:
        attend_items(g, a.items, a.num_items, as_i64(a.counter), as_f32(a.parts), a.vectors)
    else:
        join_parts(g, a.items, a.num_items, as_f32(a.parts), a.vectors)


class Planned(NamedTuple):
    """items_at, parts_at: addresses. tokens: their number without padding."""

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
    items, vectors, num_parts, workers = plan_items(row_starts, context_lens, num_rows, kv_heads, group, head_dim, window, threads)
    parts = np.empty(num_parts * vectors * (padded_dim(head_dim) + 2), np.float32)
    tokens = load(as_i32(row_starts), num_rows)
    return items, items.ctypes.data, items.shape[0], parts, parts.ctypes.data, vectors, workers, tokens


Kind = tuple[int, ...]
ITEMS, NUM_ITEMS, PARTS, VECTORS, JOINS = (
    AttentionArguments._fields.index(name) for name in ("items", "num_items", "parts", "vectors", "joins")
)


def make_plan(kind: Kind) -> Planned:
    return Planned(*plan_batch(*kind))


class Replan:
    def __init__(self, kind: Kind, plan: Planned) -> None:
        self.kind, self.plan = kind, plan
        self.places: list[tuple[array[int], int]] = []

    def __call__(self, recorded: RecordedLaunches) -> bool:
        plan = make_plan(self.kind)
        if plan.tokens != self.plan.tokens:
            return False
        self.plan = plan  # keeps the arrays alive whose addresses the arguments hold
        for memory, place in self.places:
            memory[ITEMS], memory[NUM_ITEMS], memory[PARTS], memory[VECTORS] = plan.items_at, plan.num_items, plan.parts_at, plan.vectors
            recorded.set_workers(place, int(plan.has_parts) if memory[JOINS] else plan.workers)
        return True


def _attend_f32(arguments: int, worker: int, workers: int) -> None:
    a: AttentionArguments = read_arguments(AttentionArguments, arguments)
    attend(a, as_f32(a.query), as_f32(a.cache), as_f32(a.out))


def _attend_bf16(arguments: int, worker: int, workers: int) -> None:
    a: AttentionArguments = read_arguments(AttentionArguments, arguments)
    attend(a, as_bf16(a.query), as_bf16(a.cache), as_bf16(a.out))


def _attend_f32_bf16(arguments: int, worker: int, workers: int) -> None:
    a: AttentionArguments = read_arguments(AttentionArguments, arguments)
    attend(a, as_f32(a.query), as_bf16(a.cache), as_f32(a.out))


def _attend_f32_int8(arguments: int, worker: int, workers: int) -> None:
    a: AttentionArguments = read_arguments(AttentionArguments, arguments)
    attend(a, as_f32(a.query), as_i8(a.cache), as_f32(a.out))


def _attend_bf16_int8(arguments: int, worker: int, workers: int) -> None:
    a: AttentionArguments = read_arguments(AttentionArguments, arguments)
    attend(a, as_bf16(a.query), as_i8(a.cache), as_bf16(a.out))


SOURCES: dict[tuple[torch.dtype, torch.dtype], Callable[[int, int, int], None]] = {
    (torch.float32, torch.float32): _attend_f32,
    (torch.bfloat16, torch.bfloat16): _attend_bf16,
    (torch.float32, torch.bfloat16): _attend_f32_bf16,
    (torch.float32, torch.int8): _attend_f32_int8,
    (torch.bfloat16, torch.int8): _attend_bf16_int8,
}
MIXED = {(query, cache_) for query, cache_ in SOURCES if query != cache_}


@cache
def kernel(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> int:
    return compile_kernel(SOURCES[query_dtype, cache_dtype])


def supports(head_dim: int) -> bool:
    return head_dim % LANES == 0


def attention_arguments(
    query: Tensor, cache_: Tensor, kv_scales: Tensor | None, block_table: Tensor, out: Tensor, plan: Planned, *, window: int, scale: float,
) -> AttentionArguments:  # fmt: skip
    cache_block, cache_value, cache_slot, cache_head, _ = cache_.stride()
    scale_block, scale_value, scale_slot, _ = (0, 0, 0, 0) if kv_scales is None else kv_scales.stride()
    return AttentionArguments(
        query=query.data_ptr(),
        query_token=query.stride(0),
        query_head=query.stride(1),
        cache=cache_.data_ptr(),
        cache_block=cache_block,
        cache_value=cache_value,
        cache_slot=cache_slot,
        cache_head=cache_head,
        block_size=cache_.shape[2],
        table=block_table.data_ptr(),
        table_row=block_table.stride(0),
        out=out.data_ptr(),
        heads=query.shape[1],
        group=query.shape[1] // cache_.shape[3],
        head_dim=query.shape[2],
        window=window,
        scale_bits=float_bits(scale),
        scales=0 if kv_scales is None else kv_scales.data_ptr(),
        scale_block=scale_block,
        scale_value=scale_value,
        scale_slot=scale_slot,
        items=plan.items_at,
        num_items=plan.num_items,
        parts=plan.parts_at,
        vectors=plan.vectors,
        joins=0,
        counter=0,
    )


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
) -> None:
    """See `Kernels.attention`; writes out [T, H, D] in the query's dtype. The pair of dtypes is in `SOURCES`, and `supports(D)` holds."""
    (tokens, heads, head_dim), kv_heads = query.shape, cache_.shape[3]
    group, reach = heads // kv_heads, NO_WINDOW if window is None else window
    kind = (row_starts.data_ptr(), context_lens.data_ptr(), context_lens.shape[0], kv_heads, group, head_dim, reach, thread_limit())
    plan = cached_in_step(kind, lambda: make_plan(kind))
    if plan.tokens < tokens:
        run_pending()  # an earlier layer may still have to read this memory
        out[plan.tokens :] = 0.0
    arguments = attention_arguments(query, cache_, kv_scales, block_table, out, plan, window=reach, scale=scale)
    memory = with_counter(arguments)
    compiled, recorded = kernel(query.dtype, cache_.dtype), current_recording()
    replan = None if recorded is None else recorded.argument_update(kind, lambda: Replan(kind, plan))
    launches = [(memory, plan.workers)]
    if plan.has_parts or recorded is not None:  # a recorded one is passed over while no context is shared
        launches.append((_joining(memory), int(plan.has_parts)))
    for place, workers in launches:
        if recorded is not None and replan is not None:
            replan.places.append((place, recorded.num_entries))
        scales = () if kv_scales is None else (kv_scales,)
        launch(compiled, place, workers, out, query, cache_, block_table, plan.items, plan.parts, *scales)


def _joining(memory: array[int]) -> array[int]:
    copied = memory[:]
    copied[JOINS] = 1
    return copied
