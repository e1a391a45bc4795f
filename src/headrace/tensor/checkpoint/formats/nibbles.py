"""Integers of four bits and fewer as a weight that the kernels multiply in the form in which it is stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.tensor.kernels.rounding import RoundedWeight, group_for

SLAB_ELEMENTS = 1 << 22
"""Weights that are decoded at a time, which bounds the size of temporary copies."""
LOST = 2.0**-10
"""What a scale may lose in float16, as a share of its output's largest scale. float16 itself loses half of it at most."""


def decoded(rows: slice, inputs: int, decode: Callable[[slice], Tensor]) -> Tensor:
    """decode(rows) as int8 [len(rows), inputs], a few rows at a time. decode may give any dtype."""
    values = torch.empty((rows.stop - rows.start, inputs), dtype=torch.int8)
    step = max(1, SLAB_ELEMENTS // max(inputs, 1))
    for begin in range(rows.start, rows.stop, step):
        end = min(begin + step, rows.stop)
        values[begin - rows.start : end - rows.start] = decode(slice(begin, end))
    return values


def nibbles(values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> RoundedWeight | None:
    """A weight [N, K] = (value - zero) * scale.

    values  int8 [N, K] within -8..7
    scales  float32 [N, G], of K / G consecutive inputs each
    zeros   float32 [N, G]; None: all zero

    None for groups that the kernels do not take, and for scales or zero points beyond float16.
    """
    held = scales.half()
    lost = (held.float() - scales).abs().amax(1)
    size = values.shape[1] // scales.shape[1]
    if not (group := group_for(size, size)) or not bool((lost <= LOST * scales.abs().amax(1)).all()):
        return None
    found = None
    if zeros is not None and bool(zeros.any()):
        found = zeros.half()
        if not bool(found.isfinite().all()):
            return None
    repeats = size // group
    if repeats > 1:
        held = held.repeat_interleave(repeats, dim=1)
        found = None if found is None else found.repeat_interleave(repeats, dim=1)
    return RoundedWeight(values, held, group, found)


def from_minimum(codes: Tensor, scales: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights code * scale + least as (values, scales, zeros) of `nibbles`. codes uint8 [n, G, group], 0..15; scales, least float32 [n, G].

    Where the minimum is too large for a zero point of that scale, the codes say next to nothing, and the group becomes its minimum.
    """
    is_constant = least.abs() > 32768 * scales.abs()
    values = torch.where(is_constant[:, :, None], 0, codes.to(torch.int8) - 8)
    zeros = torch.where(is_constant, -least.sign(), -least / torch.where(scales == 0, 1.0, scales) - 8)
    return values, torch.where(is_constant, least.abs(), scales), torch.where((scales == 0) & ~is_constant, 0.0, zeros)
