"""Computes a model's matrix products alone, each by the fastest implementation known for its number of rows. Headrace is asked in turns
with it.

The result is what a model's products cost here and now. Steps of few rows are recorded and replayed as the engine's own are. It is not an
engine: no attention, no norms, no cache, no sampling, no scheduler, and activations come in the type that the product needs. For 8 and 4
bits a wider copy of the weight may answer too, since an engine that stores few bits may widen them once per step, which costs many rows
little. The fastest is looked for outside the timed part (`Ceiling.prepare`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from bench.peers.shapes import Products, Shape
from headrace.tensor.backends import load_backend
from headrace.tensor.device import CPU
from headrace.tensor.host.cpu_features import CpuFeatures, read_cpu_features
from headrace.tensor.kernels.cpu.backend import EXECUTOR, FEW_TOKENS
from headrace.tensor.kernels.cpu.launch_list import RecordedLaunches, run_pending
from headrace.tensor.kernels.cpu.linear import OneDnnLinear, onednn_takes
from headrace.tensor.kernels.rounding import Precision, round_weight

STEP_ROWS = 2048
"""Rows of one pass, as the engines' largest step; more rows are no faster each."""
PROBES = 2
PROBED_COPIES = 2
"""Copies of a product's weight when it is probed with many rows: such a product is bound by arithmetic, so that caches need not be cold."""


class Multiply(Protocol):
    """What computes at once, instead of putting itself on the list, calls `run_pending`."""

    in_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """One implementation. make: weight [out, in] bfloat16 -> its product. dtype: of the rows it takes."""

    make: Callable[[Tensor], Multiply]
    dtype: torch.dtype

    def rows(self, count: int, width: int) -> Tensor:
        if self.dtype == torch.uint8:
            return torch.randint(0, 2 * OneDnnInt8.ZERO, (count, width), dtype=torch.uint8)
        return torch.randn(count, width).to(self.dtype)


