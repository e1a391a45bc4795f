"""Linears of every stored format, and the packing that makes them (`WeightPacking`).

| weight | few rows | many rows |
|---|---|---|
| as computed with | the library; our own where its outputs are very many (a head) | the library |
| FP8 | our own, weights widened on the way, inputs as they are | the library, inputs rounded to FP8 |
| INT8, INT4 | the same | dense for as long as it is read, then the library |

How few is in the table of `tuning`. FP8 inputs are rounded to e4m3 (no infinity, largest value 448) with one scale per row. A rounded
weight that its format's tiles do not divide is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.core.errors import ConfigError
from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels import Linear
from headrace.tensor.kernels.gpu.experts import GroupedExperts, expert_of, stacked
from headrace.tensor.kernels.gpu.formats import FP8, INT4, MAX_FP8, PLAIN, expand_int4, expand_int8
from headrace.tensor.kernels.gpu.product import StoredWeight, fit, power_in, product, store_planar
from headrace.tensor.kernels.gpu.tuning import Tuning
from headrace.tensor.kernels.rounding import GROUPS, Precision, RoundedWeight, round_weight

SLAB_ELEMENTS = 1 << 27
"""Values of a weight that are dense at a time: 256 MiB in bfloat16. A layer's weights fit; a head is done in parts."""
MAX_ROWS = 32


class StoredLinear:
    def __init__(self, weight: StoredWeight, bias: Tensor | None, tuning: Tuning) -> None:
        self.weight, self.bias, self.tuning = weight, bias, tuning
        self.out_features, self.in_features, self.weight_bytes = weight.out_features, weight.in_features, weight.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not x.shape[0]:
            return x.new_empty((0, self.out_features))
        variant = self.tuning.product(weight.name, x.shape[0], weight.out_features, x.element_size())
        if variant is None or fit(weight, variant, x.shape[0]) is None:
            return self._of_many(x)
        return product(x, weight, variant, self.bias)

    def _of_many(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.format == PLAIN.value:
            return F.linear(x, weight.values, self.bias)
        if weight.format == FP8.value:
            return multiply_in_fp8(x, weight.values, _scales(weight), self.bias)
        return multiply_dequantized(x, weight, self.bias)


class PaddedLinear:
    """A linear [out, in] whose weight has zeros at its ends."""

    def __init__(self, linear: StoredLinear, out_features: int, in_features: int) -> None:
        self.linear, self.out_features, self.in_features, self.weight_bytes = linear, out_features, in_features, linear.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, self.linear.in_features - self.in_features))
        return self.linear(padded)[:, : self.out_features].contiguous()


def _scales(weight: StoredWeight) -> Tensor:
    assert weight.scales is not None
    return weight.scales


class TritonPacking:
    """Implements `WeightPacking`. FP8 products need a device that has them (`tensor.device`)."""

    keeps_stored = True

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def pack_linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> StoredLinear:
        weight = weight.to(dtype or weight.dtype).contiguous()
        return StoredLinear(StoredWeight(PLAIN.value, weight, None, *weight.shape), bias, self.tuning)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def round_weight(self, weight: Tensor, precision: Precision) -> RoundedWeight:
        """Groups are of 128 where that divides the width."""
        return round_weight(weight, precision, group=max(GROUPS))

    def can_pack(self, weight: RoundedWeight) -> bool:
        return True

    def pack_rounded(self, weight: RoundedWeight, bias: Tensor | None) -> Linear:
        """Inputs are rounded in FP8 products of many rows alone, row by row."""
        rows, inputs = weight.values.shape
        is_fp8 = weight.values.dtype == torch.float8_e4m3fn
        padded = _pad(weight, -rows % 16, -inputs % (128 if weight.group else 64))
        shape = padded.values.shape
        stored = StoredWeight(FP8.value, padded.values, padded.scales, *shape) if is_fp8 else store_planar(padded)
        if shape == weight.values.shape:
            return StoredLinear(stored, bias, self.tuning)
        return PaddedLinear(StoredLinear(stored, None if bias is None else F.pad(bias, (0, -rows % 16)), self.tuning), rows, inputs)

    def group_experts(self, gate_up: Sequence[Linear], down: Sequence[Linear], activation: str) -> GroupedExperts:
        """The linears' weights become views of one tensor.

        Raises ConfigError for experts that the grouped product does not take: one after another they cannot be captured.
        """
        first, second = self._stack(gate_up), self._stack(down)
        if first is None or second is None:
            shape = f"{gate_up[0].out_features} x {gate_up[0].in_features}"
            reason = f"experts of shape {shape} are not multiplied together on a GPU in this format"
            raise ConfigError("model", reason, "Use another --quantization, or --device cpu.")
        return GroupedExperts(first, second, activation, self.tuning)

    def _stack(self, linears: Sequence[Linear]) -> StoredWeight | None:
        stored = [linear for linear in linears if isinstance(linear, StoredLinear) and linear.bias is None]
        if len(stored) < len(linears) or len({(linear.weight.format, linear.weight.has_zeros) for linear in stored}) > 1:
            return None
        weight = stored[0].weight
        if fit(weight, self.tuning.grouped(weight.name, 1, 2), 1) is None:
            return None
        stack = stacked([linear.weight for linear in stored])
        for index, linear in enumerate(stored):
            linear.weight = expert_of(stack, index)
        return stack


