"""Linear layers whose weights are small integers (`rounding`): how they are packed and multiplied.

Packed form: strips of STRIP_COLUMNS outputs, each one stream read forward (`simd`). Products are summed exactly in integers, so a
row's result does not depend on its batch, nor on the CPU. The plain twin is `plain_packing.RoundedLinear`; `linear` is the same for
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
from headrace.tensor.kernels.cpu.integer.packing import pack_bytes, pack_nibbles
from headrace.tensor.kernels.cpu.integer.simd import (
    HAS_DOTS,
    NIBBLE_RUN,
    STRIP_COLUMNS,
    byte_block,
    largest_magnitude,
    nibble_block,
    quantize,
)
from headrace.tensor.kernels.cpu.jit.launch import compile_kernel, fresh, helper, launch, thread_limit, with_counter
from headrace.tensor.kernels.cpu.jit.simd import as_bf16, as_f32, as_i8, as_i16, as_i32, as_i64, at, read_arguments, store, take_ticket
from headrace.tensor.kernels.cpu.jit.vector_ir import LANES
from headrace.tensor.kernels.cpu.linear import as_dtype, as_float32
from headrace.tensor.kernels.rounding import INPUT_LIMIT, RoundedWeight

Pointer = Any

as_input = as_i8 if HAS_DOTS else as_i16
"""Inputs of `byte_block`."""
ROWS, STRIPS = 4, 4
PAIR = 2
"""A block is ROWS rows by one strip, PAIR rows by PAIR strips or one row by STRIPS strips: the sums of each fill the same registers."""
MAX_INPUTS = 1 << 16
"""Sums of products stay below 2**31 up to here."""
WORK_PER_THREAD = 1 << 19


def can_pack(weight: RoundedWeight) -> bool:
    """Widths that the kernels take as they are."""
    return weight.values.shape[1] % max(NIBBLE_RUN, LANES) == 0 and 0 < weight.values.shape[1] <= MAX_INPUTS


def pack_scales(scales: Tensor) -> Tensor:
    """bfloat16 [out, groups] -> [strips, groups, STRIP_COLUMNS]."""
    padded = F.pad(scales, (0, 0, 0, -scales.shape[0] % STRIP_COLUMNS))
    return padded.reshape(-1, STRIP_COLUMNS, scales.shape[1]).transpose(1, 2).contiguous()


class IntegerArguments(NamedTuple):
    """Arguments of a linear's two kernels, rows to integers and product. The first nine and counter are addresses.

    group  inputs that share a scale; 0 for int8
    span   strips that a worker takes at a time
    """

    source: int
    x: int
    row_scales: int
    sums: int
    out: int
    bias: int
    words: int
    scales: int
    rows: int
    inputs: int
    columns: int
    group: int
    span: int
    counter: int


class IntegerProduct(NamedTuple):
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
def bytes_of_rows(p: IntegerProduct, words: Pointer, scales: Pointer, column: int, row: int, count: int, strips: int) -> None:
    """`count` rows from `row` against `strips` strips from `column`; both have to be what a block is compiled for."""
    out, x, size = at(p.out, row * p.columns + column), at(p.x, row * p.inputs), STRIP_COLUMNS * p.inputs // 4
    weights, own, bias = at(words, column * p.inputs // 4), at(scales, column), at(p.bias, column)
    row_scales, sums = at(p.row_scales, row), at(p.sums, row)
    if count == ROWS:
        byte_block(out, p.columns, x, p.inputs, weights, size, own, bias, row_scales, sums, p.inputs, ROWS, 1)
    elif count == PAIR:
        byte_block(out, p.columns, x, p.inputs, weights, size, own, bias, row_scales, sums, p.inputs, PAIR, PAIR)
    elif strips == STRIPS:
        byte_block(out, p.columns, x, p.inputs, weights, size, own, bias, row_scales, sums, p.inputs, 1, STRIPS)
    else:
        byte_block(out, p.columns, x, p.inputs, weights, size, own, bias, row_scales, sums, p.inputs, 1, 1)


@helper
def nibbles_of_rows(p: IntegerProduct, words: Pointer, scales: Pointer, group: int, column: int, row: int, count: int, strips: int) -> None:
    groups, runs = p.inputs // group, group // NIBBLE_RUN
    out, x, size = at(p.out, row * p.columns + column), at(p.x, row * p.inputs), STRIP_COLUMNS * p.inputs // 8
    weights, own, bias = at(words, column * p.inputs // 8), at(scales, column * groups), at(p.bias, column)
    row_scales, sums = at(p.row_scales, row), at(p.sums, row * groups)
    if count == ROWS:
        nibble_block(out, p.columns, x, p.inputs, weights, size, own, bias, row_scales, sums, groups, runs, ROWS, 1)
    elif count == PAIR:
        nibble_block(out, p.columns, x, p.inputs, weights, size, own, bias, row_scales, sums, groups, runs, PAIR, PAIR)
    elif strips == STRIPS:
        nibble_block(out, p.columns, x, p.inputs, weights, size, own, bias, row_scales, sums, groups, runs, 1, STRIPS)
    else:
        nibble_block(out, p.columns, x, p.inputs, weights, size, own, bias, row_scales, sums, groups, runs, 1, 1)


@helper
def multiply_bytes(p: IntegerProduct, words: Pointer, scales: Pointer, span: int, counter: Pointer) -> None:
    """Take spans of strips until none is left: blocks of ROWS rows strip by strip, which stays in the second-level cache meanwhile; then
    the rows left over, a pair and one, several strips at once, as one stream of weights does not fill the memory's pipes."""
    num_strips, fours, first = p.columns // STRIP_COLUMNS, p.rows // ROWS * ROWS, take_ticket(counter) * span
    while first < num_strips:
        last = min(first + span, num_strips)
        for strip in range(first, last):
            for row in range(0, fours, ROWS):
                bytes_of_rows(p, words, scales, strip * STRIP_COLUMNS, row, ROWS, 1)
        pairs = last - (last - first) % PAIR if p.rows - fours >= PAIR else first
        for strip in range(first, pairs, PAIR):
            bytes_of_rows(p, words, scales, strip * STRIP_COLUMNS, fours, PAIR, PAIR)
        for row in range(fours, p.rows):
            strip = pairs if row < fours + PAIR else first
            while strip < last:
                strips = STRIPS if last - strip >= STRIPS else 1
                bytes_of_rows(p, words, scales, strip * STRIP_COLUMNS, row, 1, strips)
                strip += strips
        first = take_ticket(counter) * span


