"""Makes up paged caches, the same for every kernel test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from headrace.tensor.kernels import Kernels
from headrace.tensor.kernels.rounding import round_inputs


@pytest.fixture(autouse=True)
def all_workers() -> None:
    """An engine that an earlier test of this process made may have left fewer: then nothing would be shared between workers."""
    if find_spec("numba") is not None:
        from headrace.tensor.kernels.cpu.jit import launch

        launch.set_thread_limit(10**6)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Arguments of `Kernels.attention`. Everything a row may not see is NaN: unused slots, unused blocks, the pad block."""

    query: Tensor
    cache: Tensor
    block_table: Tensor
    row_starts: Tensor
    context_lens: Tensor
    kv_scales: Tensor | None = None

    def attend(self, kernels: Kernels, *, window: int | None = None) -> Tensor:
        return kernels.attention(
            self.query,
            self.cache,
            self.block_table,
            self.row_starts,
            self.context_lens,
            scale=self.query.shape[2] ** -0.5,
            window=window,
            kv_scales=self.kv_scales,
        )

    def stored_as(self, dtype: torch.dtype) -> PagedBatch:
        """The same with a cache of another element type. What may not be seen stays NaN: in int8, by its scale."""
        if dtype != torch.int8:
            return replace(self, cache=self.cache.to(dtype))
        whole, scales = round_inputs(self.cache)
        return replace(self, cache=whole.to(dtype), kv_scales=scales.squeeze(-1).contiguous())

    def row(self, index: int, first: int = 0, count: int | None = None) -> PagedBatch:
        """Tokens first .. first + count of one row, alone in its step; the cache is the same."""
        start, end = int(self.row_starts[index]) + first, int(self.row_starts[index + 1])
        stop = end if count is None else start + count
        context = self.context_lens[index : index + 1] - (end - stop)
        starts = torch.tensor([0, stop - start], dtype=torch.int32)
        table = self.block_table[index : index + 1]
        return PagedBatch(self.query[start:stop], self.cache, table, starts, context, self.kv_scales)


def make_batch(
    rows: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    seed: int = 0,
) -> PagedBatch:
    """rows: (count, context) each; shared_blocks: that many leading blocks are the same for all rows."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-context // block_size) for _, context in rows]
    shared = min([shared_blocks, *(context // block_size for _, context in rows)])
    num_blocks = 1 + shared + sum(width - shared for width in widths)
    ids = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    common = [next(ids) for _ in range(shared)]
    table = torch.zeros(len(rows), max(widths, default=0) + 1, dtype=torch.int32)
    cache = torch.full((num_blocks, 2, block_size, kv_heads, head_dim), math.nan, dtype=dtype)
    for row, ((_, context), width) in enumerate(zip(rows, widths, strict=True)):
        blocks = common + [next(ids) for _ in range(width - shared)]
        table[row, :width] = torch.tensor(blocks, dtype=torch.int32)
        for place, block in enumerate(blocks):
            filled = min(block_size, context - place * block_size)
            if place >= shared or row == 0:
                cache[block, :, :filled] = torch.randn(2, filled, kv_heads, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0).int()
    # As in a model, queries are a part of a wider fused tensor: their token stride is not heads * head_dim.
    wide = torch.randn(int(starts[-1]), heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    return PagedBatch(wide[:, :heads], cache, table, starts, torch.tensor([context for _, context in rows], dtype=torch.int32))


@pytest.fixture
def paged_batch() -> Callable[..., PagedBatch]:
    return make_batch


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value wanted. NaN and infinity count as infinite."""
    difference = (got.double() - want.double()).abs().max()
    error = float(difference / want.double().abs().max().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


@pytest.fixture(name="relative_error")
def relative_error_fixture() -> Callable[[Tensor, Tensor], float]:
    return relative_error
