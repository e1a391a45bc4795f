"""Linears of every stored format, and the packing that makes them (`WeightPacking`).

| weight | few rows | many rows |
|---|---|---|
| as computed with | the library; our own where its outputs are very many (a head) | the library |
| FP8 | our own, weights widened on the way, inputs as they are | the library, inputs rounded to FP8 |
| INT8, INT4 | the same | dense for as long as it is read, then the library |

How few is in the table of `tuning`. A rounded weight that its format's tiles do not divide is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.core.errors import ConfigError
from headrace.tensor.kernels import Linear
from headrace.tensor.kernels.gpu import dequantize, fp8
from headrace.tensor.kernels.gpu.experts import GroupedExperts, expert_of, stacked
from headrace.tensor.kernels.gpu.formats import FP8, PLAIN
from headrace.tensor.kernels.gpu.product import StoredWeight, fit, product, store_planar
from headrace.tensor.kernels.gpu.tuning import Tuning
from headrace.tensor.kernels.rounding import GROUPS, Precision, RoundedWeight, round_weight


class StoredLinear:
    """y = x @ weight.T + bias for a weight in any of the formats. x has the dtype that the model computes with."""

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
            return fp8.product_of_many(x, weight.values, _scales(weight), self.bias)
        return dequantize.product_of_many(x, weight, self.bias)


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
        """As `rounding.round_weight`, with groups of 128 where they divide the width."""
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
        """See `Backend.group_experts`. The linears' weights become views of one tensor.

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
