"""Divides the attention of one step into work items for the worker threads.

The division depends on the number of threads, but the result does not: every output is bit for bit the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headrace.tensor.kernels.cpu.jit.launch import entry, helper
from headrace.tensor.kernels.cpu.jit.scalars import as_i32, load, read_arguments

SPLIT = 512
"""Keys in a split, counted from position 0 of the row; a multiple of `item.TILE`."""
VECTORS = 192
"""Query vectors per item, unless one token has more. They share the cost of transposing each tile's keys."""
WORK_PER_THREAD = 1 << 17
"""Multiply-adds for which one more worker thread is woken: that costs microseconds, or tens of them on a busy machine."""

NO_WINDOW = 1 << 40

Pointer = Any


class Item(NamedTuple):
    """token     first query token, counted over the step
    position  of the first query token in its sequence
    part_of   index of the item with the first splits where several items share one context; else -1
    """

    row: int
    kv_head: int
    token: int
    num_tokens: int
    position: int
    split_first: int
    split_last: int
    part_of: int


ITEM_FIELDS = len(Item._fields)


@helper
def chunk_tokens(group: int) -> int:
    return max(1, VECTORS // group)


@entry
def plan_items(
    row_starts_at: int, context_lens_at: int, num_rows: int, kv_heads: int, group: int, head_dim: int, window: int, threads: int
) -> tuple[np.ndarray, int, int, int]:
    """(items int64 [num_items, fields of Item], query vectors of the largest item, number of items that are parts of shared contexts,
    workers).

    row_starts_at, context_lens_at: addresses of int32 [num_rows + 1] and [num_rows]. group: query heads per KV head.

    A context is divided among several items only when there would be fewer than two items per thread.
    """
    row_starts, context_lens = as_i32(row_starts_at), as_i32(context_lens_at)
    chunk = chunk_tokens(group)
    num_chunks, num_parts, work, longest = 0, 0, 0, 0
    for row in range(num_rows):
        start, end, context = load(row_starts, row), load(row_starts, row + 1), load(context_lens, row)
        for token in range(start, end, chunk):
            position, count = context - end + token, min(chunk, end - token)
            splits = (position + count - 1) // SPLIT + 1 - max(0, position - window + 1) // SPLIT
            num_chunks += kv_heads
            longest = max(longest, count)
            num_parts += kv_heads * splits
            work += 2 * kv_heads * group * head_dim * count * min(position + count, window + count)
    is_shared = threads > 1 and num_chunks < 2 * threads and num_parts > num_chunks
    items = np.empty((num_parts if is_shared else num_chunks, ITEM_FIELDS), np.int64)
    index = 0
    for row in range(num_rows):
        start, end, context = load(row_starts, row), load(row_starts, row + 1), load(context_lens, row)
        for token in range(start + (end - start - 1) // chunk * chunk, start - 1, -chunk):  # the longest items first
            position, count = context - end + token, min(chunk, end - token)
            first, last = max(0, position - window + 1) // SPLIT, (position + count - 1) // SPLIT + 1
            step = 1 if is_shared else last - first
            for head in range(kv_heads):
                for split in range(first, last, step):
                    part_of = index - (split - first) if last - first > step else -1
                    items[index] = Item(row, head, token, count, position, split, split + step, part_of)
                    index += 1
    return items, longest * group, index if is_shared else 0, max(1, min(threads, work // WORK_PER_THREAD, index))


@helper
def read_item(items: int, index: int) -> Item:
    item: Item = read_arguments(Item, items + index * 8 * ITEM_FIELDS)
    return item
