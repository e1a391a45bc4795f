"""Reads the weights of one rank from a checkpoint, and makes them into norms, embedding tables and packed linears.

A column-parallel linear gets this rank's part of the output rows, a row-parallel linear its part of the input columns, embedding and head
its part of the vocabulary. Weights are read one at a time: at most one unpacked weight, with its parts, is in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.core.parallelism import ALONE, Place
from headrace.tensor.device import TensorDevice
from headrace.tensor.kernels import Backend, Kernels, Linear
from headrace.tensor.kernels.rounding import Precision, RoundedWeight, group_for, join_rounded
from headrace.tensor.layers.adapted import ModelAdapters, StoredRows
from headrace.tensor.layers.table import HeldTable, Table
from headrace.tensor.peers import NO_PEERS, Peers


class WeightSource(Protocol):
    """Tensors by name, from a checkpoint, from a random generator, or without values (shapes only)."""

    def has(self, name: str) -> bool:
        """Asked for optional tensors."""
        ...

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Reads no value. Raises CheckpointError where the tensor is missing or has another shape."""
        ...

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        """Callers copy the result and never change it.

        Raises CheckpointError when the tensor is missing, has another shape, or cannot be read.
        """
        ...


class ExpectedWeights:
    """Checks that a source has what a model would read, and reads nothing: tensors are on the meta device."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self.has, self.expect, self._dtype = source.has, source.expect, dtype

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        self.expect(name, shape)
        return torch.empty(shape, dtype=self._dtype, device="meta")[region or (slice(None),)]


class StoredSource(Protocol):
    """The weights of a quantized checkpoint in their stored form, by the names of WeightSource."""

    def precision_of(self, name: str) -> Precision:
        """Precision in which a weight stays in memory: INT4, INT8 or FP8; NONE for a weight that is not quantized or is dequantized."""
        ...

    def rounded(self, name: str, shape: tuple[int, ...], rows: slice) -> RoundedWeight | None:
        """Outputs `rows` of a weight in stored form, scales and zero points rounded to float16; None where no kernel multiplies that form.

        Raises CheckpointError when a tensor of the weight is missing or has another shape or dtype.
        """
        ...


class LinearStore(Protocol):
    """Packed linears and tables that are kept on disk between starts."""

    def find(self, name: str) -> Linear | None: ...

    def keep(self, name: str, linear: Linear) -> None: ...

    def find_table(self, name: str, shape: tuple[int, int], reread: Callable[[], Tensor]) -> Table | None: ...

    def keep_table(self, name: str, table: Tensor) -> None: ...


_INTEGERS = (Precision.INT4, Precision.INT8)

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a linear: `rows` output rows of one stored weight, from row `first` on.

    rows    on all ranks together
    stored  rows of the stored tensor; None: exactly `rows`
    expert  (index, number of experts) when the tensor stacks experts in a leading dimension
    """

    name: str
    rows: int
    first: int = 0
    stored: int | None = None
    expert: tuple[int, int] | None = None


