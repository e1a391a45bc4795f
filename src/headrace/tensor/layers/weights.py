"""From stored tensors to packed linears, one at a time, by slice of a rank.

A column-parallel linear keeps a share of its output rows, a row-parallel one a share of its input columns; whole ones are the same on
every rank. Parts of a fused linear (q, k, v; gate, up) are copied from the mapped files straight into the fused weight, which is packed
and dropped, so that at most one unpacked weight exists at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.tensor.kernels import Kernels, Linear
from headrace.tensor.kernels.rounding import Precision, round_weight


class WeightSource(Protocol):
    """Where tensors come from: a checkpoint, random numbers, or shapes only."""

    def has(self, name: str) -> bool:
        """Whether an optional tensor is there."""
        ...

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        """The region of the stored tensor of that whole shape; the caller copies and never changes it."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """`rows` output rows of one stored weight, from row `first`.

    name    of the tensor, e.g. "model.layers.0.self_attn.q_proj.weight"
    rows    output features of this part on all ranks together
    first   row of the stored tensor where the part begins
    stored  rows of the stored tensor; None: exactly `rows`
    expert  (index, number of experts) when the tensor stacks experts in a leading dimension
    """

    name: str
    rows: int
    first: int = 0
    stored: int | None = None
    expert: tuple[int, int] | None = None


def stacked_parts(prefix: str, names: tuple[str, ...], rows: list[int]) -> list[Part]:
    """Parts of a fused linear: one stored tensor each, or all from one tensor that stores them in this order."""
    if len(names) == len(rows):
        return [Part(f"{prefix}{name}.weight", count) for name, count in zip(names, rows, strict=True)]
    (name,) = names
    return [Part(f"{prefix}{name}.weight", count, sum(rows[:i]), sum(rows)) for i, count in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads for one rank, in the dtype and on the device the model computes with. Every tensor returned is a copy.

    precision  of the linears' weights; norms, embeddings and routers stay as they are
    """

    source: WeightSource
    kernels: Kernels
    dtype: torch.dtype
    device: str
    rank: int = 0
    world: int = 1
    precision: Precision = Precision.NONE

    def norm(self, name: str, size: int, *, plus: float = 0.0) -> Tensor:
        """A norm's weight [size]. With `plus` it is w + plus in float32: 1 + w of a small w would be lost in bfloat16."""
        stored = self.source.read(name, (size,))
        if plus:
            return torch.empty(size, dtype=torch.float32, device=self.device).copy_(stored).add_(plus)
        return self._empty(size).copy_(stored)

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        """An embedding table [rows, columns], whole on every rank. A smaller stored dtype is kept: looked-up rows convert exactly."""
        stored = self.source.read(name, (rows, columns))
        dtype = stored.dtype if stored.dtype.itemsize < self.dtype.itemsize else self.dtype
        return torch.empty((rows, columns), dtype=dtype, device=self.device).copy_(stored)

    def column_linear(self, parts: Sequence[Part], in_features: int, *, bias: bool) -> Linear:
        """Parts stacked into one linear; this rank's share of each part's rows. [in] -> [sum of rows / world]"""
        shares = [_share(part.rows, self.rank, self.world, part.name) for part in parts]
        return self._stacked(parts, shares, in_features, bias)

    def whole_linear(self, part: Part, in_features: int, *, bias: bool = False, precision: Precision | None = None) -> Linear:
        """The same on every rank (routers, the head). precision: where it is not the reader's."""
        return self._stacked([part], [range(part.rows)], in_features, bias, precision)

    def row_linear(self, part: Part, in_features: int, *, bias: bool) -> Linear:
        """This rank's share of the input columns; ranks' outputs are to be summed. The bias lives on rank 0 alone."""
        columns = _share(in_features, self.rank, self.world, part.name)
        weight = self._empty(part.rows, len(columns))
        weight.copy_(self._region(part, range(part.rows), in_features, slice(columns.start, columns.stop)))
        added = self._bias([part], [range(part.rows)]) if bias else None  # read on every rank: the checkpoint must hold it
        return self.pack(weight, added if self.rank == 0 else None)

    def pack(self, weight: Tensor, bias: Tensor | None, precision: Precision | None = None) -> Linear:
        """Weight [out, in] as a linear of the wanted precision."""
        precision = precision or self.precision
        if precision is Precision.NONE:
            return self.kernels.pack_linear(weight, bias)
        return self.kernels.pack_rounded(round_weight(weight, precision), bias)

    def _stacked(
        self, parts: Sequence[Part], shares: Sequence[range], in_features: int, bias: bool, precision: Precision | None = None
    ) -> Linear:
        weight = self._empty(sum(len(rows) for rows in shares), in_features)
        targets = torch.split(weight, [len(rows) for rows in shares])
        for part, rows, target in zip(parts, shares, targets, strict=True):
            target.copy_(self._region(part, rows, in_features, slice(None)))
        return self.pack(weight, self._bias(parts, shares) if bias else None, precision)

    def _region(self, part: Part, rows: range, in_features: int, columns: slice) -> Tensor:
        """Rows (counted within the part) and columns of the stored weight, [len(rows), columns]."""
        region: tuple[slice, ...] = (slice(part.first + rows.start, part.first + rows.stop), columns)
        shape: tuple[int, ...] = (part.stored or part.rows, in_features)
        if part.expert is None:
            return self.source.read(part.name, shape, region)
        index, count = part.expert
        return self.source.read(part.name, (count, *shape), (slice(index, index + 1), *region))[0]

    def _bias(self, parts: Sequence[Part], shares: Sequence[range]) -> Tensor:
        bias = self._empty(sum(len(rows) for rows in shares))
        targets = torch.split(bias, [len(rows) for rows in shares])
        for part, rows, target in zip(parts, shares, targets, strict=True):
            region = slice(part.first + rows.start, part.first + rows.stop)
            target.copy_(self.source.read(part.name.removesuffix("weight") + "bias", (part.stored or part.rows,), (region,)))
        return bias

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def _share(size: int, rank: int, world: int, name: str) -> range:
    """This rank's consecutive share. Which sizes may be split was decided by the model: a remainder is our own bug."""
    assert size % world == 0, f"{name}: {size} does not split into {world}"
    each = size // world
    return range(rank * each, (rank + 1) * each)
