"""Reads weights that are stored as few-bit numbers and scales: code shared by the FP8, FP4 and compressed-tensors formats.

| code | bits | value |
|---|---|---|
| E4M3 | s eeee mmm | float8_e4m3fn of OCP's 8-bit formats: no infinities; 0x7f and 0xff are NaN |
| E2M1 | s ee m | 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, two to a byte, the first in the low half |
| E8M0 | eeeeeeee | 2 ** (e - 127), for scales alone; 255 is NaN |

E2M1 and E8M0 are of OCP's Microscaling formats. Shape letters: N outputs, K inputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.formats.format import StoredParts
from headrace.tensor.checkpoint.formats.nibbles import decoded, nibbles
from headrace.tensor.kernels.rounding import RoundedWeight

FLOATS = ("F32", "BF16", "F16")
E4M3, E8M0 = "F8_E4M3", ("F8_E8M0", "U8")
"""Most writers store E8M0 as plain bytes."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_E2M1_PAIRS = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), dim=1).view(torch.int64).flatten()
"""By byte, the bits of both float32 values in one word, so that bytes are looked up and not codes."""
NOT_ROUNDED = "its rounding of activations unused"
"""For titles of formats whose makers also round activations."""


def to_float(codes: Tensor) -> Tensor:
    """A new tensor, from E4M3 or integers."""
    return codes.to(torch.float32, copy=True)


def decode_e2m1(packed: Tensor) -> Tensor:
    """uint8 [R, W] -> float32 [R, 2 * W]."""
    return _E2M1_PAIRS[packed.int()].view(torch.float32)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """uint8, none 255 -> float32, the exact powers of two; that of 0 is subnormal."""
    bits = exponents.int() << 23
    return torch.where(exponents == 0, 1 << 22, bits).view(torch.float32)


