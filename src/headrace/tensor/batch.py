"""What a model's forward pass is told about a step: explicit arguments, never a global.

Shape letters used in the whole package: T tokens of the step, R rows (sequences) of the step, H query heads, K key/value heads,
D head dimension, B blocks of a pool, S block size, M block-table width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.core.kvgroup import KvGroup


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
    wanted         [W] int64, ascending: tokens whose hidden state is asked for; None = all
    """

    positions: Tensor
    row_starts: Tensor
    context_lens: Tensor
    max_count: int
    groups: tuple[GroupBatch, ...]
    adapter_slots: Tensor | None = None
    wanted: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's paged cache on one rank. A block, scales included, is one contiguous piece of memory.

    values  [B, 2, S, K, D]; 0 = key, 1 = value. int8: an element is values * its vector's scale
    scales  [B, 2, S, K] float32 where values are int8, else None
    """

    values: Tensor
    scales: Tensor | None = None

    def copy_block(self, source: int, target: int) -> None:
        for part in self._parts():
            part[target].copy_(part[source])

    def clear_block(self, block: int) -> None:
        for part in self._parts():
            part[block].zero_()

    def _parts(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)


@dataclass(slots=True)
class KvCache:
    """All layers' paged caches of one rank.

    group_of  per model layer: index of its KV group (into Batch.groups)
    """

    layers: list[LayerKv]
    group_of: tuple[int, ...]
    block_size: int

    def copy_block(self, group: int, source: int, target: int) -> None:
        for layer, owner in zip(self.layers, self.group_of, strict=True):
            if owner == group:
                layer.copy_block(source, target)

    def clear_pad_block(self) -> None:
        """Zero block 0 of every pool, after it took the keys and values of made-up sequences."""
        for layer in self.layers:
            layer.clear_block(0)


def stored_as(group: KvGroup, dtype: torch.dtype) -> KvGroup:
    """The group with a cache of this dtype."""
    return replace(group, dtype_bytes=dtype.itemsize, scale_bytes=SCALE_BYTES if dtype == torch.int8 else 0)


def allocate_kv(
    shapes: list[tuple[int, int]], group_of: tuple[int, ...], num_blocks: tuple[int, ...], block_size: int, dtype: torch.dtype, device: str
) -> KvCache:
    """Zeroed caches. shapes: per layer (kv_heads, head_dim); num_blocks: per group, pad block included. int8: with scales.

    On the host the pages are reserved and not touched: a large cache costs neither start-up time nor memory before it is used.
    """
    allocate = _allocate_scaled if dtype == torch.int8 else _allocate_plain
    layers = [
        allocate((num_blocks[group], 2, block_size, heads, dim), dtype, device)
        for (heads, dim), group in zip(shapes, group_of, strict=True)
    ]
    return KvCache(layers, group_of, block_size)


def _allocate_plain(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> LayerKv:
    return LayerKv(_zeros(shape, dtype, device))


def _allocate_scaled(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> LayerKv:
    """A block's values, then its scales. The blocks' size keeps both aligned: head sizes are even."""
    blocks, vectors, dim = shape[0], math.prod(shape[1:-1]), shape[-1]
    memory = _zeros((blocks, vectors * (dim + SCALE_BYTES)), dtype, device)
    values = torch.unflatten(memory[:, : vectors * dim], 1, shape[1:])
    scales = torch.unflatten(memory[:, vectors * dim :].view(torch.float32), 1, shape[1:-1])
    return LayerKv(values, scales)


SCALE_BYTES = 4
"""Of the float32 scale of one key or value of one head."""
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
