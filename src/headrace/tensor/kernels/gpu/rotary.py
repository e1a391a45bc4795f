"""Triton kernel that applies the rotary embedding and writes keys and values to the paged KV cache, in one pass over a step.

A program handles one token and up to eight heads of queries, keys or values. A head is processed as three pieces (the two halves of the
rotated part, and the rest), so that a thread reads only the values that it writes. Products are rounded before they are added, so that
every variant, and the reference implementation, gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.kernels.gpu.formats import FP8, INT8, MAX_FP8, cache_format

MAX_HEADS = 8


@triton.jit
def _to_fp8(x):
    """NaN stays NaN, which minimum and maximum alone would make a number."""
    x = x.to(tl.float32)
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -MAX_FP8), MAX_FP8))


@triton.jit
def _whole_numbers(x, factor):
    """x times factor [HB, 1] to the nearest whole number, ties to even; 0 for what is no number."""
    whole = (x * factor + 12582912.0) - 12582912.0
    return tl.where(whole == whole, whole, 0.0).to(tl.int8)


@triton.jit
def _store_head(
    target, scale_at, first, second, third, rotated, rest, has_head, i, j,
    HALF: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    if FORMAT == INT8:
        a, b, c = first.to(tl.float32), second.to(tl.float32), third.to(tl.float32)
        largest = tl.maximum(tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1)), tl.max(tl.abs(c), axis=1))
        largest += tl.sum(a * 0.0, axis=1) + tl.sum(b * 0.0, axis=1) + tl.sum(c * 0.0, axis=1)  # NaN where a value is not finite
        largest = largest[:, None]
        factor = tl.where(largest > 0, tl.div_rn(127.0, largest), 0.0)
        tl.store(scale_at, tl.div_rn(largest, 127.0), mask=has_head)
        tl.store(target + i, _whole_numbers(a, factor), mask=rotated)
        tl.store(target + HALF + i, _whole_numbers(b, factor), mask=rotated)
        tl.store(target + j, _whole_numbers(c, factor), mask=rest)
    elif FORMAT == FP8:
        tl.store(target + i, _to_fp8(first).to(DTYPE), mask=rotated)
        tl.store(target + HALF + i, _to_fp8(second).to(DTYPE), mask=rotated)
        tl.store(target + j, _to_fp8(third).to(DTYPE), mask=rest)
    else:
        tl.store(target + i, first.to(DTYPE), mask=rotated)
        tl.store(target + HALF + i, second.to(DTYPE), mask=rotated)
        tl.store(target + j, third.to(DTYPE), mask=rest)


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "slot_ptr"])
def _rotary_scatter_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, position_ptr, cache_ptr, scale_ptr, slot_ptr,
    q_st, q_sh, k_st, k_sh, v_st, v_sh, c_sb, c_sp, c_ss, c_sk, s_sb,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HB: tl.constexpr, HALF_P: tl.constexpr,
    REST_P: tl.constexpr, FORMAT: tl.constexpr, ROTATES: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """ROTATES: queries and keys; STORES: keys and values. Keys that are not stored are rotated in place."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_q: tl.constexpr = (H + HB - 1) // HB if ROTATES else 0
    num_k: tl.constexpr = (K + HB - 1) // HB
    is_q, is_v = group < num_q, group >= num_q + num_k
    head = (group - tl.where(is_q, 0, tl.where(is_v, num_q + num_k, num_q))) * HB + tl.arange(0, HB)[:, None]
    i, j = tl.arange(0, HALF_P)[None, :], 2 * HALF + tl.arange(0, REST_P)[None, :]
    has_head = head < tl.where(is_q, H, K)
    rotated, rest = (i < HALF) & has_head, (j < D) & has_head
    source = k_ptr + token * k_st + head * k_sh
    if is_q:
        source = q_ptr + token * q_st + head * q_sh
    elif is_v:
        source = v_ptr + token * v_st + head * v_sh
    first, second = tl.load(source + i, mask=rotated, other=0.0), tl.load(source + HALF + i, mask=rotated, other=0.0)
    third = tl.load(source + j, mask=rest, other=0.0)
    if ROTATES:
        if not is_v:
            row = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * (2 * HALF) + i
            cos, sin = tl.load(row, mask=i < HALF, other=0.0), tl.load(row + HALF, mask=i < HALF, other=0.0)
            a, b = first.to(tl.float32), second.to(tl.float32)
            # rounded to the activations' dtype first, as the reference does
            first, second = (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
            if is_q or not STORES:
                tl.store(source + i, first, mask=rotated)
                tl.store(source + HALF + i, second, mask=rotated)
    if STORES:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        if (slot >= 0) & (group >= num_q):
            part = is_v.to(tl.int64)  # 0: key, 1: value
            target = cache_ptr + (slot // S) * c_sb + (slot % S) * c_ss + part * c_sp + head * c_sk
            scale_at = scale_ptr + (slot // S) * s_sb + part * (S * K) + (slot % S) * K + head
            _store_head(
                target, scale_at, first, second, third, rotated, rest, has_head, i, j, HALF, FORMAT, cache_ptr.dtype.element_ty
            )  # fmt: skip


def rotary_scatter(
    query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, slot_mapping: Tensor,
    kv_scales: Tensor | None,
) -> None:  # fmt: skip
    """`key` is left as it is."""
    _launch(query, key, value, cos_sin, positions, cache, slot_mapping, kv_scales, cos_sin.shape[1] // 2, rotates=True, stores=True)


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    cache = key[:, None, None]  # of the right shape, and not touched
    _launch(query, key, key, cos_sin, positions, cache, positions, None, cos_sin.shape[1] // 2, rotates=True, stores=False)


def scatter_kv(key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> None:
    _launch(key, key, value, key, slot_mapping, cache, slot_mapping, kv_scales, key.shape[2] // 2, rotates=False, stores=True)


def _launch(
    query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor, slot_mapping: Tensor,
    kv_scales: Tensor | None, half: int, *, rotates: bool, stores: bool,
) -> None:  # fmt: skip
    """Tensors that the chosen parts do not use may be any."""
    tokens, heads, dim = query.shape
    kv_heads = key.shape[1]
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    if not tokens:
        return
    stored, scales = cache_format(cache, kv_scales)
    per_program = min(MAX_HEADS, triton.next_power_of_2(max(heads, kv_heads)))
    groups = triton.cdiv(heads, per_program) * rotates + triton.cdiv(kv_heads, per_program) * (1 + stores)
    _rotary_scatter_kernel[(tokens, groups)](
        query, key, value, cos_sin, positions, cache, scales, slot_mapping,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *cache.stride()[:4], scales.stride(0),
        H=heads, K=kv_heads, S=cache.shape[2], D=dim, HALF=half, HB=per_program, HALF_P=triton.next_power_of_2(half),
        REST_P=triton.next_power_of_2(max(dim - 2 * half, 1)), FORMAT=stored, ROTATES=rotates, STORES=stores,
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
