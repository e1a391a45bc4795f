"""Linear layers whose weights are small integers (`rounding`): how they are packed and multiplied.

Packed form: strips of STRIP_COLUMNS outputs, each one stream that is read forward (`integer.simd`). Products are summed exactly in
integers, so a row's result does not depend on its batch, nor on the CPU. Test oracle: `reference.RoundedLinear`.
"""

from __future__ import annotations

from collections.abc import Callable
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
    PAIR,
    ROWS,
    STRIP_COLUMNS,
    STRIPS,
    integer_block,
    largest_magnitude,
    quantize,
)
from headrace.tensor.kernels.cpu.jit.launch import allocate_result, compile_kernel, helper, launch, thread_limit, with_counter
from headrace.tensor.kernels.cpu.jit.scalars import (
    as_bf16,
    as_f16,
    as_f32,
    as_i8,
    as_i16,
    as_i32,
    as_i64,
    at,
    read_arguments,
    store,
    take_ticket,
)
from headrace.tensor.kernels.cpu.jit.vector_ir import LANES
from headrace.tensor.kernels.cpu.linear import as_dtype, as_float32
from headrace.tensor.kernels.rounding import INPUT_LIMIT, RoundedWeight

Pointer = Any

BYTE_INPUT = torch.int8 if HAS_DOTS else torch.int16
as_byte_input = as_i8 if HAS_DOTS else as_i16
MAX_INPUTS = 1 << 16
"""Widest linear: up to here sums of products stay below 2**31."""
WORK_PER_THREAD = 1 << 19


def can_pack(weight: RoundedWeight) -> bool:
    return weight.values.shape[1] % max(NIBBLE_RUN, LANES) == 0 and 0 < weight.values.shape[1] <= MAX_INPUTS


def pack_scales(scales: Tensor) -> Tensor:
    """bfloat16 or float16 [out, groups] -> [strips, groups, STRIP_COLUMNS]."""
    padded = F.pad(scales, (0, 0, 0, -scales.shape[0] % STRIP_COLUMNS))
    return padded.reshape(-1, STRIP_COLUMNS, scales.shape[1]).transpose(1, 2).contiguous()


class IntegerArguments(NamedTuple):
    """span: strips that a worker takes at a time."""

    source: int
    x: int
    row_scales: int
    sums: int
    out: int
    bias: int
    words: int
    scales: int
    zeros: int
    rows: int
    inputs: int
    columns: int
    group: int
    span: int
    counter: int


class IntegerProduct(NamedTuple):
    """out [rows, columns] = x [rows, inputs] times the weight, plus bias [columns]. x, row_scales, sums: see `quantize_row`.

    per_word: weights in a word, 4 bytes or 8 nibbles.
    """

    x: Pointer
    row_scales: Pointer
    sums: Pointer
    out: Pointer
    bias: Pointer
    words: Pointer
    scales: Pointer
    zeros: Pointer
    rows: int
    inputs: int
    columns: int
    group: int
    per_word: int