def _pad(weight: RoundedWeight, rows: int, inputs: int) -> RoundedWeight:
    if not rows and not inputs:
        return weight
    values = F.pad(weight.values.view(torch.int8), (0, inputs, 0, rows)).view(weight.values.dtype)
    if not weight.group:
        return RoundedWeight(values, F.pad(weight.scales, (0, rows)), 0)
    more = (0, values.shape[1] // weight.group - weight.scales.shape[1], 0, rows)
    zeros = None if weight.zeros is None else F.pad(weight.zeros, more)
    return RoundedWeight(values, F.pad(weight.scales, more), weight.group, zeros)


@triton.jit
def _round_rows_kernel(x_ptr, out_ptr, scale_ptr, x_st, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(x_ptr + row * x_st + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / MAX_FP8, 1e-12)
    tl.store(out_ptr + row * N + column, (x / scale).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, N], last dimension contiguous -> (values float8_e4m3fn [T, N], scales float32 [T, 1])."""
    tokens, n = x.shape
    assert x.stride(1) == 1
    rounded = empty((tokens, n), torch.float8_e4m3fn, x.device)
    scales = empty((tokens, 1), torch.float32, x.device)
    block = triton.next_power_of_2(n)
    _round_rows_kernel[(tokens,)](x, rounded, scales, x.stride(0), N=n, BLOCK=block, num_warps=4 if block <= 4096 else 8)
    return rounded, scales


def multiply_in_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight [N, K]^T, plus bias [N], in the dtype of x, with x rounded by `round_rows`.

    weight  float8_e4m3fn; N and K are multiples of 16
    scales  float32 [N], of the weight's outputs

    torch's product with a scale per row writes bfloat16, so the result has the precision of bfloat16 for every dtype of x.
    """
    rows, row_scales = round_rows(x)
    is_narrow = x.dtype == torch.bfloat16
    added = bias if is_narrow else None
    out = torch._scaled_mm(rows, weight.t(), row_scales, scales[None], bias=added, out_dtype=torch.bfloat16, use_fast_accum=True).to(
        x.dtype
    )
    return out if is_narrow or bias is None else out.add_(bias)


@triton.jit
def _dequantize_kernel(
    w_ptr, scale_ptr, out_ptr, first, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUT: tl.constexpr,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """out [.., K], for outputs from `first` on. N: outputs of the whole weight."""
    J: tl.constexpr = 8 if FORMAT == INT4 else 4
    FIELD: tl.constexpr = LAYOUT // J
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block, n = tl.program_id(1), first + local
    column = tl.arange(0, FIELD)
    words = tl.load(w_ptr + n.to(tl.int64)[:, None] * (K // J) + (block * FIELD + column)[None, :])
    target = out_ptr + local.to(tl.int64)[:, None] * K + (block * LAYOUT + column)[None, :]
    if FORMAT == INT4:
        e = expand_int4(words)
        for j in tl.static_range(8):
            scale_at = scale_ptr + (block * (LAYOUT // GROUP) + j * FIELD // GROUP) * N + n
            w = e[j] - tl.load(scale_at + ZEROS)[:, None] if ZEROS else e[j]
            scale = tl.load(scale_at).to(tl.float32)
            tl.store(target + j * FIELD, (w.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty))
    else:
        e = expand_int8(words)
        scale = tl.load(scale_ptr + n)
        for j in tl.static_range(4):
            tl.store(target + j * FIELD, (e[j].to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty))


def dequantize(weight: StoredWeight, outputs: range, dtype: torch.dtype) -> Tensor:
    """Dense [len(outputs), K] in `dtype`. The ends of `outputs` are multiples of what `power_in` allows."""
    out = empty((len(outputs), weight.in_features), dtype, weight.values.device)
    block_n = power_in(len(outputs), MAX_ROWS)
    _dequantize_kernel[(len(outputs) // block_n, weight.in_features // weight.layout)](
        weight.values, weight.scales, out, outputs.start, N=weight.out_features, K=weight.in_features, BLOCK_N=block_n,
        LAYOUT=weight.layout, GROUP=weight.group, ZEROS=weight.zeros_after, FORMAT=weight.format, num_warps=4,
    )  # fmt: skip
    return out


def multiply_dequantized(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight^T + bias -> [T, N], the weight dense for as long as it is read."""
    slabs = list(_slabs(weight))
    if len(slabs) == 1:
        return F.linear(x, dequantize(weight, slabs[0], x.dtype), bias)
    out = empty((x.shape[0], weight.out_features), x.dtype, x.device)
    for slab in slabs:
        part = slice(slab.start, slab.stop)
        out[:, part] = F.linear(x, dequantize(weight, slab, x.dtype), None if bias is None else bias[part])
    return out


def _slabs(weight: StoredWeight) -> Iterator[range]:
    size = max(MAX_ROWS, SLAB_ELEMENTS // weight.in_features // MAX_ROWS * MAX_ROWS)
    return (range(first, min(first + size, weight.out_features)) for first in range(0, weight.out_features, size))
