"""Dequantizes the block formats of GGML (Q4_0, Q4_K, Q6_K, ...), one function per type.

The functions of DENSE take uint8 [n, bytes of a block] and return float32 [n, weights of a block]. Those of NIBBLES leave the integers of
4-bit types as they are. The layouts are those of ggml-common.h. Weights equal ggml's to the bit: products are rounded in the same order
(scale of the block times scale of the group, then times the integer). Shifted bytes never exceed 255.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.tensor.checkpoint.formats.nibbles import from_minimum


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at`: float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., b] -> [..., 2 b]: all low halves of the bytes, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _shifted(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """uint8 [..., b] -> [..., shifts, b]."""
    return (packed[..., None, :] >> torch.tensor(shifts, dtype=torch.uint8)[:, None]) & mask


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [n, 4], bit i for value i -> [n, 32], 16 where the bit is set."""
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).reshape(-1, 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).float() * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _q2_k(blocks: Tensor) -> Tensor:
    """16 groups of 16, each with a scale and a minimum of 4 bits; 2 halves of 128 in which a byte has a value of each quarter."""
    scales = blocks[:, :16]
    values = _shifted(blocks[:, 16:80].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 16, 16)
    factor, least = _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4)
    return (factor[:, :, None] * values - least[:, :, None]).reshape(-1, 256)


def _q3_k(blocks: Tensor) -> Tensor:
    """As Q2_K, with a third bit in a mask of its own and scales of 6 bits, without minimums."""
    low = _shifted(blocks[:, 32:96].reshape(-1, 2, 32), range(0, 8, 2), 3)
    high = _shifted(blocks[:, :32], range(8), 1).reshape(-1, 2, 4, 32)
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8]) | (_shifted(packed[:, 8:], range(0, 8, 2), 3).reshape(-1, 16) << 4)
    values = (low | (high << 2)).reshape(-1, 16, 16).float() - 4
    return (values * (_half(blocks, 108) * (scales.float() - 32))[:, :, None]).reshape(-1, 256)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n, 12] -> scales and minimums [n, 8] of 6 bits, as Q4_K and Q5_K pack them."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=1)
    return scales, torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=1)


def _with_minimums(values: Tensor, blocks: Tensor) -> Tensor:
    """values uint8 [n, 256] of Q4_K or Q5_K -> the weights, in 8 groups of 32."""
    scales, least = _six_bit_pairs(blocks[:, 4:16])
    factor, least = _half(blocks, 0) * scales, _half(blocks, 2) * least
    return (factor[:, :, None] * values.reshape(-1, 8, 32) - least[:, :, None]).reshape(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minimums(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256), blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = _shifted(blocks[:, 16:48], range(8), 1).reshape(-1, 256)
    return _with_minimums(_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | (fifth << 4), blocks)


def _q6_k(blocks: Tensor) -> Tensor:
    """2 halves of 128, in each four bits from 64 bytes and two from 32; 16 groups of 16 with signed scales of 8 bits."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 2, 128)
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return (((low | (high << 4)).reshape(-1, 16, 16).float() - 32) * scales[:, :, None]).reshape(-1, 256)


def _q4_0_nibbles(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _nibbles(blocks[:, 2:]).to(torch.int8) - 8, _half(blocks, 0), None


def _q4_1_nibbles(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return from_minimum(_nibbles(blocks[:, 4:])[:, None], _half(blocks, 0), _half(blocks, 2))


def _q4_k_nibbles(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scales, least = _six_bit_pairs(blocks[:, 4:16])
    return from_minimum(codes, _half(blocks, 0) * scales, -_half(blocks, 2) * least)


NIBBLES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "Q4_0": _q4_0_nibbles,
    "Q4_1": _q4_1_nibbles,
    "Q4_K": _q4_k_nibbles,
}
"""(values, scales, zeros) for `formats.nibbles`, in groups of 32 weights. values may have any shape."""

DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