@dataclass(frozen=True, slots=True)
class Blocks:
    """`rows` outputs by `columns` inputs have one scale; 0: all."""

    rows: int
    columns: int

    def stored_shapes(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """Shapes in which scales of a weight [N, K] may be stored; the first is [blocks of outputs, blocks of inputs]."""
        grid = (-(-shape[0] // (self.rows or shape[0])), -(-shape[1] // (self.columns or shape[1])))
        if not self.columns and not self.rows:
            return [grid, (1,), ()]
        return [grid] if self.columns else [grid, grid[:1]]

    @property
    def title(self) -> str:
        if self.rows > 1:
            return f"in blocks of {self.rows} x {self.columns}"
        if self.columns:
            return f"in groups of {self.columns}"
        return "per channel" if self.rows else "per tensor"


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """last((value - zero point) * scale), in float32.

    codes   [N, W] as stored
    decode  rows of codes -> a new float32 tensor [R, K]
    scales  float32 [blocks of outputs, blocks of inputs]
    order   int64 [K]: each input's column of scales, where the inputs of a scale are not consecutive
    zeros   float32 as `scales`; None: all zero
    last    e.g. a division by a scale of the whole tensor
    bits    of the codes, where these are integers
    """

    codes: Tensor
    decode: Callable[[Tensor], Tensor]
    scales: Tensor
    blocks: Blocks
    order: Tensor | None = None
    zeros: Tensor | None = None
    last: Callable[[Tensor], Tensor] | None = None
    bits: int = 0

    def dense(self, rows: slice) -> Tensor:
        values = self.decode(self.codes[rows])
        scale_rows = torch.arange(len(self.codes))[rows] // (self.blocks.rows or len(self.codes))
        if self.zeros is not None:
            values -= self._spread(self.zeros[scale_rows], values.shape[1])
        values *= self._spread(self.scales[scale_rows], values.shape[1])
        return values if self.last is None else self.last(values)

    def rounded(self, rows: slice) -> RoundedWeight | None:
        scale_rows = torch.arange(len(self.codes))[rows] // (self.blocks.rows or len(self.codes))
        if self.last is not None or self.order is not None or self.blocks.rows > 1:
            return None
        scales = self.scales[scale_rows]
        zeros = None if self.zeros is None else self.zeros[scale_rows]
        if 0 < self.bits <= 4:
            values = self._integers(rows)
            is_whole = scales.shape[1] in (1, values.shape[1] / max(self.blocks.columns, 1))  # the last group may be shorter
            return nibbles(values, scales, zeros) if is_whole else None
        if scales.shape[1] > 1 or (zeros is not None and bool(zeros.any())):
            return None
        if self.codes.dtype == torch.float8_e4m3fn:
            return RoundedWeight(self.codes[rows], scales[:, 0].contiguous(), 0)
        return RoundedWeight(self._integers(rows), scales[:, 0].contiguous(), 0) if self.bits == 8 else None

    def _integers(self, rows: slice) -> Tensor:
        inputs = self.decode(self.codes[:1]).shape[1]
        return decoded(rows, inputs, lambda part: self.decode(self.codes[part]))

    def _spread(self, scales: Tensor, inputs: int) -> Tensor:
        if scales.shape[1] == 1:
            return scales
        if self.order is not None:
            return scales[:, self.order]
        return scales[:, :, None].expand(-1, -1, self.blocks.columns).flatten(1)[:, :inputs]


TENSOR, CHANNEL = Blocks(0, 0), Blocks(1, 0)


def bytes_with_scales(shape: tuple[int, int], bits: int, blocks: Blocks, scale_bits: int) -> float:
    """Bytes of a weight [N, K] of `bits` each. scale_bits: of a scale and its zero point, one for each of `blocks`."""
    return (prod(shape) * bits + prod(blocks.stored_shapes(shape)[0]) * scale_bits) / 8


def read_any(parts: StoredParts, name: str, shapes: Sequence[tuple[int, ...]], dtypes: tuple[str, ...]) -> Tensor:
    stored = parts.stored_shape(name)
    return parts.read_part(name, stored if stored in shapes else shapes[0], dtypes).reshape(shapes[0])


def read_scales(parts: StoredParts, name: str, shapes: Sequence[tuple[int, ...]], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
    """The scales as float32; bytes are E8M0. Raises CheckpointError for NaN, and where `read_any` does."""
    stored = read_any(parts, name, shapes, dtypes)
    is_nan = stored == 255 if stored.dtype == torch.uint8 else stored.float().isnan()
    if (number := int(is_nan.sum())) > 0:
        raise CheckpointError(name, f"{number} scales are NaN", "The file is damaged: download or convert it again.")
    return decode_e8m0(stored) if stored.dtype == torch.uint8 else stored.float()


def read_scalar(parts: StoredParts, name: str) -> Tensor:
    return read_any(parts, name, [(1,), (), (1, 1)], ("F32",))[0]


def read_e4m3(
    parts: StoredParts, stem: str, shape: tuple[int, int], *, scales: str, blocks: Blocks, dtypes: tuple[str, ...] = FLOATS
) -> ScaledWeight:
    codes = parts.read_part(f"{stem}.weight", shape, (E4M3,))
    return ScaledWeight(codes, to_float, read_scales(parts, scales, blocks.stored_shapes(shape), dtypes), blocks)


def read_e2m1(parts: StoredParts, stem: str, shape: tuple[int, int], *, codes: str, group: int, dtypes: tuple[str, ...]) -> ScaledWeight:
    """codes: name of a tensor with a scale per output and group of `group` inputs."""
    outputs, inputs = shape
    if inputs % group:
        raise CheckpointError(stem, f"a weight of shape {list(shape)} has no groups of {group} inputs each")
    packed = parts.read_part(codes, (outputs, inputs // 2), ("U8",))
    blocks = Blocks(1, group)
    scales = read_scales(parts, f"{stem}.weight_scale", blocks.stored_shapes(shape), dtypes)
    return ScaledWeight(packed, decode_e2m1, scales, blocks)


def is_e4m3(parts: StoredParts, stem: str) -> bool:
    name = f"{stem}.weight"
    return parts.has(name) and parts.stored_dtype(name) == E4M3