class OneDnnInt8:
    """oneDNN's product of unsigned with signed bytes, a scale per output. Rows of 7 bits: with 8 it saturates where there is no VNNI."""

    ZERO = 64

    def __init__(self, weight: Tensor) -> None:
        rounded = round_weight(weight, Precision.INT8)
        self.in_features = weight.shape[1]
        self._packed = torch.ops.onednn.qlinear_prepack(rounded.values, [OneDnnLinear.ROW_HINT, self.in_features])
        self._scales = rounded.scales.float().flatten()
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)

    def __call__(self, x: Tensor) -> Tensor:
        run_pending()
        made: Tensor = torch.ops.onednn.qlinear_pointwise(
            x, 1.0, self.ZERO, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return made


def kinds_of(precision: str, features: CpuFeatures | None = None) -> dict[str, Kind]:
    """Implementations that may answer for weights of `precision`, by name; ours in the dtype that an engine computes in on this CPU."""
    features = features or read_cpu_features()
    packing = load_backend("numba", features=features).packing
    own, _ = CPU.resolve_dtype("auto", "bfloat16", features)
    kinds = {
        "headrace": Kind(lambda weight: packing.pack_linear(weight.to(own), None), own),
        "onednn-float32": Kind(lambda weight: OneDnnLinear(weight.float(), None), torch.float32),
    }
    if onednn_takes(torch.bfloat16):
        kinds["onednn-bf16"] = Kind(lambda weight: OneDnnLinear(weight, None), torch.bfloat16)
    if precision != "bf16":
        kinds["onednn-int8"] = Kind(OneDnnInt8, torch.uint8)
        width = Precision(precision)
        rows, _ = CPU.resolve_dtype("auto", "bfloat16", features, is_rounded=True)
        kinds[f"headrace-{width.value}"] = Kind(lambda weight: packing.pack_rounded(round_weight(weight, width), None), rows)
    return kinds


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows that go through the layers, and how many of them get logits."""

    rows: int
    logit_rows: int


def passes_of(prompt_lengths: Sequence[int], max_tokens: Sequence[int]) -> Iterator[Pass]:
    """What requests of these lengths need at the least: all prompts, packed into steps, then a row per request that goes on."""
    ends = list(accumulate(prompt_lengths))
    for first, last in pairwise([*range(0, ends[-1], STEP_ROWS), ends[-1]]):
        yield Pass(last - first, sum(first < end <= last for end in ends))
    for made in range(1, max(max_tokens)):
        running = sum(count > made for count in max_tokens)
        yield Pass(running, running)


class Product:
    """One of the model's products, in every layer that has it, ready in every kind."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds
        self.copies: list[dict[str, Multiply]] = []
        self.chosen: dict[int, str] = {}
        self._inputs: dict[int, Tensor] = {}

    def add(self, weight: Tensor) -> None:
        self.copies.append({name: kind.make(weight) for name, kind in self._kinds.items()})

    def prepare(self, rows: int) -> None:
        """Find the fastest kind for `rows` and keep an input for it. Nothing is done for no rows."""
        if not rows:
            return
        if rows not in self.chosen:
            self.chosen[rows] = self._fastest(rows)
        if rows not in self._inputs:
            self._inputs[rows] = self._input(self.chosen[rows], rows)

    def forget_inputs(self) -> None:
        self._inputs.clear()

    def run(self, copy: int, rows: int) -> None:
        """Multiply once, as prepared."""
        if rows:
            self.copies[copy][self.chosen[rows]](self._inputs[rows])

    def _input(self, name: str, rows: int) -> Tensor:
        return self._kinds[name].rows(rows, self.copies[0][name].in_features)

    def _fastest(self, rows: int) -> str:
        """Kinds take turns: what else the machine does meets all of them."""
        copies = self.copies if rows <= FEW_TOKENS else self.copies[:PROBED_COPIES]
        inputs = {name: self._input(name, rows) for name in self._kinds}
        seconds: dict[str, list[float]] = {name: [] for name in self._kinds}
        for _ in range(PROBES + 1):  # the first one maps memory and compiles
            for name, x in inputs.items():
                seconds[name].append(_seconds((copy[name] for copy in copies), x))
        return min(seconds, key=lambda name: min(seconds[name][1:]))


def _seconds(copies: Iterable[Multiply], x: Tensor) -> float:
    began = time.perf_counter()
    with EXECUTOR.deferred(len(x)):
        for multiply in copies:
            multiply(x)
    return time.perf_counter() - began


class Ceiling:
    """Asked like an engine: `prepare`, then call with the same requests. weights: makes a random [out, in] of bfloat16."""

    def __init__(self, products: Products, kinds: Mapping[str, Kind], weights: Callable[[Shape], Tensor] | None = None) -> None:
        make = weights or (lambda shape: torch.randn(shape).mul_(0.02).bfloat16())
        self.layer = [Product(kinds) for _ in products.layer]
        self.head = Product(kinds)
        self._recorded: dict[Pass, RecordedLaunches] = {}
        self._layers = products.layers
        for _ in range(products.layers):
            for product, shape in zip(self.layer, products.layer, strict=True):
                product.add(make(shape))
        self.head.add(make(products.head))

    @torch.inference_mode()
    def prepare(self, prompts: list[list[int]], max_tokens: list[int]) -> None:
        """Untimed: choose, warm up and where it can be done record every number of rows these requests come to."""
        for product in (*self.layer, self.head):
            product.forget_inputs()
        for each in dict.fromkeys(passes_of([len(ids) for ids in prompts], max_tokens)):
            for product in self.layer:
                product.prepare(each.rows)
            for product in (*self.layer[1:], self.head):
                product.prepare(each.logit_rows)
            if each not in self._recorded:
                self._record(each)

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]], max_tokens: list[int]) -> int:
        for each in passes_of([len(ids) for ids in prompts], max_tokens):
            if each in self._recorded:
                self._recorded[each].replay()
            else:
                self._multiply(each)
        return sum(max_tokens)

    def _record(self, each: Pass) -> None:
        recording = EXECUTOR.recording(each.rows)
        if recording is None:
            return
        with recording as recorded:
            self._multiply(each)
        if recorded.is_whole:
            self._recorded[each] = recorded

    def _multiply(self, each: Pass) -> None:
        before_attention, *others = self.layer
        with EXECUTOR.deferred(each.rows):
            for layer in range(self._layers):
                EXECUTOR.next_layer()
                before_attention.run(layer, each.rows)
                for product in others:  # of the last layer only rows with logits are looked at
                    product.run(layer, each.rows if layer + 1 < self._layers else each.logit_rows)
            self.head.run(0, each.logit_rows)
