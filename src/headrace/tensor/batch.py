"""What a model's forward pass is told about a step: explicit arguments, never a global.

Shape letters used in the whole package: T tokens of the step, R rows (sequences) of the step, H query heads, K key/value heads,
D head dimension, B blocks of a pool, S block size, M block-table width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class GroupBatch:
    """One KV group's view of the step.

    block_table   [R, M] int32; entries beyond a row's context are 0 (the pad block). With a window, entries wholly before the window
                  may be stale: kernels must not read positions outside the window
    slot_mapping  [T] int64; block * S + offset of the token's own position
    """

    block_table: Tensor
    slot_mapping: Tensor


@dataclass(slots=True)
class Batch:
    """A ragged batch, rows back to back.

    positions      [T] int64 absolute position of each token
    row_starts     [R + 1] int32 first token of each row; row r is tokens row_starts[r]:row_starts[r + 1]
    context_lens   [R] int32 tokens of the row's context once this step is done (its last position + 1)
    max_count      largest row length; 1 means a pure decode step
    groups         per KV group
    adapter_slots  [R] int32, 0 = base model
    """

    positions: Tensor
    row_starts: Tensor
    context_lens: Tensor
    max_count: int
    groups: tuple[GroupBatch, ...]
    adapter_slots: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


@dataclass(slots=True)
class KvCache:
    """All layers' paged caches of one rank.

    layers    per model layer: [B, 2, S, K, D]; 0 = key, 1 = value. A block is one contiguous piece
    group_of  per model layer: index of its KV group (into Batch.groups)
    """

    layers: list[Tensor]
    group_of: tuple[int, ...]
    block_size: int

    def copy_block(self, group: int, source: int, target: int) -> None:
        for layer, owner in zip(self.layers, self.group_of, strict=True):
            if owner == group:
                layer[target].copy_(layer[source])

    def clear_pad_block(self) -> None:
        """Zero block 0 of every pool, after it took the keys and values of made-up sequences."""
        for layer in self.layers:
            layer[0].zero_()


def allocate_kv(
    shapes: list[tuple[int, int]], group_of: tuple[int, ...], num_blocks: tuple[int, ...], block_size: int, dtype: torch.dtype, device: str
) -> KvCache:
    """Zeroed caches. shapes: per layer (kv_heads, head_dim); num_blocks: per group, pad block included.

    On the host the pages are reserved and not touched: a large cache costs neither start-up time nor memory before it is used.
    """
    layers = [
        _zeros((num_blocks[group], 2, block_size, heads, dim), dtype, device) for (heads, dim), group in zip(shapes, group_of, strict=True)
    ]
    return KvCache(layers, group_of, block_size)


_ALIGNMENT = 64
"""One cache line, and the widest vector."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """torch.zeros that leaves the host's pages untouched (torch writes them: seconds per GiB where page faults are slow)."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    skip = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[skip : skip + num_bytes]).view(dtype).view(shape)