@helper
def multiply_block(p: IntegerProduct, row: int, rows: int, strip: int, strips: int) -> None:
    column, groups = strip * STRIP_COLUMNS, p.inputs // p.group
    integer_block(
        at(p.out, row * p.columns + column),
        p.columns,
        at(p.x, row * p.inputs),
        p.inputs,
        at(p.words, column * p.inputs // p.per_word),
        STRIP_COLUMNS * p.inputs // p.per_word,
        at(p.scales, column * groups),
        at(p.bias, column),
        at(p.row_scales, row),
        at(p.sums, row * groups),
        groups,
        p.group,
        at(p.zeros, column * groups),
        rows,
        strips,
    )


@helper
def multiply(p: IntegerProduct, span: int, counter: Pointer) -> None:
    """First blocks of ROWS rows, strip by strip: a strip stays in the second-level cache meanwhile. Then the rows left over, with several
    strips at once: one stream of weights does not fill the memory's bandwidth."""
    num_strips, fours, first = p.columns // STRIP_COLUMNS, p.rows // ROWS * ROWS, take_ticket(counter) * span
    while first < num_strips:
        last = min(first + span, num_strips)
        for strip in range(first, last):
            for row in range(0, fours, ROWS):
                multiply_block(p, row, ROWS, strip, 1)
        pairs = last - (last - first) % PAIR if p.rows - fours >= PAIR else first
        for strip in range(first, pairs, PAIR):
            multiply_block(p, fours, PAIR, strip, PAIR)
        for row in range(fours, p.rows):
            strip = pairs if row < fours + PAIR else first
            while strip < last:
                strips = STRIPS if last - strip >= STRIPS else 1
                multiply_block(p, row, 1, strip, strips)
                strip += strips
        first = take_ticket(counter) * span


@helper
def rounding_factor(largest: float) -> np.float32:
    return np.float32(INPUT_LIMIT) / largest if largest > 0.0 else np.float32(0.0)


@helper
def quantize_row(source: Pointer, target: Pointer, inputs: int, group: int, sums: Pointer) -> float:
    """Returns the row's scale."""
    largest = largest_magnitude(source, inputs)
    factor = rounding_factor(largest)
    for number in range(inputs // group):
        first = number * group
        store(quantize(at(target, first), at(source, first), group, factor), sums, number)
    scale: float = largest / np.float32(INPUT_LIMIT)
    return scale


@helper
def round_vector(source: Pointer, target: Pointer, dim: int) -> float:
    largest = largest_magnitude(source, dim)
    quantize(target, source, dim, rounding_factor(largest))
    scale: float = largest / np.float32(INPUT_LIMIT)
    return scale


@helper
def quantize_rows(a: IntegerArguments, target: Pointer, worker: int, workers: int) -> None:
    source, scales, sums = as_f32(a.source), as_f32(a.row_scales), as_i32(a.sums)
    for row in range(worker, a.rows, workers):
        row_sums = at(sums, row * (a.inputs // a.group))
        store(quantize_row(at(source, row * a.inputs), at(target, row * a.inputs), a.inputs, a.group, row_sums), scales, row)


def _quantize_i8(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    quantize_rows(a, as_i8(a.x), worker, workers)


def _quantize_i16(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    quantize_rows(a, as_i16(a.x), worker, workers)


@helper
def product(a: IntegerArguments, x: Pointer, scales: Pointer, zeros: Pointer, per_word: int) -> IntegerProduct:
    row_scales, sums, out, bias, words = as_f32(a.row_scales), as_i32(a.sums), as_f32(a.out), as_f32(a.bias), as_i32(a.words)
    return IntegerProduct(x, row_scales, sums, out, bias, words, scales, zeros, a.rows, a.inputs, a.columns, a.group, per_word)


def _multiply_bytes(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    multiply(product(a, as_byte_input(a.x), as_f32(a.scales), as_i8(a.zeros), 4), a.span, as_i64(a.counter))


def _multiply_nibbles(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    multiply(product(a, as_i8(a.x), as_bf16(a.scales), as_i8(a.zeros), 8), a.span, as_i64(a.counter))


def _multiply_nibbles_f16(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    multiply(product(a, as_i8(a.x), as_f16(a.scales), as_i8(a.zeros), 8), a.span, as_i64(a.counter))


def _multiply_nibbles_with_zeros(arguments: int, worker: int, workers: int) -> None:
    a: IntegerArguments = read_arguments(IntegerArguments, arguments)
    multiply(product(a, as_i8(a.x), as_f16(a.scales), as_f16(a.zeros), 8), a.span, as_i64(a.counter))


_PRODUCTS: dict[tuple[torch.dtype, bool], Callable[[int, int, int], None]] = {
    (torch.float32, False): _multiply_bytes,
    (torch.bfloat16, False): _multiply_nibbles,
    (torch.float16, False): _multiply_nibbles_f16,
    (torch.float16, True): _multiply_nibbles_with_zeros,
}


@cache
def _quantizing_kernel(dtype: torch.dtype) -> int:
    return compile_kernel(_quantize_i8 if dtype == torch.int8 else _quantize_i16)


@cache
def _product_kernel(scales: torch.dtype, has_zeros: bool) -> int:
    return compile_kernel(_PRODUCTS[scales, has_zeros])


class IntegerLinear:
    """x float32 or bfloat16; results are rounded to x's dtype once."""

    runs_only_kernels = True

    def __init__(
        self, words: Tensor, scales: Tensor, bias: Tensor | None, zeros: Tensor | None, *, out_features: int, in_features: int, group: int
    ) -> None:
        self.out_features, self.in_features, self.group = out_features, in_features, group
        self.input_dtype = torch.int8 if group else BYTE_INPUT
        self.words, self.scales, self.zeros = words, scales, zeros
        self.columns = words.shape[0] * STRIP_COLUMNS
        # At least four spans per thread, where there are as many strips, so that one slow thread does not delay the product.
        self.span = max(1, min(STRIPS, words.shape[0] // (4 * thread_limit())))
        self.bias = torch.zeros(self.columns) if bias is None else F.pad(bias.float(), (0, self.columns - len(bias))).contiguous()
        self.weight_bytes = words.nbytes + scales.nbytes + (0 if zeros is None else zeros.nbytes)

    @classmethod
    def pack(cls, weight: RoundedWeight, bias: Tensor | None) -> IntegerLinear:
        out_features, in_features = weight.values.shape
        if weight.group:
            words, scales = pack_nibbles(weight.values), pack_scales(weight.scales)
        else:
            words, scales = pack_bytes(weight.values), F.pad(weight.scales, (0, -out_features % STRIP_COLUMNS)).contiguous()
        zeros = None if weight.zeros is None else pack_scales(weight.zeros)
        return cls(words, scales, bias, zeros, out_features=out_features, in_features=in_features, group=weight.group)

    def packed(self) -> PackedLinear:
        tensors = {"words": self.words, "scales": self.scales, "bias": self.bias}
        if self.zeros is not None:
            tensors["zeros"] = self.zeros
        return PackedLinear(
            kind="integers", out_features=self.out_features, in_features=self.in_features, group=self.group, block=0, tensors=tensors
        )

    @classmethod
    def of(cls, packed: PackedLinear) -> IntegerLinear:
        """Raises ValueError where sizes or dtypes do not fit; products check nothing."""
        words, scales, bias = (packed.tensors[name] for name in ("words", "scales", "bias"))
        zeros = packed.tensors.get("zeros")
        columns = -(-packed.out_features // STRIP_COLUMNS) * STRIP_COLUMNS
        per_word = 8 if packed.group else 4
        groups = packed.in_features // packed.group if packed.group else 1
        fits = (
            (packed.kind, words.dtype, bias.dtype) == ("integers", torch.int32, torch.float32)
            and scales.dtype in ((torch.bfloat16, torch.float16) if packed.group else (torch.float32,))
            and (zeros is None or (zeros.dtype, zeros.numel(), scales.dtype) == (torch.float16, scales.numel(), torch.float16))
            and 0 < packed.in_features <= MAX_INPUTS
            and packed.in_features % max(NIBBLE_RUN, LANES) == 0
            and (len(words), words.numel()) == (columns // STRIP_COLUMNS, columns * packed.in_features // per_word)
            and (scales.numel(), bias.numel()) == (columns * groups, columns)
        )
        if not fits:
            raise ValueError("the tensors do not fit the linear they are said to be")
        return cls(words, scales, bias, zeros, out_features=packed.out_features, in_features=packed.in_features, group=packed.group)

    def __call__(self, x: Tensor) -> Tensor:
        rows, inputs = x.shape
        wide = as_float32(x)
        # One allocation for the rows' integers (int8 or int16), float32 scales and int32 sums: each tensor costs time.
        integer_bytes, group = rows * inputs * self.input_dtype.itemsize, self.group or inputs
        rounded = allocate_result((integer_bytes + 4 * rows * (1 + inputs // group),), torch.uint8)
        out = allocate_result((rows, self.columns), torch.float32)
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
            zeros=0 if self.zeros is None else self.zeros.data_ptr(),
            rows=rows,
            inputs=inputs,
            columns=self.columns,
            group=group,
            span=self.span,
            counter=0,
        )
        memory = with_counter(arguments)
        launch(_quantizing_kernel(self.input_dtype), memory, max(1, min(thread_limit(), rows // ROWS)), rounded, wide)
        workers = max(1, min(thread_limit(), rows * inputs * self.columns // WORK_PER_THREAD))
        kernel = _product_kernel(self.scales.dtype, self.zeros is not None)
        launch(kernel, memory, workers, out, rounded, self.words, self.scales, self.scales if self.zeros is None else self.zeros, self.bias)
        return as_dtype(out if self.columns == self.out_features else out[:, : self.out_features], x.dtype)