@helper
def multiply_nibbles(p: IntegerProduct, words: Pointer, scales: Pointer, group: int, span: int, counter: Pointer) -> None:
    """`multiply_bytes` for nibbles."""
    num_strips, fours, first = p.columns // STRIP_COLUMNS, p.rows // ROWS * ROWS, take_ticket(counter) * span
    while first < num_strips:
        last = min(first + span, num_strips)
        for strip in range(first, last):
            for row in range(0, fours, ROWS):
                nibbles_of_rows(p, words, scales, group, strip * STRIP_COLUMNS, row, ROWS, 1)
        pairs = last - (last - first) % PAIR if p.rows - fours >= PAIR else first
        for strip in range(first, pairs, PAIR):
            nibbles_of_rows(p, words, scales, group, strip * STRIP_COLUMNS, fours, PAIR, PAIR)
        for row in range(fours, p.rows):
            strip = pairs if row < fours + PAIR else first
            while strip < last:
                strips = STRIPS if last - strip >= STRIPS else 1
                nibbles_of_rows(p, words, scales, group, strip * STRIP_COLUMNS, row, 1, strips)
                strip += strips
        first = take_ticket(counter) * span


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
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    source, target, scales, sums = as_f32(a.source), as_input(a.x), as_f32(a.row_scales), as_i32(a.sums)
    for row in range(worker, a.rows, workers):
        store(quantize_row(at(source, row * a.inputs), at(target, row * a.inputs), a.inputs, a.inputs, at(sums, row)), scales, row)


