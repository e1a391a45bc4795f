"""Wraps the linears of a model whose tokens may have adapters: LoRA (Hu et al. 2021), many adapters in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headrace.tensor.batch import StepAdapters
from headrace.tensor.kernels import AdapterKernels, Linear


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """A stored weight, and the output rows that it makes. name: without ".weight"."""

    name: str
    first_row: int
    rows: int


class AdaptedLinear:
    """A linear without adapters in a step that has none: not one launch more.

    parts_of_output  several where stored weights are multiplied as one
    """

    runs_only_kernels = True

    def __init__(self, linear: Linear, parts_of_output: tuple[AdaptedPart, ...], number: int, adapters: ModelAdapters) -> None:
        self.in_features, self.out_features, self.weight_bytes = linear.in_features, linear.out_features, linear.weight_bytes
        self.parts_of_output = parts_of_output
        self._linear, self._number, self._adapters = linear, number, adapters

    @property
    def parts(self) -> tuple[object, ...]:
        return (self._linear,)

    def __call__(self, x: Tensor) -> Tensor:
        y, step = self._linear(x), self._adapters.step
        return y if step is None else self._adapters.kernels.apply(y, x, self._number, step)


class ModelAdapters:
    """The linears of one model that adapters may change, in the order in which they were made.

    step  of the layers that are being computed; None: all of its tokens are the base model's
    """

    def __init__(self, kernels: AdapterKernels) -> None:
        self.kernels = kernels
        self.linears: list[AdaptedLinear] = []
        self.step: StepAdapters | None = None

    def wrap(self, linear: Linear, stored: Sequence[tuple[str, int]]) -> Linear:
        """stored: name and rows of each stored weight, or piece of one, in the order of the output's rows."""
        parts: list[AdaptedPart] = []
        first = 0
        for name, rows in stored:
            if parts and parts[-1].name == name:
                parts[-1] = AdaptedPart(name, parts[-1].first_row, parts[-1].rows + rows)
            else:
                parts.append(AdaptedPart(name, first, rows))
            first += rows
        adapted = AdaptedLinear(linear, tuple(parts), len(self.linears), self)
        self.linears.append(adapted)
        return adapted
