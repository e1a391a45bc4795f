"""Triton kernel for linear layers in decode: few rows times a stored weight (plain, FP8, INT8 or INT4), out [M, N] = x [M, K] @ w [N, K]^T.

A program computes BLOCK_N outputs of all rows over a part of the inputs (split-K). The program of a tile that finishes last adds up the
sums, always in the same order, so a result does not depend on which one that was. Block sizes divide the weight's shape (`fit`), so that
only rows need a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.gpu.counters import NUM_COUNTERS, arrival_counters
from headrace.tensor.kernels.gpu.formats import FP8, INT4, INT8, IS_COMPILED, PLAIN, expand_int4, expand_int8, planar_words, readable, widen
from headrace.tensor.kernels.gpu.tuning import ProductVariant
from headrace.tensor.kernels.rounding import RoundedWeight

MIN_BLOCK = 16
"""Fewest outputs of a tile, and fewest inputs of a step of the sum, that tensor cores multiply."""
MIN_ROWS = 8
MAX_SPLITS = 16
MAX_PLANAR_ROWS = 4096
_NAMES = {PLAIN.value: "plain", FP8.value: "fp8", INT8.value: "int8", INT4.value: "int4"}
_FIELDS = {INT8.value: 4, INT4.value: 8}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [N, K] in one of `formats`.

    values  PLAIN, FP8: [N, K]; INT8, INT4: planar words int32 [N, K / 4 or K / 8]
    scales  FP8, INT8: float32 [N]; INT4: bfloat16 [K / group, N], or with zero points [2, K / group, N], these last; PLAIN: None
    layout  inputs of a block of planar words
    group   inputs that share a scale in INT4
    """

    format: int
    values: Tensor
    scales: Tensor | None
    out_features: int
    in_features: int
    layout: int = 0
    group: int = 0
    has_zeros: bool = False

    @property
    def zeros_after(self) -> int:
        """Distance in elements from a scale to its zero point in `scales`; 0: no zero points."""
        return self.in_features // self.group * self.out_features if self.has_zeros else 0

    @property
    def name(self) -> str:
        return _NAMES[self.format]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.values, self.scales) if tensor is not None)


