"""Weights that are small numbers times scales: what the formats of float8, of float4 and of compressed-tensors have in common.

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

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.formats.format import StoredParts

FLOATS = ("F32", "BF16", "F16")
E4M3, E8M0 = "F8_E4M3", ("F8_E8M0", "U8")
"""safetensors' words; most writers store E8M0 as plain bytes."""
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""By code."""
NOT_ROUNDED = "activations not rounded"
"""In the titles of formats whose makers also round activations as they compute. Here activations stay as computed."""


def to_float(codes: Tensor) -> Tensor:
    """E4M3 or integers -> a new float32 tensor."""
    return codes.to(torch.float32, copy=True)


def decode_e2m1(packed: Tensor) -> Tensor:
    """uint8 [R, W] -> float32 [R, 2 * W]"""
    return E2M1_VALUES[torch.stack((packed & 15, packed >> 4), dim=-1).int()].flatten(1)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """uint8, none 255 -> float32, the exact powers of two; that of 0 is subnormal."""
    bits = exponents.int() << 23
    return torch.where(exponents == 0, 1 << 22, bits).view(torch.float32)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """Implements `QuantizedWeight`: last((value - zero point) * scale), in float32.

    codes   [N, W] as stored
    decode  rows of codes -> a new float32 tensor [R, K]
    scales  float32 [ceil(N / span), G]
    groups  int64 [K]: each input's column of scales
    span    outputs of a scale
    zeros   float32 as `scales`; None: all zero
    last    what is done with the products, if anything, e.g. a division by a scale of the whole tensor
    """

    codes: Tensor
    decode: Callable[[Tensor], Tensor]
    scales: Tensor
    groups: Tensor
    span: int = 1
    zeros: Tensor | None = None
    last: Callable[[Tensor], Tensor] | None = None

    def dense(self, rows: slice) -> Tensor:
        """See `QuantizedWeight.dense`."""
        scale_rows = torch.arange(len(self.codes))[rows] // self.span
        values = self.decode(self.codes[rows])
        if self.zeros is not None:
            values -= self._spread(self.zeros[scale_rows])
        values *= self._spread(self.scales[scale_rows])
        return values if self.last is None else self.last(values)

    def _spread(self, scales: Tensor) -> Tensor:
        """[R, G] -> what is multiplied with [R, K]"""
        return scales if scales.shape[1] == 1 else scales[:, self.groups]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which weights have one scale: `rows` outputs by `columns` inputs; 0: all."""

    rows: int
    columns: int

    def spans(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(outputs, inputs) of a scale, for a weight [N, K]"""
        return self.rows or shape[0], self.columns or shape[1]

    def stored_shapes(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """Shapes in which scales of a weight [N, K] may be stored; the first is [blocks of outputs, blocks of inputs]."""
        rows, columns = self.spans(shape)
        grid = (-(-shape[0] // rows), -(-shape[1] // columns))
        if not self.columns and not self.rows:
            return [grid, (1,), ()]
        return [grid] if self.columns else [grid, grid[:1]]

    def groups(self, shape: tuple[int, int]) -> Tensor:
        """int64 [K]: each input's column of scales."""
        return torch.arange(shape[1]) // self.spans(shape)[1]

    @property
    def title(self) -> str:
        """For people, e.g. "in groups of 32"."""
        if self.rows > 1:
            return f"in blocks of {self.rows} x {self.columns}"
        if self.columns:
            return f"in groups of {self.columns}"
        return "per channel" if self.rows else "per tensor"


TENSOR, CHANNEL = Blocks(0, 0), Blocks(1, 0)


def read_any(parts: StoredParts, name: str, shapes: Sequence[tuple[int, ...]], dtypes: tuple[str, ...]) -> Tensor:
    """The part, stored in any of the shapes, reshaped to the first. Raises as `StoredParts.read_part`, naming the first."""
    stored = parts.stored_shape(name)
    return parts.read_part(name, stored if stored in shapes else shapes[0], dtypes).reshape(shapes[0])


def read_scales(parts: StoredParts, name: str, shapes: Sequence[tuple[int, ...]], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
    """Scales as float32, none NaN; bytes are E8M0. Raises as `read_any`, and CheckpointError for NaN."""
    stored = read_any(parts, name, shapes, dtypes)
    is_nan = stored == 255 if stored.dtype == torch.uint8 else stored.float().isnan()
    if (number := int(is_nan.sum())) > 0:
        raise CheckpointError(name, f"{number} scales are NaN", "The file is damaged: download or convert it again.")
    return decode_e8m0(stored) if stored.dtype == torch.uint8 else stored.float()


def read_scalar(parts: StoredParts, name: str) -> Tensor:
    """One float32 of a whole tensor, as []. Raises as `read_any`."""
    return read_any(parts, name, [(1,), (), (1, 1)], ("F32",))[0]


def read_e4m3(
    parts: StoredParts, stem: str, shape: tuple[int, int], *, scales: str, blocks: Blocks, dtypes: tuple[str, ...] = FLOATS
) -> ScaledWeight:
    """A weight stored as E4M3, and its scales. scales: the tensor's name. Raises as `read_scales`."""
    codes = parts.read_part(f"{stem}.weight", shape, (E4M3,))
    factors = read_scales(parts, scales, blocks.stored_shapes(shape), dtypes)
    return ScaledWeight(codes, to_float, factors, blocks.groups(shape), blocks.spans(shape)[0])


def read_e2m1(parts: StoredParts, stem: str, shape: tuple[int, int], *, codes: str, group: int, dtypes: tuple[str, ...]) -> ScaledWeight:
    """A weight stored as E2M1 in the tensor `codes`, with a scale per output and group of inputs. Raises as `read_scales`."""
    outputs, inputs = shape
    if inputs % group:
        raise CheckpointError(stem, f"a weight of shape {list(shape)} has no groups of {group} inputs each")
    packed = parts.read_part(codes, (outputs, inputs // 2), ("U8",))
    blocks = Blocks(1, group)
    scales = read_scales(parts, f"{stem}.weight_scale", blocks.stored_shapes(shape), dtypes)
    return ScaledWeight(packed, decode_e2m1, scales, blocks.groups(shape))


def is_e4m3(parts: StoredParts, stem: str) -> bool:
    """Whether the linear's weight is stored, and as E4M3."""
    name = f"{stem}.weight"
    return parts.has(name) and parts.stored_dtype(name) == E4M3
