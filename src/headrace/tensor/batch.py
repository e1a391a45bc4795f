"""The description of one step that a model's forward pass takes as an argument, and the paged KV cache that it reads and writes.

Shape letters used in the whole package: T tokens of the step, R rows (sequences) of the step, H query heads, K key/value heads,
D head dimension, B blocks of a pool, S block size, M block-table width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headrace.core.model_info import KvGroup
from headrace.tensor.device import TensorDevice


@dataclass(slots=True)
class GroupBatch:
    """
    block_table   [R, M] int32; entries beyond a row's context are 0 (the pad block). With a window, entries wholly before the window
                  may be stale: kernels must not read positions outside the window
    slot_mapping  [T] int64; block * S + offset of the token's own position
    """

    block_table: Tensor
    slot_mapping: Tensor


class PackedAdapter(Protocol):
    """One adapter's weights as `AdapterKernels.pack` leaves them."""

    @property
    def num_bytes(self) -> int: ...


@runtime_checkable
class DeviceAdapter(Protocol):
    """A `PackedAdapter` that a device finds by its address."""

    address: int


@dataclass(slots=True)
class StepAdapters:
    """
    slots           [T] int32, the place of each token's adapter; 0 = base model
    selected_slots  [W], those of the batch's selected tokens; None where all tokens are
    resident        by place; entry 0 is None. Held until the step is done: a place may be given to another adapter meanwhile
    addresses       [P + 1] int64, of the resident adapters by place, on a device that reads them itself; else None
    max_rank        with addresses: the largest rank of an update
    orders          of a backend: by number of tokens, what it made of their slots
    """

    slots: Tensor
    resident: tuple[PackedAdapter | None, ...]
    selected_slots: Tensor | None = None
    _: KW_ONLY
    addresses: Tensor | None = None
    max_rank: int = 0
    orders: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def slots_of(self, num_rows: int) -> Tensor:
        return self.slots if num_rows == len(self.slots) or self.selected_slots is None else self.selected_slots


@dataclass(slots=True)
class ForwardBatch:
    """A ragged batch, rows back to back.

    positions      [T] int64, absolute
    row_starts     [R + 1] int32; row r is tokens row_starts[r]:row_starts[r + 1]
    context_lens   [R] int32 tokens of the row's context once this step is done (its last position + 1)
    max_count      largest row length; 1 means a pure decode step
    groups         per KV group
    adapters       None: every token is the base model's
    selected       [W] int64, ascending: tokens whose hidden states the model returns; None = all
    num_decodes    leading rows known to be one token each: a hint for attention, which changes no result
    """

    positions: Tensor
    row_starts: Tensor
    context_lens: Tensor
    max_count: int
    groups: tuple[GroupBatch, ...]
    adapters: StepAdapters | None = None
    selected: Tensor | None = None
    num_decodes: int = 0

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's paged cache on one rank: views into its group's pool. The stride between two blocks spans all layers of the group.

    values  [B, 2, S, K, D]; 0 = key, 1 = value; contiguous within a block. int8: an element is its value times its vector's scale
    scales  [B, 2, S, K] float32 if values are int8, else None; contiguous within a block
    """

    values: Tensor
    scales: Tensor | None = None


@dataclass(slots=True)
class KvCache:
    """
    group_of  per model layer: index of its KV group (into ForwardBatch.groups)
    pools     per KV group: uint8 [B, bytes of a block]. A block is one piece of memory: per layer its values, then its scales
    """

    layers: list[LayerKv]
    group_of: tuple[int, ...]
    block_size: int
    pools: tuple[Tensor, ...]

    def block_bytes(self, group: int, block: int) -> Tensor:
        """All layers of the group: uint8, contiguous, a view of the cache."""
        return self.pools[group][block]

    def copy_block(self, group: int, source: int, target: int) -> None:
        self.block_bytes(group, target).copy_(self.block_bytes(group, source))

    def clear_pad_block(self) -> None:
        for group in range(len(self.pools)):
            self.block_bytes(group, 0).zero_()


def stored_as(group: KvGroup, dtype: torch.dtype) -> KvGroup:
    return replace(group, dtype_bytes=dtype.itemsize, scale_bytes=SCALE_BYTES if dtype == torch.int8 else 0)


def allocate_kv(
    shapes: Sequence[tuple[int, int]],
    group_of: tuple[int, ...],
    num_blocks: tuple[int, ...],
    block_size: int,
    dtype: torch.dtype,
    device: TensorDevice,
) -> KvCache:
    """Zeroed caches for all layers, with scales if dtype is int8.

    shapes      per layer, (kv_heads, head_dim)
    group_of    per layer, index of its KV group

    On the host the pages are reserved and not touched: a large cache costs neither start-up time nor memory before it is used.
    """
    pools: list[Tensor] = []
    layers: dict[int, LayerKv] = {}
    for group, blocks in enumerate(num_blocks):
        members = [layer for layer, owner in enumerate(group_of) if owner == group]
        pool, views = _allocate_pool(blocks, [(block_size, *shapes[layer]) for layer in members], dtype, device)
        pools.append(pool)
        layers.update(zip(members, views, strict=True))
    return KvCache([layers[layer] for layer in range(len(shapes))], group_of, block_size, tuple(pools))


def _allocate_pool(
    blocks: int, shapes: list[tuple[int, int, int]], dtype: torch.dtype, device: TensorDevice
) -> tuple[Tensor, list[LayerKv]]:
    """shapes: per layer, (S, K, D). Every view is aligned to its element size: int8 heads have an even size."""
    scale_bytes = SCALE_BYTES if dtype == torch.int8 else 0
    sizes = [2 * math.prod(shape[:-1]) * (shape[-1] * dtype.itemsize + scale_bytes) for shape in shapes]
    pool = device.zeroed_bytes((blocks, sum(sizes)))
    pieces = torch.split(pool, sizes, dim=1)
    return pool, [_layer_of(piece, (2, *shape), dtype) for piece, shape in zip(pieces, shapes, strict=True)]


def _layer_of(piece: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> LayerKv:
    num_bytes = math.prod(shape) * dtype.itemsize
    values = torch.unflatten(piece[:, :num_bytes].view(dtype), 1, shape)
    if dtype != torch.int8:
        return LayerKv(values)
    return LayerKv(values, torch.unflatten(piece[:, num_bytes:].view(torch.float32), 1, shape[:-1]))


SCALE_BYTES = 4
"""One scale, float32."""
