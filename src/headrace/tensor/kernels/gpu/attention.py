"""Triton kernels of attention over the paged KV cache.

Rows of one token are split-KV ("flash decoding"): a program computes one row, one KV head with all its query heads, and one part of the
row's context. The number of parts depends on the number of rows alone, and context lengths are read on the device, so that a captured graph
stays valid while contexts grow. The program that finishes last adds up the parts, always in the same order.

Rows of several tokens go by tiles ("flash attention"): a program has one KV head and a tile of a row's tokens, each with all its query
heads of that head. Which row a tile belongs to is found on the device, so that the host reads no length.

Shape letters: see `tensor.batch`; G query heads per key/value head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.gpu.counters import NUM_COUNTERS, arrival_counters
from headrace.tensor.kernels.gpu.formats import INT8, cache_format, readable, widen
from headrace.tensor.kernels.gpu.tuning import DecodeVariant, Tuning

LOG2_E = 1.4426950408889634
MIN_SHARE = 64
MAX_SPLITS = 64
MIN_DIM = 16
SHORT_ROW = 8
"""Tokens per row, on average, up to which smaller tiles waste less."""


@triton.jit
def _share(context_ptr, row, num_splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SHARE: tl.constexpr):
    """(first position seen, context, positions of a share) of a row."""
    n = tl.load(context_ptr + row).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(n - WINDOW, 0)
    each = (n - first + num_splits - 1) // num_splits
    return first, n, tl.maximum((each + BLOCK_N - 1) // BLOCK_N * BLOCK_N, MIN_SHARE)


@triton.jit
def _attend(
    q, base, scale_base, table, low, high, factor, c_sb, c_sp, c_ss, s_sb,
    G_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, S: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """(largest score, sum of weights, weighted values) of q [G_P, D_P] over positions low .. high, scores in powers of two."""
    d = tl.arange(0, D_P)
    top = tl.full([G_P], float("-inf"), tl.float32)
    total = tl.zeros([G_P], tl.float32)
    acc = tl.zeros([G_P, D_P], tl.float32)
    for begin in range(low, high, BLOCK_N):
        position = begin + tl.arange(0, BLOCK_N)
        seen = position < high
        block = tl.load(table + position // S, mask=seen, other=0).to(tl.int64)
        source = base + (block * c_sb + (position % S) * c_ss)[:, None] + d[None, :]
        inside = seen[:, None] & (d < D)[None, :]
        key = widen(tl.load(source, mask=inside, other=0), FORMAT).to(q.dtype)
        s = tl.dot(q, tl.trans(key), input_precision="ieee") * factor
        scale_at = scale_base + block * s_sb + (position % S) * K
        if FORMAT == INT8:
            s *= tl.load(scale_at, mask=seen, other=0.0)[None, :]
        s = tl.where(seen[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        if FORMAT == INT8:
            p *= tl.load(scale_at + S * K, mask=seen, other=0.0)[None, :]
        value = widen(tl.load(source + c_sp, mask=inside, other=0), FORMAT).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), value, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _merge(part, part_sums, used, g_mask, d_mask, G_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr):
    """Add up `used` shares: part [.., D] and part_sums [.., 2] point at the first one of each query head."""
    d = tl.arange(0, D_P)
    top = tl.full([G_P], float("-inf"), tl.float32)
    for i in range(used):
        top = tl.maximum(top, tl.load(part_sums + i * 2, mask=g_mask, other=float("-inf"), cache_modifier=".cg"))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([G_P], tl.float32)
    acc = tl.zeros([G_P, D_P], tl.float32)
    for i in range(used):
        weight = tl.exp2(tl.load(part_sums + i * 2, mask=g_mask, other=float("-inf"), cache_modifier=".cg") - top)
        total += weight * tl.load(part_sums + i * 2 + 1, mask=g_mask, other=0.0, cache_modifier=".cg")
        part_at = part[:, None] + i * D + d[None, :]
        acc += weight[:, None] * tl.load(part_at, mask=g_mask[:, None] & d_mask[None, :], other=0.0, cache_modifier=".cg")
    return total, acc


@triton.jit(do_not_specialize=["t_sr", "num_splits"], do_not_specialize_on_alignment=["table_ptr", "context_ptr"])
def _decode_kernel(
    q_ptr, cache_ptr, scale_ptr, table_ptr, context_ptr, out_ptr, part_ptr, sums_ptr, count_ptr, factor, num_splits,
    q_st, q_sh, c_sb, c_sp, c_ss, c_sk, s_sb, t_sr,
    K: tl.constexpr, G: tl.constexpr, G_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_SHARE: tl.constexpr, FORMAT: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first, n, each = _share(context_ptr, row, num_splits, WINDOW, BLOCK_N, MIN_SHARE)
    used = tl.maximum((n - first + each - 1) // each, 1)
    if IS_SPLIT:
        if split >= used:
            return
    g, d = tl.arange(0, G_P), tl.arange(0, D_P)
    g_mask, d_mask = g < G, d < D
    head = kv_head * G + g
    q = tl.load(q_ptr + row * q_st + head[:, None] * q_sh + d[None, :], mask=g_mask[:, None] & d_mask[None, :], other=0.0)
    low = first + split * each
    top, total, acc = _attend(
        q, cache_ptr + kv_head * c_sk, scale_ptr + kv_head, table_ptr + row * t_sr, low, tl.minimum(low + each, n), factor,
        c_sb, c_sp, c_ss, s_sb, G_P, D, D_P, S, K, BLOCK_N, FORMAT,
    )  # fmt: skip
    if IS_SPLIT:
        place = (row * (K * G) + head) * num_splits
        tl.store(part_ptr + (place + split)[:, None] * D + d[None, :], acc, mask=g_mask[:, None] & d_mask[None, :])
        tl.store(sums_ptr + (place + split) * 2, top, mask=g_mask)
        tl.store(sums_ptr + (place + split) * 2 + 1, total, mask=g_mask)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + row * K + kv_head, 1, sem="acq_rel") != used - 1:
            return
        total, acc = _merge(part_ptr + place * D, sums_ptr + place * 2, used, g_mask, d_mask, G_P, D, D_P)
        tl.store(count_ptr + row * K + kv_head, 0)
    target = out_ptr + (row * (K * G) + head)[:, None] * D + d[None, :]
    whole = tl.where(total > 0, total, 1.0)
    tl.store(target, (acc / whole[:, None]).to(out_ptr.dtype.element_ty), mask=g_mask[:, None] & d_mask[None, :])


def padded_dim(dim: int) -> int:
    return max(MIN_DIM, int(triton.next_power_of_2(dim)))


def num_splits(rows: int, kv_heads: int, variant: DecodeVariant) -> int:
    """A power of two, so that there are about as many programs as the device runs at once."""
    wanted = triton.cdiv(variant.programs, max(1, rows * kv_heads))
    return int(min(MAX_SPLITS, triton.next_power_of_2(wanted)))


def decode_attention(
    query: Tensor, cache: Tensor, block_table: Tensor, context_lens: Tensor, out: Tensor, *, scale: float, window: int | None,
    kv_scales: Tensor | None, tuning: Tuning,
) -> None:  # fmt: skip
    """query [R, H, D], one token per row, which stands at context_lens - 1 -> out [R, H, D], contiguous. A context of 0 gives zeros."""
    rows, heads, dim = query.shape
    kv_heads, size = cache.shape[3], cache.shape[2]
    stored, scales = cache_format(cache, kv_scales)
    variant = tuning.decode(cache.element_size(), query.element_size(), dim)
    splits = num_splits(rows, kv_heads, variant)
    assert splits == 1 or rows * kv_heads <= NUM_COUNTERS
    part = empty((rows, heads, splits, dim), torch.float32, query.device) if splits > 1 else out
    sums = empty((rows, heads, splits, 2), torch.float32, query.device) if splits > 1 else out
    group = heads // kv_heads
    _decode_kernel[(rows, kv_heads, splits)](
        query, readable(cache), scales, block_table, context_lens, out, part, sums, arrival_counters(query.device),
        scale * LOG2_E, splits, *query.stride()[:2], *cache.stride()[:4], scales.stride(0), block_table.stride(0),
        K=kv_heads, G=group, G_P=max(16, triton.next_power_of_2(group)), D=dim, D_P=padded_dim(dim), S=size,
        WINDOW=window or 0, BLOCK_N=variant.block_n, MIN_SHARE=max(variant.block_n, MIN_SHARE), FORMAT=stored, IS_SPLIT=splits > 1,
        num_warps=variant.warps, num_stages=variant.stages,
    )  # fmt: skip


@triton.jit
def _find_row(start_ptr, tile, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """(row of a tile, first of the row's tokens that the tile has).

    A row of `count` tokens has ceil(count / BLOCK_Q) tiles or one more: row r begins at tile (its first token) // BLOCK_Q + r.
    """
    base = tl.load(start_ptr + first_row)
    low, high = first_row, num_rows
    while low < high:
        middle = (low + high) // 2
        at = (tl.load(start_ptr + middle) - base) // BLOCK_Q + middle - first_row
        if at <= tile:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    return row, (tile - ((tl.load(start_ptr + row) - base) // BLOCK_Q + row - first_row)) * BLOCK_Q


@triton.jit
def _attend_tile(
    top, total, acc, q, base, scale_base, table, begin, first_seen, last, q_position, factor, c_sb, c_sp, c_ss, s_sb,
    D: tl.constexpr, D_P: tl.constexpr, S: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Positions begin .. begin + BLOCK_N. Those before first_seen and from `last` on are not read."""
    d = tl.arange(0, D_P)
    position = begin + tl.arange(0, BLOCK_N)
    seen = (position >= first_seen) & (position < last)
    block = tl.load(table + position // S, mask=seen, other=0).to(tl.int64)
    source = base + (block * c_sb + (position % S) * c_ss)[:, None] + d[None, :]
    inside = seen[:, None] & (d < D)[None, :]
    key = widen(tl.load(source, mask=inside, other=0), FORMAT).to(q.dtype)
    s = tl.dot(q, tl.trans(key), input_precision="ieee") * factor
    scale_at = scale_base + block * s_sb + (position % S) * K
    if FORMAT == INT8:
        s *= tl.load(scale_at, mask=seen, other=0.0)[None, :]
    if IS_MASKED:
        visible = (position[None, :] <= q_position[:, None]) & seen[None, :]
        if WINDOW > 0:
            visible = visible & (position[None, :] > q_position[:, None] - WINDOW)
        s = tl.where(visible, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, axis=1))
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(p, axis=1)
    if FORMAT == INT8:
        p *= tl.load(scale_at + S * K, mask=seen, other=0.0)[None, :]
    value = widen(tl.load(source + c_sp, mask=inside, other=0), FORMAT).to(q.dtype)
    return new_top, total, acc * shrink[:, None] + tl.dot(p.to(q.dtype), value, input_precision="ieee")


@triton.jit(
    do_not_specialize=["num_rows", "first_row", "t_sr"],
    do_not_specialize_on_alignment=["table_ptr", "start_ptr", "context_ptr"],
)
def _prefill_kernel(
    q_ptr, cache_ptr, scale_ptr, table_ptr, start_ptr, context_ptr, out_ptr, factor, num_rows, first_row,
    q_st, q_sh, c_sb, c_sp, c_ss, c_sk, s_sb, t_sr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    row, q_first = _find_row(start_ptr, tl.program_id(0), first_row, num_rows, BLOCK_Q)
    start = tl.load(start_ptr + row)
    count = tl.load(start_ptr + row + 1) - start
    if q_first >= count:
        return
    n = tl.load(context_ptr + row).to(tl.int32)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, D_P)
    token, head = q_first + m // G, kv_head * G + m % G
    q_mask = ((m < BLOCK_Q * G) & (token < count))[:, None] & (d < D)[None, :]
    row_token = (start + token).to(tl.int64)
    q = tl.load(q_ptr + row_token[:, None] * q_st + head[:, None] * q_sh + d[None, :], mask=q_mask, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_P], tl.float32)
    q_low = n - count + q_first  # position of the tile's first query
    last = tl.minimum(q_low + BLOCK_Q, n)
    base, scale_base = cache_ptr + kv_head * c_sk, scale_ptr + kv_head
    table = table_ptr + row.to(tl.int64) * t_sr
    first_seen, begin, whole = 0, 0, (q_low + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:  # every tile is masked
        first_seen = tl.maximum(q_low - WINDOW + 1, 0)
        whole = first_seen // BLOCK_N * BLOCK_N
    else:
        for at in range(begin, whole, BLOCK_N):
            top, total, acc = _attend_tile(
                top, total, acc, q, base, scale_base, table, at, first_seen, last, n - count + token, factor, c_sb, c_sp, c_ss, s_sb,
                D, D_P, S, K, WINDOW, BLOCK_N, FORMAT, False,
            )  # fmt: skip
    for at in range(whole, last, BLOCK_N):
        top, total, acc = _attend_tile(
            top, total, acc, q, base, scale_base, table, at, first_seen, last, n - count + token, factor, c_sb, c_sp, c_ss, s_sb,
            D, D_P, S, K, WINDOW, BLOCK_N, FORMAT, True,
        )  # fmt: skip
    target = out_ptr + (row_token[:, None] * (K * G) + head[:, None]) * D + d[None, :]
    tl.store(target, (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)


def prefill_attention(
    query: Tensor, cache: Tensor, block_table: Tensor, row_starts: Tensor, context_lens: Tensor, out: Tensor, first_row: int, *,
    scale: float, window: int | None, kv_scales: Tensor | None, tuning: Tuning,
) -> None:  # fmt: skip
    """query [T, H, D] -> out [T, H, D], contiguous, for the rows from first_row on; the rows before it have one token each."""
    tokens, heads, dim = query.shape
    rows, group = context_lens.shape[0] - first_row, heads // cache.shape[3]
    stored, scales = cache_format(cache, kv_scales)
    variant = tuning.prefill(query.element_size(), dim, group, is_short=tokens - first_row <= SHORT_ROW * rows)
    block_q = variant.block_m // group
    grid = (triton.cdiv(tokens - first_row, block_q) + rows, cache.shape[3])
    _prefill_kernel[grid](
        query, readable(cache), scales, block_table, row_starts, context_lens, out, scale * LOG2_E, first_row + rows, first_row,
        *query.stride()[:2], *cache.stride()[:4], scales.stride(0), block_table.stride(0),
        K=cache.shape[3], G=group, D=dim, D_P=padded_dim(dim), S=cache.shape[2], WINDOW=window or 0,
        BLOCK_M=variant.block_m, BLOCK_Q=block_q, BLOCK_N=variant.block_n, FORMAT=stored,
        num_warps=variant.warps, num_stages=variant.stages,
    )  # fmt: skip
