"""Wraps the linears of a model whose tokens may have adapters: LoRA (Hu et al. 2021), many adapters in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from headrace.tensor.batch import StepAdapters
from headrace.tensor.kernels import AdapterKernels, Linear


class StoredRows(NamedTuple):
    """
    name   of a stored weight, without ".weight"
    rows   those of it that this rank has
    shape  of the whole weight: outputs, inputs
    """

    name: str
    rows: range
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """A stored weight, and the output rows that it makes on this rank.

    name    without ".weight"
    stored  the stored weight's rows that they are, in the order of the output
    """

    name: str
    first_row: int
    stored: tuple[range, ...]

    @property
    def rows(self) -> int:
        return sum(map(len, self.stored))


class AdaptedLinear:
    """A linear without adapters in a step that has none: not one launch more.

    parts_of_output  several where stored weights are multiplied as one
    columns          the stored weights' inputs that this rank has
    """

    runs_only_kernels = True

    def __init__(
        self, linear: Linear, parts_of_output: tuple[AdaptedPart, ...], columns: range, number: int, adapters: ModelAdapters
    ) -> None:
        self.in_features, self.out_features, self.weight_bytes = linear.in_features, linear.out_features, linear.weight_bytes
        self.parts_of_output, self.columns = parts_of_output, columns
        self._linear, self._number, self._adapters = linear, number, adapters

    @property
    def parts(self) -> tuple[object, ...]:
        return (self._linear,)

    def __call__(self, x: Tensor) -> Tensor:
        y, step = self._linear(x), self._adapters.step
        return y if step is None else self._adapters.kernels.apply(y, x, self._number, step)


class ModelAdapters:
    """This rank's linears of one model that adapters may change, in the order in which they were made.

    shapes  outputs and inputs of each stored weight that adapters may change, by name, those of other stages too
    step    of the layers that are being computed; None: all of its tokens are the base model's
    """

    def __init__(self, kernels: AdapterKernels) -> None:
        self.kernels = kernels
        self.linears: list[AdaptedLinear] = []
        self.shapes: dict[str, tuple[int, int]] = {}
        self.step: StepAdapters | None = None

    def wrap(self, linear: Linear, stored: Sequence[StoredRows], columns: range) -> Linear:
        """stored: in the order of the output's rows; columns: `AdaptedLinear.columns`"""
        parts: list[AdaptedPart] = []
        first = 0
        for name, rows, shape in stored:
            self.shapes[name] = shape
            if parts and parts[-1].name == name:
                parts[-1] = replace(parts[-1], stored=_with_next(parts[-1].stored, rows))
            else:
                parts.append(AdaptedPart(name, first, (rows,)))
            first += len(rows)
        adapted = AdaptedLinear(linear, tuple(parts), columns, len(self.linears), self)
        self.linears.append(adapted)
        return adapted


def _with_next(ranges: tuple[range, ...], rows: range) -> tuple[range, ...]:
    *before, last = ranges
    return (*before, range(last.start, rows.stop)) if last.stop == rows.start else (*ranges, rows)
