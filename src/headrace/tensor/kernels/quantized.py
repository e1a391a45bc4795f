"""Linear layers whose weights are small integers (`rounding`): how they are packed and multiplied.

Packed form: strips of STRIP_COLUMNS outputs, each one stream read forward (`integer_simd`). Products are summed exactly in integers, so a
row's result does not depend on its batch, nor on the CPU. The plain twin is `reference.RoundedLinear`; `linear` is the same for
floating-point weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.tensor.kernels import PackedLinear
from headrace.tensor.kernels.integer_simd import (
    BYTE_OFFSET,
    NIBBLE_OFFSET,
    NIBBLE_RUN,
    STRIP,
    STRIP_COLUMNS,
    byte_block,
    largest_magnitude,
    nibble_block,
    quantize,
)
from headrace.tensor.kernels.launch import compile_kernel, helper, launch, thread_limit, with_counter
from headrace.tensor.kernels.linear import as_dtype, as_float32
from headrace.tensor.kernels.rounding import INPUT_LIMIT, RoundedWeight
from headrace.tensor.kernels.simd import as_bf16, as_f32, as_i8, as_i16, as_i32, as_i64, at, load, store, take_ticket
from headrace.tensor.kernels.vector_ir import LANES

Pointer = Any

ROWS = 4
MAX_INPUTS = 1 << 16
"""Sums of products stay below 2**31 up to here."""
WORK_PER_THREAD = 1 << 19
BYTE_ORDER = [0, 2, 1, 3]
"""Of four inputs in a word: the even bytes are then neighbours in the input, as are the odd ones."""


def can_pack(weight: RoundedWeight) -> bool:
    """Widths that the kernels take as they are."""
    return weight.values.shape[1] % max(NIBBLE_RUN, LANES) == 0 and 0 < weight.values.shape[1] <= MAX_INPUTS


def pack_bytes(values: Tensor) -> Tensor:
    """int8 [out, in] -> int32 [strips, in / 4, STRIP, LANES], the bytes of a word being value + 128 of inputs 0, 2, 1, 3."""
    strips = _strips(values, BYTE_OFFSET, 4)[..., BYTE_ORDER]  # [strips, STRIP, LANES, in / 4, 4]
    return strips.permute(0, 3, 1, 2, 4).contiguous().view(torch.int32)[..., 0]


def pack_nibbles(values: Tensor) -> Tensor:
    """int8 within -8..7 [out, in] -> int32 [strips, in / 8, STRIP, LANES]: value + 8, inputs 0..3 in the low nibbles, 4..7 in the high."""
    octets = _strips(values, NIBBLE_OFFSET, 8)  # [strips, STRIP, LANES, in / 8, 8]
    merged = octets[..., :4] | (octets[..., 4:] << 4)
    return merged.permute(0, 3, 1, 2, 4).contiguous().view(torch.int32)[..., 0]


def _strips(values: Tensor, offset: int, chunk: int) -> Tensor:
    """[out, in] -> uint8 [strips, STRIP, LANES, in / chunk, chunk]; rows of zero weights are added at the end."""
    padded = F.pad(values, (0, 0, 0, -values.shape[0] % STRIP_COLUMNS))
    return (padded.to(torch.int16) + offset).to(torch.uint8).reshape(-1, STRIP, LANES, values.shape[1] // chunk, chunk)


def pack_scales(scales: Tensor) -> Tensor:
    """bfloat16 [out, groups] -> [strips, groups, STRIP_COLUMNS]."""
    padded = F.pad(scales, (0, 0, 0, -scales.shape[0] % STRIP_COLUMNS))
    return padded.reshape(-1, STRIP_COLUMNS, scales.shape[1]).transpose(1, 2).contiguous()


class Product(NamedTuple):
    """out [rows, columns] = x [rows, inputs] times the weight, plus bias [columns]. x, row_scales, sums: see `quantize_row`."""

    x: Pointer
    row_scales: Pointer
    sums: Pointer
    out: Pointer
    bias: Pointer
    rows: int
    inputs: int
    columns: int


@helper
def multiply_bytes(p: Product, words: Pointer, scales: Pointer, counter: Pointer) -> None:
    """Take strips until none is left; every row passes over a strip while it is in the second-level cache."""
    strip = take_ticket(counter)
    while strip * STRIP_COLUMNS < p.columns:
        column = strip * STRIP_COLUMNS
        weights, own_scales, bias = at(words, column * p.inputs // 4), at(scales, column), at(p.bias, column)
        fours = p.rows // ROWS * ROWS
        for row in range(0, fours, ROWS):
            out, x = at(p.out, row * p.columns + column), at(p.x, row * p.inputs)
            byte_block(out, p.columns, x, p.inputs, weights, own_scales, bias, at(p.row_scales, row), at(p.sums, row), p.inputs, ROWS)
        for row in range(fours, p.rows):
            out, x = at(p.out, row * p.columns + column), at(p.x, row * p.inputs)
            byte_block(out, p.columns, x, p.inputs, weights, own_scales, bias, at(p.row_scales, row), at(p.sums, row), p.inputs, 1)
        strip = take_ticket(counter)


@helper
def multiply_nibbles(p: Product, words: Pointer, scales: Pointer, group: int, counter: Pointer) -> None:
    strip = take_ticket(counter)
    groups, runs = p.inputs // group, group // NIBBLE_RUN
    while strip * STRIP_COLUMNS < p.columns:
        column = strip * STRIP_COLUMNS
        weights, own_scales, bias = at(words, column * p.inputs // 8), at(scales, column * groups), at(p.bias, column)
        fours = p.rows // ROWS * ROWS
        for row in range(0, fours, ROWS):
            out, x, sums = at(p.out, row * p.columns + column), at(p.x, row * p.inputs), at(p.sums, row * groups)
            nibble_block(out, p.columns, x, p.inputs, weights, own_scales, bias, at(p.row_scales, row), sums, groups, runs, ROWS)
        for row in range(fours, p.rows):
            out, x, sums = at(p.out, row * p.columns + column), at(p.x, row * p.inputs), at(p.sums, row * groups)
            nibble_block(out, p.columns, x, p.inputs, weights, own_scales, bias, at(p.row_scales, row), sums, groups, runs, 1)
        strip = take_ticket(counter)


@helper
def rounding_factor(largest: float) -> np.float32:
    return np.float32(INPUT_LIMIT) / largest if largest > 0.0 else np.float32(0.0)


@helper
def quantize_row(source: Pointer, target: Pointer, inputs: int, group: int, sums: Pointer) -> float:
    """A row's integers, the sum of each group of them, and the scale that was used."""
    largest = largest_magnitude(source, inputs)
    factor = rounding_factor(largest)
    for number in range(inputs // group):
        first = number * group
        store(quantize(at(target, first), at(source, first), group, factor), sums, number)
    scale: float = largest / np.float32(INPUT_LIMIT)
    return scale


@helper
def round_vector(source: Pointer, target: Pointer, dim: int) -> float:
    """`quantize_row` without sums."""
    largest = largest_magnitude(source, dim)
    quantize(target, source, dim, rounding_factor(largest))
    scale: float = largest / np.float32(INPUT_LIMIT)
    return scale


def _quantize_bytes(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    source, target, scales, sums = as_f32(load(a, 0)), as_i16(load(a, 1)), as_f32(load(a, 2)), as_i32(load(a, 3))
    rows, inputs = load(a, 4), load(a, 5)
    for row in range(worker, rows, workers):
        store(quantize_row(at(source, row * inputs), at(target, row * inputs), inputs, inputs, at(sums, row)), scales, row)


def _quantize_nibbles(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    source, target, scales, sums = as_f32(load(a, 0)), as_i8(load(a, 1)), as_f32(load(a, 2)), as_i32(load(a, 3))
    rows, inputs, group = load(a, 4), load(a, 5), load(a, 6)
    for row in range(worker, rows, workers):
        own = at(sums, row * (inputs // group))
        store(quantize_row(at(source, row * inputs), at(target, row * inputs), inputs, group, own), scales, row)


def _multiply_bytes(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    x, row_scales, sums = as_i16(load(a, 1)), as_f32(load(a, 2)), as_i32(load(a, 3))
    p = Product(x, row_scales, sums, as_f32(load(a, 7)), as_f32(load(a, 8)), load(a, 4), load(a, 5), load(a, 9))
    multiply_bytes(p, as_i32(load(a, 10)), as_f32(load(a, 11)), as_i64(load(a, 12)))


def _multiply_nibbles(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    x, row_scales, sums = as_i8(load(a, 1)), as_f32(load(a, 2)), as_i32(load(a, 3))
    p = Product(x, row_scales, sums, as_f32(load(a, 7)), as_f32(load(a, 8)), load(a, 4), load(a, 5), load(a, 9))
    multiply_nibbles(p, as_i32(load(a, 10)), as_bf16(load(a, 11)), load(a, 6), as_i64(load(a, 12)))


@cache
def _kernels(is_int4: bool) -> tuple[int, int]:
    """(rows to integers, product)."""
    if is_int4:
        return compile_kernel(_quantize_nibbles), compile_kernel(_multiply_nibbles)
    return compile_kernel(_quantize_bytes), compile_kernel(_multiply_bytes)


class IntegerLinear:
    """See the module. x float32 or bfloat16; results are rounded to x's dtype once."""

    def __init__(self, words: Tensor, scales: Tensor, bias: Tensor | None, *, out_features: int, in_features: int, group: int) -> None:
        """words, scales: packed, see `pack`. group: 0 for int8."""
        self.out_features, self.in_features, self.group = out_features, in_features, group
        self.words, self.scales = words, scales
        self.columns = words.shape[0] * STRIP_COLUMNS
        self.bias = torch.zeros(self.columns) if bias is None else F.pad(bias.float(), (0, self.columns - len(bias))).contiguous()
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (words, scales))

    @classmethod
    def pack(cls, weight: RoundedWeight, bias: Tensor | None) -> IntegerLinear:
        out_features, in_features = weight.values.shape
        if weight.group:
            words, scales = pack_nibbles(weight.values), pack_scales(weight.scales)
        else:
            words, scales = pack_bytes(weight.values), F.pad(weight.scales, (0, -out_features % STRIP_COLUMNS)).contiguous()
        return cls(words, scales, bias, out_features=out_features, in_features=in_features, group=weight.group)

    def packed(self) -> PackedLinear:
        tensors = {"words": self.words, "scales": self.scales, "bias": self.bias}
        return PackedLinear(
            kind="integers", out_features=self.out_features, in_features=self.in_features, group=self.group, tensors=tensors
        )

    @classmethod
    def of(cls, packed: PackedLinear) -> IntegerLinear:
        """From what `packed` gave. Raises ValueError where sizes or dtypes do not fit: nothing is checked when it multiplies."""
        words, scales, bias = (packed.tensors[name] for name in ("words", "scales", "bias"))
        columns = -(-packed.out_features // STRIP_COLUMNS) * STRIP_COLUMNS
        per_word = 8 if packed.group else 4
        groups = packed.in_features // packed.group if packed.group else 1
        fits = (
            (packed.kind, words.dtype, bias.dtype) == ("integers", torch.int32, torch.float32)
            and scales.dtype == (torch.bfloat16 if packed.group else torch.float32)
            and words.numel() == columns * packed.in_features // per_word
            and (scales.numel(), bias.numel()) == (columns * groups, columns)
        )
        if not fits:
            raise ValueError("the tensors do not fit the linear they are said to be")
        return cls(words, scales, bias, out_features=packed.out_features, in_features=packed.in_features, group=packed.group)

    def __call__(self, x: Tensor) -> Tensor:
        rows, inputs = x.shape
        wide = as_float32(x)
        integers = torch.empty((rows, inputs), dtype=torch.int8 if self.group else torch.int16)
        row_scales = torch.empty(rows, dtype=torch.float32)
        sums = torch.empty((rows, inputs // self.group if self.group else 1), dtype=torch.int32)
        out = torch.empty((rows, self.columns), dtype=torch.float32)
        tensors = (wide, integers, row_scales, sums)
        arguments = [tensor.data_ptr() for tensor in tensors] + [rows, inputs, self.group, out.data_ptr(), self.bias.data_ptr()]
        memory = with_counter([*arguments, self.columns, self.words.data_ptr(), self.scales.data_ptr(), 0], 12)
        to_integers, product = _kernels(bool(self.group))
        launch(to_integers, memory, max(1, min(thread_limit(), rows // ROWS)), integers, wide, row_scales, sums)
        workers = max(1, min(thread_limit(), rows * inputs * self.columns // WORK_PER_THREAD))
        launch(product, memory, workers, out, integers, row_scales, sums, self.words, self.scales, self.bias)
        return as_dtype(out[:, : self.out_features], x.dtype)
