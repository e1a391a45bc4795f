"""Unpacks small integers from 32-bit words. The lowest bits of a word come first."""

from __future__ import annotations

import torch
from torch import Tensor


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
