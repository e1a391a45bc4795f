"""Weights and inputs in few bits: the definition of the precisions `int8`, `int4` and `fp8`, for every implementation.

int8  one scale per output (float32): w = q * scale, |q| <= 127
int4  one scale per output and group of 32, 64 or 128 inputs (bfloat16): w = q * scale, -8 <= q <= 7
      of a quantized checkpoint, the scale as stored (float16), and where it has them a zero point per scale: w = (q - zero) * scale
fp8   one scale per output (float32): w = q * scale, q in float8_e4m3fn, |q| <= 448

Every row of inputs is rounded as well, by one scale per row from its largest magnitude: to integers within +-127, in fp8 to float8_e4m3fn
within +-448. Products are summed exactly. Rounding is to nearest. An implementation may keep inputs exacter than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

INPUT_LIMIT = 127.0
FP8_LIMIT = 448.0
GROUPS = (128, 64, 32)
SLAB_ELEMENTS = 1 << 23
"""Bounds the size of temporary copies."""


class Precision(Enum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


DEFAULT_GROUP = 64


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """values  int8 or float8_e4m3fn [out, in]
    scales  float32 [out]; with a group, bfloat16 or float16 [out, in / group]
    group   inputs that share a scale; 0: all
    zeros   float16 [out, in / group]; None: all zero. Without a group always None
    """

    values: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None

    @property
    def packed_bytes(self) -> int:
        return self.values.numel() // (2 if self.group else 1) + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def dense(self) -> Tensor:
        wide = self.values.float()
        if not self.group:
            return wide * self.scales[:, None]
        grouped = wide.reshape(*self.scales.shape, self.group)
        if self.zeros is not None:
            grouped -= self.zeros.float()[:, :, None]
        return (grouped * self.scales.float()[:, :, None]).flatten(1)

    def to(self, device: str) -> RoundedWeight:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return RoundedWeight(self.values.to(device), self.scales.to(device), self.group, zeros)

    def rows(self, rows: slice | Tensor) -> RoundedWeight:
        return RoundedWeight(self.values[rows], self.scales[rows], self.group, None if self.zeros is None else self.zeros[rows])

    def columns(self, columns: slice) -> RoundedWeight | None:
        """The same values, in smaller groups where an end of the columns lies within one; None where no group size has both ends."""
        values = self.values[:, columns].contiguous()
        if not self.group:
            return RoundedWeight(values, self.scales, 0)
        first, last, _ = columns.indices(self.values.shape[1])
        group = next((size for size in GROUPS if self.group % size == first % size == last % size == 0), 0)
        if not group:
            return None
        owners = [place // self.group for place in range(first, last, group)]
        return RoundedWeight(values, self.scales[:, owners], group, None if self.zeros is None else self.zeros[:, owners])


def join_rounded(parts: Sequence[RoundedWeight]) -> RoundedWeight | None:
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({(part.group, part.values.dtype, part.scales.dtype) for part in parts}) > 1:
        return None
    has_zeros = any(part.zeros is not None for part in parts)
    zeros = [torch.zeros_like(part.scales) if part.zeros is None else part.zeros for part in parts]
    values, scales = _stacked([part.values for part in parts]), _stacked([part.scales for part in parts])
    return RoundedWeight(values, scales, first.group, _stacked(zeros) if has_zeros else None)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].is_meta:  # arithmetic on the meta device imports half of torch (seconds)
        return torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype, device="meta")
    return torch.cat(list(parts))


def round_weight(weight: Tensor, precision: Precision, *, group: int = DEFAULT_GROUP) -> RoundedWeight:
    """weight [out, in] of any floating dtype. A width that neither `group` nor a smaller one divides is stored as int8."""
    group = group_for(weight.shape[1], group) if precision is Precision.INT4 else 0
    rows, inputs = weight.shape
    is_fp8 = precision is Precision.FP8
    values = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn if is_fp8 else torch.int8, device=weight.device)
    scales = torch.empty((rows, inputs // group) if group else rows, dtype=torch.bfloat16 if group else torch.float32, device=weight.device)
    if not weight.is_meta:
        for part in _slabs(rows, inputs):
            piece = weight[part]
            values[part], scales[part] = _to_fp8(piece) if is_fp8 else _to_int4(piece, group) if group else _to_int8(piece)
    return RoundedWeight(values, scales, group)


def group_for(in_features: int, wanted: int = DEFAULT_GROUP) -> int:
    return next((size for size in GROUPS if size <= wanted and in_features % size == 0), 0)


def _slabs(rows: int, inputs: int) -> Iterator[slice]:
    size = max(1, SLAB_ELEMENTS // max(inputs, 1))
    return (slice(first, first + size) for first in range(0, rows, size))


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    return (wide / _divisor(scales)[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def _to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / FP8_LIMIT
    return to_fp8(wide / _divisor(scales)[:, None]), scales


def to_fp8(x: Tensor) -> Tensor:
    """What is beyond the range becomes its largest number; torch alone would make it NaN."""
    return x.clamp(-FP8_LIMIT, FP8_LIMIT).to(torch.float8_e4m3fn)


def _to_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The value of largest magnitude in a group becomes -8: the range has one more step on that side."""
    grouped = weight.float().reshape(weight.shape[0], -1, group)
    largest = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    scales = (largest / -8).to(torch.bfloat16)
    return (grouped / _divisor(scales.float())[:, :, None]).round_().clamp_(-8, 7).to(torch.int8).flatten(1), scales


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales != 0, scales, 1.0)


def round_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [..., in] -> (whole numbers as float32 [..., in], scales float32 [..., 1]). A row with NaN or infinity has the scale NaN."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True) + (wide * 0.0).sum(dim=-1, keepdim=True)
    limit = torch.full_like(largest, INPUT_LIMIT)  # a number over a tensor would be its reciprocal, rounded, times the number
    factor = torch.where(largest > 0, limit / largest, 0.0)
    return (wide * factor).round_().clamp_(-INPUT_LIMIT, INPUT_LIMIT).nan_to_num_(0.0), largest / INPUT_LIMIT


def round_inputs_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [..., in] -> (float8_e4m3fn [..., in], scales float32 [..., 1])."""
    wide = x.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / FP8_LIMIT).clamp_min(1e-12)
    return to_fp8(wide / scales), scales
