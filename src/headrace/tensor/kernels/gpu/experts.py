"""Mixture-of-experts layers on the GPU: sorts the (token, choice) pairs of a step by expert, and runs one grouped product for all experts.

The host takes no part, so the layer can be captured in a CUDA graph. Each program computes one tile of the outputs of one expert, for all
pairs of that expert, and ends at once when no token chose the expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.gpu.elementwise import gated_activation
from headrace.tensor.kernels.gpu.formats import FP8, INT4, INT8, readable
from headrace.tensor.kernels.gpu.product import StoredWeight, accumulate, fit
from headrace.tensor.kernels.gpu.tuning import Tuning

MAX_SPLITS = 4
MAX_SMALL = 1024
"""Pairs that one program puts in order, comparing each with each; more are sorted by the library."""


@triton.jit(do_not_specialize=["pairs"])
def _order_kernel(expert_ptr, order_ptr, start_ptr, pairs, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, PAIRS_P: tl.constexpr):
    i = tl.arange(0, PAIRS_P)
    mine = tl.load(expert_ptr + i, mask=i < pairs, other=EXPERTS).to(tl.int32)
    before = tl.zeros([PAIRS_P], tl.int32)
    expert = tl.arange(0, EXPERTS_P)
    starts = tl.zeros([EXPERTS_P], tl.int32)
    for begin in range(0, pairs, 16):
        j = begin + tl.arange(0, 16)
        other = tl.load(expert_ptr + j, mask=j < pairs, other=EXPERTS + 1).to(tl.int32)
        is_before = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        before += tl.sum(is_before.to(tl.int32), axis=1)
        starts += tl.sum((other[None, :] < expert[:, None]).to(tl.int32), axis=1)
    tl.store(order_ptr + before, i, mask=i < pairs)
    tl.store(start_ptr + expert, starts, mask=expert <= EXPERTS)


def order_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """experts [P] int64 -> (pairs [P] int32 by rising expert, where each expert's pairs begin [num_experts + 1] int32)."""
    pairs = experts.shape[0]
    if pairs > MAX_SMALL:
        found, order = experts.sort(stable=True)
        edges = torch.arange(num_experts + 1, device=experts.device)
        return order.int(), torch.searchsorted(found, edges).int()
    order = empty((pairs,), torch.int32, experts.device)
    starts = empty((num_experts + 1,), torch.int32, experts.device)
    _order_kernel[(1,)](
        experts, order, starts, pairs, EXPERTS=num_experts, EXPERTS_P=triton.next_power_of_2(num_experts + 1),
        PAIRS_P=max(16, triton.next_power_of_2(pairs)), num_warps=4,
    )  # fmt: skip
    return order, starts


@triton.jit(do_not_specialize=["pairs"])
def _grouped_kernel(
    x_ptr, w_ptr, scale_ptr, order_ptr, start_ptr, out_ptr, pairs, x_st, w_sx, s_sx,
    N: tl.constexpr, K: tl.constexpr, M_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    LAYOUT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FORMAT: tl.constexpr, SCALES_WEIGHTS: tl.constexpr,
    TOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [SPLIT, pairs, N]: parts of the product of each pair's row of x, pair // TOP, and its expert's weight."""
    expert, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin, end = tl.load(start_ptr + expert), tl.load(start_ptr + expert + 1)
    if begin >= end:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ROW: tl.constexpr = K // 8 if FORMAT == INT4 else K // 4 if FORMAT == INT8 else K
    blocks: tl.constexpr = K // BLOCK_K
    scales = scale_ptr + expert * s_sx
    for chunk in range(begin, end, M_P):
        m = chunk + tl.arange(0, M_P)
        pair = tl.load(order_ptr + m, mask=m < end, other=0).to(tl.int64)
        acc = accumulate(
            tl.zeros([BLOCK_N, M_P], tl.float32), w_ptr + expert * w_sx + n.to(tl.int64)[:, None] * ROW, scales, n, x_ptr,
            pair // TOP * x_st, m < end, blocks * split // SPLIT, blocks * (split + 1) // SPLIT, N, BLOCK_K, LAYOUT, GROUP, ZEROS,
            FORMAT, SCALES_WEIGHTS, STAGES,
        )  # fmt: skip
        if FORMAT == FP8 or FORMAT == INT8:
            acc *= tl.load(scales + n)[:, None]
        target = out_ptr + (split * pairs + pair)[None, :] * N + n[:, None]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=(m < end)[None, :])


def stacked(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Values [X, ..] and scales [X, ..] in one tensor each. The weights have one format and one shape."""
    scales = [weight.scales for weight in weights if weight.scales is not None]
    values = torch.stack([weight.values for weight in weights])
    return replace(weights[0], values=values, scales=torch.stack(scales) if scales else None)


def expert_of(stack: StoredWeight, index: int) -> StoredWeight:
    return replace(stack, values=stack.values[index], scales=None if stack.scales is None else stack.scales[index])


class GroupedExperts:
    """Implements `Experts`. gate_up, down: from `stacked`."""

    def __init__(self, gate_up: StoredWeight, down: StoredWeight, activation: str, tuning: Tuning) -> None:
        self.gate_up, self.down, self.activation, self.tuning = gate_up, down, activation, tuning

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        order, starts = order_by_expert(experts.reshape(-1), self.gate_up.values.shape[0])
        middle = self._product(x, self.gate_up, order, starts, tokens, top_k)
        return self._product(gated_activation(middle, self.activation), self.down, order, starts, tokens, 1)

    def _product(self, x: Tensor, weight: StoredWeight, order: Tensor, starts: Tensor, tokens: int, pairs_per_row: int) -> Tensor:
        """x [P / pairs_per_row, K] -> [P, N]: of each pair, by its expert. tokens: the most pairs that one expert can have."""
        num_experts, pairs = weight.values.shape[0], order.shape[0]
        variant = self.tuning.grouped(weight.name, tokens, x.element_size())
        fitted = fit(weight, variant, tokens)
        assert fitted is not None
        most = triton.next_power_of_2(tokens) * pairs // tokens  # so that few variants are compiled
        splits = fitted.num_splits(weight, min(num_experts, most), variant.programs, MAX_SPLITS)
        scales = weight.values if weight.scales is None else weight.scales
        out = empty((splits, pairs, weight.out_features), x.dtype if splits == 1 else torch.float32, x.device)
        _grouped_kernel[(fitted.num_tiles, num_experts, splits)](
            x, readable(weight.values), scales, order, starts, out, pairs, x.stride(0), weight.values.stride(0), scales.stride(0),
            N=weight.out_features, K=weight.in_features, M_P=fitted.m_p, BLOCK_N=fitted.block_n, BLOCK_K=fitted.block_k, SPLIT=splits,
            LAYOUT=weight.layout, GROUP=weight.group, ZEROS=weight.zeros_after, FORMAT=weight.format,
            SCALES_WEIGHTS=variant.scales_weights, TOP=pairs_per_row, STAGES=variant.stages,
            num_warps=variant.warps, num_stages=variant.stages,
        )  # fmt: skip
        return out[0] if splits == 1 else out.sum(0).to(x.dtype)