def stacked_parts(prefix: str, names: tuple[str, ...], rows: list[int]) -> list[Part]:
    """One stored tensor for each part, or one tensor that stores all parts in order."""
    if len(names) == len(rows):
        return [Part(f"{prefix}{name}.weight", count) for name, count in zip(names, rows, strict=True)]
    (name,) = names
    return [Part(f"{prefix}{name}.weight", count, sum(rows[:i]), sum(rows)) for i, count in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Every returned tensor is a copy, but for a linear or table from `store`.

    dtype      of the linears' products
    precision  of the linears' weights; norms, embeddings and routers are not rounded
    stored     None: all weights are rounded to `precision`
    store      None: everything is read from the checkpoint
    peers      layers sum the outputs of row-parallel linears by it
    adapters   None: no linear of the model can have adapters
    held       bits of a weight (4, 8; 16 means 16 or more) -> number of linears that have them

    Methods that read raise CheckpointError when a stored tensor is missing, has another shape or cannot be read, and ConfigError where a
    part of a rounded weight would not be rounded as the whole.
    """

    source: WeightSource
    backend: Backend
    dtype: torch.dtype
    device: TensorDevice
    place: Place = ALONE
    peers: Peers = NO_PEERS
    precision: Precision = Precision.NONE
    store: LinearStore | None = None
    stored: StoredSource | None = None
    adapters: ModelAdapters | None = None
    held: Counter[int] = field(default_factory=Counter)

    @property
    def kernels(self) -> Kernels:
        return self.backend.kernels

    @property
    def activations(self) -> torch.dtype:
        """Dtype of norms, of biases, and of the tensors between layers."""
        return self.backend.packing.activation_dtype(self.dtype)

    @property
    def tp(self) -> int:
        return self.place.parallelism.tp

    def share(self, size: int, *, copies: int = 1) -> range:
        """This rank's, consecutive; `copies` neighbours have the same. `models.division` refuses sizes that do not divide."""
        parts = self.tp // copies
        assert size % parts == 0, f"{size} does not divide into {parts}"
        each = size // parts
        first = self.place.tp_rank // copies * each
        return range(first, first + each)

    def vocabulary(self, size: int) -> range:
        """This rank's rows of embedding and head, as many on each but the last, which may have fewer."""
        each = -(-size // self.tp)
        return range(size)[self.place.tp_rank * each :][:each]

    def norm(self, name: str, size: int, *, plus: float = 0.0) -> Tensor:
        """w [size]. plus: the result is w + plus in float32, since bfloat16 would lose a small w in the sum 1 + w."""
        stored = self.source.read(name, (size,))
        if plus:
            return torch.empty(size, dtype=torch.float32, device=self.device.name).copy_(stored).add_(plus)
        return self._empty(size).copy_(stored)

    def table(self, name: str, rows: int, columns: int) -> Table:
        shape = len(self.vocabulary(rows)), columns

        def read() -> Tensor:
            return self._table(name, rows, columns)

        if self.store is not None and (known := self.store.find_table(name, shape, read)) is not None:
            self.source.expect(name, (rows, columns))
            return known
        table = read()
        if self.store is not None:
            self.store.keep_table(name, table)
        return HeldTable(table)

    def _table(self, name: str, rows: int, columns: int) -> Tensor:
        """A stored dtype of fewer bits is kept, since its rows convert exactly."""
        own = self.vocabulary(rows)
        stored = self.source.read(name, (rows, columns), (slice(own.start, own.stop),))
        dtype = stored.dtype if stored.dtype.itemsize < self.dtype.itemsize else self.dtype
        return torch.empty((len(own), columns), dtype=dtype, device=self.device.name).copy_(stored)

    def column_linear(self, parts: Sequence[Part], in_features: int, *, bias: bool, shares: Sequence[range] = ()) -> Linear:
        """This rank's share of the rows of each part, [in] -> [rows of all shares]. shares: none where each is `share`."""
        shares = shares or [self.share(part.rows) for part in parts]
        return self._adapted(self._stacked(parts, shares, in_features, bias), parts, shares, in_features, range(in_features))

    def whole_linear(self, part: Part, in_features: int, *, precision: Precision | None = None) -> Linear:
        """The same on every rank: a router. precision: None: the reader's."""
        return self._stacked([part], [range(part.rows)], in_features, False, precision)

    def head(self, part: Part, in_features: int) -> Linear:
        return self._stacked([part], [self.vocabulary(part.rows)], in_features, False)

    def row_linear(self, part: Part, in_features: int, *, bias: bool) -> Linear:
        """This rank's share of the input columns. Callers sum the outputs over ranks; only the first has the bias."""
        linear = self._row(part, in_features, bias)
        return self._adapted(linear, [part], [range(part.rows)], in_features, self.share(in_features))

    def without_adapters(self) -> WeightReader:
        return replace(self, adapters=None)

    def undivided(self) -> WeightReader:
        """For layers that this rank has whole: experts."""
        return replace(self, place=ALONE)

    def _adapted(self, linear: Linear, parts: Sequence[Part], shares: Sequence[range], in_features: int, columns: range) -> Linear:
        if self.adapters is None:
            return linear
        stored = [
            StoredRows(
                part.name.removesuffix(".weight"),
                range(part.first + own.start, part.first + own.stop),
                (part.stored or part.rows, in_features),
            )
            for part, own in zip(parts, shares, strict=True)
        ]
        return self.adapters.wrap(linear, stored, columns)

    def _row(self, part: Part, in_features: int, bias: bool) -> Linear:
        if (known := self._known([part], in_features, bias)) is not None:
            return known
        own = self.share(in_features)
        columns = ALL if self.tp == 1 else slice(own.start, own.stop)
        weight = self._weight([part], [range(part.rows)], in_features, columns, None)
        added = self._bias([part], [range(part.rows)]) if bias else None  # read on every rank, so that a missing one is found
        return self._packed([part], weight, added if self.place.tp_rank == 0 else None)

    def tied_head(self, name: str, table: Table | None, rows: int, columns: int) -> Linear:
        """A linear whose weight is this rank's part of an embedding table [rows, columns]. table: None: it was not read before."""
        part = Part(f"{name} as head", rows)
        if (known := self._known([part], columns, False, is_stored=False)) is not None:
            return known
        weight = self._table(f"{name}.weight", rows, columns) if table is None else table.whole()
        precision = self.precision
        if self.stored is not None and self.stored.precision_of(f"{name}.weight") in _INTEGERS:
            precision = Precision.INT8
        return self._packed([part], self._rounded(weight.to(self._weight_dtype([weight])), precision), None)

    def _known(self, parts: Sequence[Part], in_features: int, bias: bool, *, is_stored: bool = True) -> Linear | None:
        """The linear of these parts, if it was kept. Its weights must be in the checkpoint all the same, unless is_stored is false."""
        if self.store is None:
            return None
        if (known := self.store.find(_name(parts))) is not None and is_stored:
            for part in parts:
                self.source.expect(part.name, self._stored_shape(part, in_features))
                if bias:
                    self.source.expect(_bias_name(part), (part.stored or part.rows,))
        return None if known is None else self._counted(known)

    def _packed(self, parts: Sequence[Part], weight: Tensor | RoundedWeight, bias: Tensor | None) -> Linear:
        packing = self.backend.packing
        made = packing.pack_rounded(weight, bias) if isinstance(weight, RoundedWeight) else packing.pack_linear(weight, bias, self.dtype)
        if self.store is not None:
            self.store.keep(_name(parts), made)
        return self._counted(made)

    def _counted(self, linear: Linear) -> Linear:
        bits = 8 * linear.weight_bytes / (linear.in_features * linear.out_features)
        self.held[4 if bits < 7 else 8 if bits < 15 else 16] += 1
        return linear

    def _weight(
        self, parts: Sequence[Part], shares: Sequence[range], in_features: int, columns: slice, precision: Precision | None
    ) -> Tensor | RoundedWeight:
        """The parts' weights, stacked by rows. precision None: as they are stored, where the backend multiplies them so, or the reader's.

        Integers that the backend does not multiply as they are stored are rounded to INT8.
        """
        if precision is None and self.stored is not None:
            wanted = [self.stored.precision_of(part.name) for part in parts]
            is_held = Precision.NONE not in wanted and (Precision.FP8 not in wanted or self.device.has_fp8)
            if is_held and (found := self._as_stored(self.stored, parts, shares, in_features, columns)) is not None:
                return found
            precision = Precision.INT8 if all(part in _INTEGERS for part in wanted) else None
        weight = self._joined([self._region(part, rows, in_features, columns) for part, rows in zip(parts, shares, strict=True)])
        precision = precision or self.precision
        rounded = self._rounded(weight, precision)
        has_groups = not isinstance(rounded, RoundedWeight) or rounded.group > 0
        if columns != ALL and precision is Precision.INT4 and not has_groups and (group := group_for(in_features)):
            self._refuse(parts[0].name, in_features, group)
        return rounded

    def _as_stored(
        self, stored: StoredSource, parts: Sequence[Part], shares: Sequence[range], in_features: int, columns: slice
    ) -> RoundedWeight | None:
        found: list[RoundedWeight] = []
        for part, rows in zip(parts, shares, strict=True):
            region = slice(part.first + rows.start, part.first + rows.stop)
            weight = stored.rounded(part.name, self._stored_shape(part, in_features), region) if part.expert is None else None
            if weight is None:
                return None
            found.append(weight.to(self.device.name))
        joined, can_pack = join_rounded(found), self.backend.packing.can_pack
        if joined is None or not can_pack(joined):
            return None
        if columns == ALL:
            return joined
        own = joined.columns(columns)
        if own is None or not can_pack(own):
            self._refuse(parts[0].name, in_features, joined.group)
        return own

    def _refuse(self, name: str, in_features: int, group: int) -> NoReturn:
        """A part of the inputs would be held in another precision than all of them."""
        groups = f"in groups of {group}" if group else "in few bits"
        reason = f"{self.tp}: {name} is rounded {groups} of its {in_features} inputs, which does not divide into as many parts"
        raise ConfigError("tensor_parallel_size", reason, "Use a smaller one, or weights that are not quantized.")

    def _rounded(self, weight: Tensor, precision: Precision) -> Tensor | RoundedWeight:
        return weight if precision is Precision.NONE else self.backend.packing.round_weight(weight, precision)

    def _stacked(
        self, parts: Sequence[Part], shares: Sequence[range], in_features: int, bias: bool, precision: Precision | None = None
    ) -> Linear:
        if (known := self._known(parts, in_features, bias)) is not None:
            return known
        weight = self._weight(parts, shares, in_features, ALL, precision)
        return self._packed(parts, weight, self._bias(parts, shares) if bias else None)

    def _joined(self, regions: Sequence[Tensor]) -> Tensor:
        rows = [len(region) for region in regions]
        shape, dtype = (sum(rows), regions[0].shape[1]), self._weight_dtype(regions)
        weight = self.device.empty_weight(shape, dtype)
        for target, region in zip(torch.split(weight, rows), regions, strict=True):
            target.copy_(region)
        return weight

    def _weight_dtype(self, stored: Sequence[Tensor]) -> torch.dtype:
        """bfloat16 is not widened to float32, which holds the same values in twice the bytes."""
        is_narrow = self.dtype == torch.float32 and all(tensor.dtype == torch.bfloat16 for tensor in stored)
        return torch.bfloat16 if is_narrow else self.dtype

    def _region(self, part: Part, rows: range, in_features: int, columns: slice) -> Tensor:
        """Rows (counted within the part) and columns of the stored weight, [len(rows), columns]."""
        region: tuple[slice, ...] = (slice(part.first + rows.start, part.first + rows.stop), columns)
        shape = self._stored_shape(part, in_features)
        if part.expert is None:
            return self.source.read(part.name, shape, region)
        index, _ = part.expert
        return self.source.read(part.name, shape, (slice(index, index + 1), *region))[0]

    @staticmethod
    def _stored_shape(part: Part, in_features: int) -> tuple[int, ...]:
        shape = (part.stored or part.rows, in_features)
        return shape if part.expert is None else (part.expert[1], *shape)

    def _bias(self, parts: Sequence[Part], shares: Sequence[range]) -> Tensor:
        bias = self._empty(sum(len(rows) for rows in shares))
        targets = torch.split(bias, [len(rows) for rows in shares])
        for part, rows, target in zip(parts, shares, targets, strict=True):
            region = slice(part.first + rows.start, part.first + rows.stop)
            target.copy_(self.source.read(_bias_name(part), (part.stored or part.rows,), (region,)))
        return bias

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.activations, device=self.device.name)


def _bias_name(part: Part) -> str:
    return part.name.removesuffix("weight") + "bias"


def _name(parts: Sequence[Part]) -> str:
    """A linear's name on disk. Parts of one stored tensor differ in their first row and expert."""
    return "+".join(f"{part.name}@{part.first}" + (f"#{part.expert[0]}" if part.expert else "") for part in parts)
