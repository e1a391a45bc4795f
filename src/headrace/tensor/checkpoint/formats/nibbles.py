"""Converts stored weights of at most four bits to the form that the INT4 kernels multiply, without dequantizing them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.tensor.kernels.rounding import RoundedWeight, group_for

SLAB_ELEMENTS = 1 << 22
"""Weights that are decoded at a time, which limits temporary memory."""
LOST = 2.0**-10
"""Largest error of a scale rounded to float16, as a share of the largest scale of the same output: twice that of rounding in float16's
normal range. A larger error means a number outside that range."""


def decoded(rows: slice, inputs: int, decode: Callable[[slice], Tensor]) -> Tensor:
    """int8 [len(rows), inputs]. `decode` is called for a few rows at a time and may give any dtype."""
    values = torch.empty((rows.stop - rows.start, inputs), dtype=torch.int8)
    step = max(1, SLAB_ELEMENTS // max(inputs, 1))
    for begin in range(rows.start, rows.stop, step):
        end = min(begin + step, rows.stop)
        values[begin - rows.start : end - rows.start] = decode(slice(begin, end))
    return values


def nibbles(values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> RoundedWeight | None:
    """The weight [N, K] = (values - zeros) * scales, with scales and zero points in float16.

    values  int8 [N, K], from -8 to 7
    scales  float32 [N, G], one for each K / G consecutive inputs
    zeros   float32 [N, G]; None: all zero

    None for group sizes that no kernel supports, and for scales or zero points that float16 cannot hold.
    """
    held = scales.half()
    lost = (held.float() - scales).abs().amax(1)
    size = values.shape[1] // scales.shape[1]
    if not (group := group_for(size, size)) or not bool((lost <= LOST * scales.abs().amax(1)).all()):
        return None
    held_zeros = None
    if zeros is not None and bool(zeros.any()):
        held_zeros = zeros.half()
        if not bool(held_zeros.isfinite().all()):
            return None
    repeats = size // group
    if repeats > 1:
        held = held.repeat_interleave(repeats, dim=1)
        held_zeros = None if held_zeros is None else held_zeros.repeat_interleave(repeats, dim=1)
    return RoundedWeight(values, held, group, held_zeros)


def from_minimum(codes: Tensor, scales: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(values, scales, zeros) for `nibbles` of weights that are stored as code * scale + minimum.

    codes   uint8 [n, G, group], from 0 to 15
    scales  float32 [n, G]
    least   float32 [n, G], the minimum of each group

    A minimum that is very large beside the scale has no zero point in float16: each weight of such a group becomes the minimum.
    """
    is_constant = least.abs() > 32768 * scales.abs()
    values = torch.where(is_constant[:, :, None], 0, codes.to(torch.int8) - 8)
    zeros = torch.where(is_constant, -least.sign(), -least / torch.where(scales == 0, 1.0, scales) - 8)
    return values, torch.where(is_constant, least.abs(), scales), torch.where((scales == 0) & ~is_constant, 0.0, zeros)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [R, W] -> uint8 [R, W * 32 / bits]: each row is one stream of unsigned integers of `bits` bits, 1 to 8.

    Where `bits` does not divide 32, integers may lie across two words.
    """
    rows, width = words.shape
    count = width * 32 // bits
    if 8 % bits == 0:  # no integer lies across two bytes
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((words.contiguous().view(torch.uint8)[:, :, None] >> shifts) & ((1 << bits) - 1)).view(rows, count)
    places = torch.arange(count, dtype=torch.int64) * bits
    word, shift = places // 32, places % 32
    low = words[:, word].long() & 0xFFFFFFFF
    high = words[:, (word + 1).clamp(max=width - 1)].long() & 0xFFFFFFFF
    return (((low | (high << 32)) >> shift) & ((1 << bits) - 1)).to(torch.uint8)