def store_planar(weight: RoundedWeight) -> StoredWeight:
    """The number of inputs is a multiple of 64, in INT4 of 128. The words of INT4 hold value + 8. INT4 scales and zero points become
    bfloat16: zero points that are integers stay exact, others keep eight bits."""
    rows, inputs = weight.values.shape
    bits, offset = (4, 8) if weight.group else (8, 0)
    sizes = (512, 256, 128) if weight.group else (256, 128, 64)
    layout = next(size for size in sizes if inputs % size == 0 and (not weight.group or size // 8 <= weight.group))
    words = empty((rows, inputs * bits // 32), torch.int32, weight.values.device)
    for first in range(0, rows, MAX_PLANAR_ROWS):  # the copies on the way are several times as large
        part = slice(first, first + MAX_PLANAR_ROWS)
        words[part] = planar_words(weight.values[part] + offset, bits, layout)
    if not weight.group:
        return StoredWeight(INT8.value, words, weight.scales, rows, inputs, layout)
    scales = weight.scales.t().to(torch.bfloat16).contiguous()
    if weight.zeros is not None:
        scales = torch.stack((scales, weight.zeros.t().to(torch.bfloat16)))
    return StoredWeight(INT4.value, words, scales, rows, inputs, layout, weight.group, weight.zeros is not None)


@triton.jit
def _dot(w, x, acc):
    if IS_COMPILED:
        return tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")
    else:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc)


@triton.jit
def _x_tile(x_ptr, row_at, has_row, at):
    return tl.load(x_ptr + row_at[None, :] + at[:, None], mask=has_row[None, :], other=0.0)


@triton.jit
def _int4_block(
    acc, words, x_ptr, row_at, has_row, at, scale_ptr, n, first_group, N: tl.constexpr, FIELD: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, SCALES_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Eight fields of words [BLOCK_N, KW], FIELD inputs apart, whose scales begin with those of first_group.

    Scaled are the sums of each field, or its weights, which rounds them to the inputs' dtype and costs less where rows are many.
    """
    e = expand_int4(words)
    for j in tl.static_range(8):
        scale_at = scale_ptr + (first_group + j * FIELD // GROUP) * N + n
        scale = tl.load(scale_at)[:, None]
        w = e[j] - tl.load(scale_at + ZEROS)[:, None] if ZEROS else e[j]
        x = _x_tile(x_ptr, row_at, has_row, at + j * FIELD)
        if not SCALES_WEIGHTS:
            acc += _dot(w, x, tl.zeros_like(acc)) * scale.to(tl.float32)
        elif x.dtype == scale.dtype:
            acc = _dot((w * scale).to(x.dtype), x, acc)
        else:
            acc = _dot((w.to(tl.float32) * scale.to(tl.float32)).to(x.dtype), x, acc)
    return acc


@triton.jit
def accumulate(
    acc, w_row, scale_ptr, n, x_ptr, row_at, has_row, first, last,
    N: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FORMAT: tl.constexpr,
    SCALES_WEIGHTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, M_P] plus the products of input blocks first .. last. w_row [BLOCK_N, 1]: where the weight's rows begin."""
    if FORMAT == PLAIN or FORMAT == FP8:
        column = tl.arange(0, BLOCK_K)
        for b in tl.range(first, last, num_stages=STAGES):
            w = widen(tl.load(w_row + (b * BLOCK_K + column)[None, :]), FORMAT)
            acc = _dot(w, _x_tile(x_ptr, row_at, has_row, b * BLOCK_K + column), acc)
    else:
        J: tl.constexpr = 8 if FORMAT == INT4 else 4
        FIELD: tl.constexpr = LAYOUT // J  # words of a layout block, and inputs from one field to the next
        KW: tl.constexpr = BLOCK_K // J
        column = tl.arange(0, KW)
        for b in tl.range(first, last, num_stages=STAGES):
            words = tl.load(w_row + (b * KW + column)[None, :])
            block = b // (FIELD // KW)
            at = block * LAYOUT + (b % (FIELD // KW)) * KW + column
            if FORMAT == INT4:
                first_group = block * (LAYOUT // GROUP)
                acc = _int4_block(
                    acc, words, x_ptr, row_at, has_row, at, scale_ptr, n, first_group, N, FIELD, GROUP, ZEROS, SCALES_WEIGHTS
                )  # fmt: skip
            else:
                e = expand_int8(words)
                for j in tl.static_range(4):
                    acc = _dot(e[j], _x_tile(x_ptr, row_at, has_row, at + j * FIELD), acc)
    return acc


@triton.jit
def _sum_shares(acc, part_at, count_at, split, BLOCK_N: tl.constexpr, M_P: tl.constexpr, SPLIT: tl.constexpr):
    """(whether this share arrived last, then the sum of all). part_at: where the tile's shares stand in the workspace."""
    inner = tl.arange(0, BLOCK_N)[:, None] * M_P + tl.arange(0, M_P)[None, :]
    tl.store(part_at + split * (BLOCK_N * M_P) + inner, acc)
    tl.debug_barrier()
    is_last = tl.atomic_add(count_at, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        acc = tl.zeros([BLOCK_N, M_P], tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(part_at + i * (BLOCK_N * M_P) + inner, cache_modifier=".cg")
        tl.store(count_at, 0)
    return is_last, acc


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, count_ptr, rows, x_st,
    N: tl.constexpr, K: tl.constexpr, M_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    LAYOUT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FORMAT: tl.constexpr, SCALES_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, M_P)
    ROW: tl.constexpr = K // 8 if FORMAT == INT4 else K // 4 if FORMAT == INT8 else K
    blocks: tl.constexpr = K // BLOCK_K
    acc = accumulate(
        tl.zeros([BLOCK_N, M_P], tl.float32), w_ptr + n.to(tl.int64)[:, None] * ROW, scale_ptr, n, x_ptr, m * x_st, m < rows,
        blocks * split // SPLIT, blocks * (split + 1) // SPLIT, N, BLOCK_K, LAYOUT, GROUP, ZEROS, FORMAT, SCALES_WEIGHTS,
        STAGES,
    )  # fmt: skip
    if SPLIT > 1:
        part_at = part_ptr + (tile * SPLIT).to(tl.int64) * (BLOCK_N * M_P)
        is_last, acc = _sum_shares(acc, part_at, count_ptr + tile, split, BLOCK_N, M_P, SPLIT)
        if not is_last:
            return
    if FORMAT == FP8 or FORMAT == INT8:
        acc *= tl.load(scale_ptr + n)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    tl.store(out_ptr + m[None, :] * N + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :])


@dataclass(frozen=True, slots=True)
class TileFit:
    """Block sizes of a variant for one weight. m_p: rows of a tile, padding included."""

    block_n: int
    block_k: int
    num_tiles: int
    m_p: int

    def num_splits(self, weight: StoredWeight, num_weights: int, wanted: int, most: int) -> int:
        """The largest power of two with at most `wanted` programs, and at most `most`."""
        splits = 1
        while 2 * splits <= min(most, weight.in_features // self.block_k) and num_weights * self.num_tiles * 2 * splits <= wanted:
            splits *= 2
        return splits


def fit(weight: StoredWeight, variant: ProductVariant, rows: int) -> TileFit | None:
    """None where no tile size divides the weight."""
    block_n = power_in(weight.out_features, variant.block_n)
    block_k = power_in(weight.layout or weight.in_features, variant.block_k)
    if block_n < MIN_BLOCK or block_k // _FIELDS.get(weight.format, 1) < MIN_BLOCK:
        return None
    rows_p = max(MIN_ROWS, triton.next_power_of_2(min(rows, variant.rows)))
    return TileFit(block_n, block_k, weight.out_features // block_n, rows_p)


def power_in(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)


def product(x: Tensor, weight: StoredWeight, variant: ProductVariant, bias: Tensor | None) -> Tensor:
    """x [M, K] -> [M, N] in the dtype of x, a new tensor. M is at most `variant.rows`, and `fit` is not None for the weight."""
    fitted = fit(weight, variant, x.shape[0])
    assert fitted is not None
    assert x.stride(1) == 1
    rows, size = x.shape[0], weight.out_features
    splits = fitted.num_splits(weight, 1, variant.programs, MAX_SPLITS)
    assert splits == 1 or fitted.num_tiles <= NUM_COUNTERS
    out = empty((rows, size), x.dtype, x.device)
    part = empty((splits * size * fitted.m_p,), torch.float32, x.device) if splits > 1 else out
    _product_kernel[(fitted.num_tiles, splits)](
        x, readable(weight.values), out if weight.scales is None else weight.scales, out if bias is None else bias, out, part,
        arrival_counters(x.device), rows, x.stride(0),
        N=size, K=weight.in_features, M_P=fitted.m_p, BLOCK_N=fitted.block_n, BLOCK_K=fitted.block_k, SPLIT=splits, LAYOUT=weight.layout,
        GROUP=weight.group, ZEROS=weight.zeros_after, FORMAT=weight.format, SCALES_WEIGHTS=variant.scales_weights,
        HAS_BIAS=bias is not None, STAGES=variant.stages,
        num_warps=variant.warps, num_stages=variant.stages,
    )  # fmt: skip
    return out
