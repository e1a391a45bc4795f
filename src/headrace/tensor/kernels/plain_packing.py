"""Linear layers that torch computes, with weights in their stored layout: the reference for the packed linears of every backend.

A backend without packing of its own uses these linears too. No weight is reordered or stored on disk. `kernels.rounding` defines the
arithmetic of `RoundedLinear`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.tensor.kernels.rounding import Precision, RoundedWeight, round_inputs, round_inputs_to_fp8, round_weight


class PlainLinear:
    """y = x @ weight.T + bias. The weight keeps its dtype; x is rounded to that dtype; sums, bias and result have the dtype of x."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype).to(x.dtype), self.weight.to(x.dtype), self.bias)


class RoundedLinear:
    """A linear with a rounded weight (INT4, INT8, FP8), multiplied as `kernels.rounding` defines. Sums are exact, in float64."""

    def __init__(self, weight: RoundedWeight, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.values.shape
        self.weight_bytes = weight.packed_bytes

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = round_inputs_to_fp8(x) if self.weight.values.dtype == torch.float8_e4m3fn else round_inputs(x)
        out = torch.zeros((x.shape[0], self.out_features), dtype=torch.float64, device=x.device)
        size = self.weight.group or self.in_features
        own = self.weight.scales.float().reshape(self.out_features, -1)  # [out, groups]
        for group in range(own.shape[1]):
            part = slice(group * size, (group + 1) * size)
            sums = values[:, part].double() @ self.weight.values[:, part].double().T
            if self.weight.zeros is not None:
                sums -= values[:, part].double().sum(1, keepdim=True) * self.weight.zeros[:, group].double()
            out += sums * own[:, group].double()
        out *= scales.double()
        return (out if self.bias is None else out + self.bias.double()).to(x.dtype)


class PlainPacking:
    """Makes the linears of this module; implements `WeightPacking`. Stateless."""

    keeps_stored = False

    def pack_linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> PlainLinear:
        return PlainLinear(weight.to(dtype or weight.dtype), bias)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def round_weight(self, weight: Tensor, precision: Precision) -> RoundedWeight:
        return round_weight(weight, precision)

    def can_pack(self, weight: RoundedWeight) -> bool:
        return True

    def pack_rounded(self, weight: RoundedWeight, bias: Tensor | None) -> RoundedLinear:
        return RoundedLinear(weight, bias)


PACKING = PlainPacking()
