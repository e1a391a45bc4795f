"""Tests Numba's paged attention against the reference, and its two promises: rows are independent, unseen slots are never read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba")

from headrace.tensor.kernels.cpu import backend as cpu
from headrace.tensor.kernels.cpu.attention import paged as attention
from headrace.tensor.kernels.cpu.attention import plan as attention_plan
from headrace.tensor.kernels.cpu.jit.launch import set_thread_limit, thread_limit
from headrace.tensor.kernels.reference import KERNELS as REFERENCE

pytestmark = pytest.mark.pure

Make = Callable[..., Any]
Error = Callable[[Tensor, Tensor], float]

FLOAT32_BOUND = 1e-5
BFLOAT16_BOUND = 1 / 128
"""Outputs are rounded to 8 bits once, on both sides: one unit in the last place of the largest value."""

MIXED = [(1, 1), (7, 7), (40, 100), (1, 700), (3, 1500), (2, 64), (1, 129)]


@pytest.mark.parametrize("block_size", [1, 8, 16, 2048])
@pytest.mark.parametrize("window", [None, 1, 33, 600])
def test_mixed_prefill_and_decode_equals_the_reference(
    paged_batch: Make, relative_error: Error, block_size: int, window: int | None
) -> None:
    batch = paged_batch(MIXED, heads=6, kv_heads=2, head_dim=32, block_size=block_size)
    assert relative_error(batch.attend(cpu.KERNELS, window=window), batch.attend(REFERENCE, window=window)) < FLOAT32_BOUND


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (7, 1), (14, 2), (40, 1), (3, 3)])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_every_group_count_and_head_size(paged_batch: Make, relative_error: Error, heads: int, kv_heads: int, head_dim: int) -> None:
    batch = paged_batch([(5, 5), (1, 77), (9, 600)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    assert attention.supports(head_dim)
    assert relative_error(batch.attend(cpu.KERNELS), batch.attend(REFERENCE)) < FLOAT32_BOUND


@pytest.mark.parametrize("window", [None, 50])
def test_bfloat16_stays_within_one_rounding(paged_batch: Make, relative_error: Error, window: int | None) -> None:
    batch = paged_batch(MIXED, heads=6, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    got = batch.attend(cpu.KERNELS, window=window)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, batch.attend(REFERENCE, window=window)) < BFLOAT16_BOUND


STORED = [(torch.float32, torch.bfloat16), (torch.float32, torch.int8), (torch.bfloat16, torch.int8)]
"""Element types of the query and of a cache that has its own."""


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("dtype", "stored"), STORED)
def test_a_cache_with_a_type_of_its_own(
    paged_batch: Make, relative_error: Error, dtype: torch.dtype, stored: torch.dtype, window: int | None
) -> None:
    batch = paged_batch(MIXED, heads=6, kv_heads=2, head_dim=32, dtype=dtype).stored_as(stored)
    got, want = batch.attend(cpu.KERNELS, window=window), batch.attend(REFERENCE, window=window)
    assert got.dtype == dtype
    assert relative_error(got, want) < (FLOAT32_BOUND if dtype == torch.float32 else BFLOAT16_BOUND)


def test_rounded_keys_and_values_are_near_the_unrounded(paged_batch: Make, relative_error: Error) -> None:
    """A key or value is off by half a step of 1/127 of its largest element at most; scales of the wrong vector would show."""
    batch = paged_batch(MIXED, heads=6, kv_heads=2, head_dim=64)
    lengths = torch.logspace(-3, 3, batch.cache.shape[0]).reshape(-1, 1, 1, 1, 1)
    batch.cache.mul_(lengths)
    batch.query.div_(lengths.max())
    assert 1e-6 < relative_error(batch.stored_as(torch.int8).attend(cpu.KERNELS), batch.attend(REFERENCE)) < 0.03


@pytest.mark.parametrize("kernels", [cpu.KERNELS, REFERENCE])
def test_a_head_size_without_whole_registers_is_still_right(paged_batch: Make, relative_error: Error, kernels: Any) -> None:
    batch = paged_batch([(3, 40)], heads=2, kv_heads=1, head_dim=10)
    assert relative_error(batch.stored_as(torch.int8).attend(kernels), batch.attend(REFERENCE)) < 0.03


def test_rows_may_share_blocks(paged_batch: Make, relative_error: Error) -> None:
    batch = paged_batch([(1, 70), (10, 90), (1, 65)], heads=4, kv_heads=2, head_dim=16, block_size=16, shared_blocks=4)
    assert torch.equal(batch.block_table[0, :4], batch.block_table[1, :4])
    assert relative_error(batch.attend(cpu.KERNELS), batch.attend(REFERENCE)) < FLOAT32_BOUND


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 200)), min_size=1, max_size=6),
    shape=st.sampled_from([(1, 1, 16), (6, 2, 32), (7, 1, 64), (8, 8, 16), (8, 2, 80)]),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 250),
    seed=st.integers(0, 2**16),
)
def test_any_ragged_batch(
    paged_batch: Make,
    relative_error: Error,
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int],
    block_size: int,
    window: int | None,
    seed: int,
) -> None:
    heads, kv_heads, head_dim = shape
    fitting = [(min(count, context), context) for count, context in rows]
    batch = paged_batch(fitting, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, seed=seed)
    got, want = batch.attend(cpu.KERNELS, window=window), batch.attend(REFERENCE, window=window)
    assert got.shape == want.shape
    assert want.numel() == 0 or relative_error(got, want) < FLOAT32_BOUND


def test_large_scores_do_not_overflow(paged_batch: Make, relative_error: Error) -> None:
    batch = paged_batch([(3, 300)], heads=2, kv_heads=1, head_dim=16)
    batch.query.mul_(100.0)
    assert relative_error(batch.attend(cpu.KERNELS), batch.attend(REFERENCE)) < 1e-4  # scores near 1000 have 6e-5 of rounding themselves


def test_blocks_before_the_window_are_not_read(paged_batch: Make) -> None:
    """Their table entries may be stale: here they point far outside the pool, where a read would crash or give NaN."""
    batch = paged_batch([(1, 200), (4, 150)], heads=4, kv_heads=2, head_dim=16, block_size=8)
    want = batch.attend(cpu.KERNELS, window=20)
    batch.block_table[0, : (200 - 20) // 8] = 2**30
    batch.block_table[1, : (147 - 20) // 8] = 2**30
    assert torch.equal(batch.attend(cpu.KERNELS, window=20), want)


def test_padding_tokens_behind_the_last_row_are_zero(paged_batch: Make) -> None:
    batch = paged_batch([(2, 5)], heads=2, kv_heads=1, head_dim=16)
    padded = torch.cat([batch.query, torch.full((3, 2, 16), math.nan)])
    got = cpu.KERNELS.attention(padded, batch.cache, batch.block_table, batch.row_starts, batch.context_lens, scale=1.0)
    assert torch.equal(got[2:], torch.zeros(3, 2, 16))


# --- a row's bits depend on that row alone ---


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), *STORED])
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_alone_has_the_bits_it_has_among_others(
    paged_batch: Make, dtype: torch.dtype, stored: torch.dtype, window: int | None
) -> None:
    batch = paged_batch(MIXED, heads=6, kv_heads=2, head_dim=32, dtype=dtype).stored_as(stored)
    together = batch.attend(cpu.KERNELS, window=window)
    for row in range(len(MIXED)):
        start, end = batch.row_starts[row], batch.row_starts[row + 1]
        assert torch.equal(batch.row(row).attend(cpu.KERNELS, window=window), together[start:end])


@pytest.mark.parametrize("stored", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 90])
def test_a_chunked_prefill_has_the_bits_of_a_whole_one(paged_batch: Make, stored: torch.dtype, window: int | None) -> None:
    """Chunks of odd sizes down to one token: prefill, chunked prefill, prefix hits and decode agree."""
    batch = paged_batch([(150, 700)], heads=6, kv_heads=2, head_dim=32).stored_as(stored)
    whole = batch.attend(cpu.KERNELS, window=window)
    first = 0
    for count in (1, 17, 5, 64, 1, 62):
        piece = batch.row(0, first, count).attend(cpu.KERNELS, window=window)
        assert torch.equal(piece, whole[first : first + count])
        first += count


def test_a_context_shared_by_workers_has_the_bits_of_one_worker(paged_batch: Make) -> None:
    """One long decode row: with enough threads its splits become items of their own, folded afterwards."""
    batch = paged_batch([(1, 3000)], heads=2, kv_heads=1, head_dim=64)
    starts, contexts = batch.row_starts.data_ptr(), batch.context_lens.data_ptr()
    items_alone, _, parts_alone, _ = attention_plan.plan_items(starts, contexts, 1, 1, 2, 64, attention_plan.NO_WINDOW, 1)
    items, vectors, parts, workers = attention_plan.plan_items(starts, contexts, 1, 1, 2, 64, attention_plan.NO_WINDOW, 16)
    assert (len(items_alone), parts_alone) == (1, 0)
    assert (len(items), vectors, parts, workers) == (6, 2, 6, 5)
    before = thread_limit()
    if before == 1:
        pytest.skip("one CPU: nothing is shared")
    set_thread_limit(1)
    try:
        alone = batch.attend(cpu.KERNELS)
    finally:
        set_thread_limit(before)
    assert torch.equal(batch.attend(cpu.KERNELS), alone)


def test_nan_in_a_rows_own_data_shows_in_that_row_alone(paged_batch: Make) -> None:
    """A poisoned sequence must be seen as such, not averaged away; its neighbours keep their bits."""
    batch = paged_batch([(2, 20), (2, 30)], heads=2, kv_heads=1, head_dim=16)
    clean = batch.attend(cpu.KERNELS)
    batch.query[0, 0, 3] = math.nan
    got = batch.attend(cpu.KERNELS)
    assert got[0, 0].isnan().all()
    assert torch.equal(got[0, 1], clean[0, 1])
    assert torch.equal(got[1:], clean[1:])


def test_an_unsupported_head_size_or_dtype_is_left_to_the_reference(paged_batch: Make, relative_error: Error) -> None:
    odd = paged_batch([(2, 9)], heads=2, kv_heads=1, head_dim=10)
    assert not attention.supports(10)
    assert torch.equal(odd.attend(cpu.KERNELS), odd.attend(REFERENCE))
    half = paged_batch([(2, 9)], heads=2, kv_heads=1, head_dim=16, dtype=torch.float16)
    assert torch.equal(half.attend(cpu.KERNELS), half.attend(REFERENCE))