def _quantize_nibbles(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    source, target, scales, sums = as_f32(a.source), as_i8(a.x), as_f32(a.row_scales), as_i32(a.sums)
    for row in range(worker, a.rows, workers):
        row_sums = at(sums, row * (a.inputs // a.group))
        store(quantize_row(at(source, row * a.inputs), at(target, row * a.inputs), a.inputs, a.group, row_sums), scales, row)


def _multiply_bytes(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    x, row_scales, sums = as_input(a.x), as_f32(a.row_scales), as_i32(a.sums)
    p = IntegerProduct(x, row_scales, sums, as_f32(a.out), as_f32(a.bias), a.rows, a.inputs, a.columns)
    multiply_bytes(p, as_i32(a.words), as_f32(a.scales), a.span, as_i64(a.counter))


def _multiply_nibbles(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    x, row_scales, sums = as_i8(a.x), as_f32(a.row_scales), as_i32(a.sums)
    p = IntegerProduct(x, row_scales, sums, as_f32(a.out), as_f32(a.bias), a.rows, a.inputs, a.columns)
    multiply_nibbles(p, as_i32(a.words), as_bf16(a.scales), a.group, a.span, as_i64(a.counter))


@cache
def _kernels(is_int4: bool) -> tuple[int, int]:
    """(rows to integers, product)."""
    if is_int4:
        return compile_kernel(_quantize_nibbles), compile_kernel(_multiply_nibbles)
    return compile_kernel(_quantize_bytes), compile_kernel(_multiply_bytes)


class IntegerLinear:
    """See the module. x float32 or bfloat16; results are rounded to x's dtype once."""

    runs_only_kernels = True

    def __init__(self, words: Tensor, scales: Tensor, bias: Tensor | None, *, out_features: int, in_features: int, group: int) -> None:
        """words, scales: packed, see `pack`. group: 0 for int8."""
        self.out_features, self.in_features, self.group = out_features, in_features, group
        self.words, self.scales = words, scales
        self.columns = words.shape[0] * STRIP_COLUMNS
        # At least four spans per thread where there are enough, so that one slow thread does not hold up the rest.
        self.span = max(1, min(STRIPS, words.shape[0] // (4 * thread_limit())))
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
            kind="integers", out_features=self.out_features, in_features=self.in_features, group=self.group, block=0, tensors=tensors
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
            and 0 < packed.in_features <= MAX_INPUTS
            and packed.in_features % max(NIBBLE_RUN, LANES) == 0
            and (len(words), words.numel()) == (columns // STRIP_COLUMNS, columns * packed.in_features // per_word)
            and (scales.numel(), bias.numel()) == (columns * groups, columns)
        )
        if not fits:
            raise ValueError("the tensors do not fit the linear they are said to be")
        return cls(words, scales, bias, out_features=packed.out_features, in_features=packed.in_features, group=packed.group)

    def __call__(self, x: Tensor) -> Tensor:
        rows, inputs = x.shape
        wide = as_float32(x)
        # One piece of memory for the integers (int8 or int16), float32 scales and int32 sums of the rows: making a tensor takes its time.
        integer_bytes = rows * inputs * (1 if self.group or HAS_DOTS else 2)
        groups = inputs // self.group if self.group else 1
        rounded = fresh((integer_bytes + 4 * rows * (1 + groups),), torch.uint8)
        out = fresh((rows, self.columns), torch.float32)
        place = rounded.data_ptr()
        arguments = IntegerArguments(
            source=wide.data_ptr(),
            x=place,
            row_scales=place + integer_bytes,
            sums=place + integer_bytes + 4 * rows,
            out=out.data_ptr(),
            bias=self.bias.data_ptr(),
            words=self.words.data_ptr(),
            scales=self.scales.data_ptr(),
            rows=rows,
            inputs=inputs,
            columns=self.columns,
            group=self.group,
            span=self.span,
            counter=0,
        )
        memory = with_counter(arguments)
        to_integers, product = _kernels(bool(self.group))
        launch(to_integers, memory, max(1, min(thread_limit(), rows // ROWS)), rounded, wide)
        workers = max(1, min(thread_limit(), rows * inputs * self.columns // WORK_PER_THREAD))
        launch(product, memory, workers, out, rounded, self.words, self.scales, self.bias)
        return as_dtype(out if self.columns == self.out_features else out[:, : self.out_features], x.dtype)
