"""Linear layers with floating-point weights on the CPU: Headrace's own kernel (`StripLinear`), and oneDNN's (`OneDnnLinear`).

`StripLinear` packs its weight once, into strips of STRIP_COLUMNS outputs that are stored input by input, and reads it as one stream. Every
output is the same sequence of fused multiply-adds for any number of rows, so a row's result does not depend on its batch. oneDNN's does.

A float32 weight whose values are all exact in bfloat16 is stored as bfloat16, and arithmetic stays float32. With bfloat16 products the rows
of x are rounded to bfloat16 too, and two inputs are multiplied by one instruction; sums stay float32.
"""

from __future__ import annotations

import enum
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.tensor.kernels import PackedLinear
from headrace.tensor.kernels.cpu.jit.launch import allocate_result, compile_kernel, helper, launch, thread_limit, with_counter
from headrace.tensor.kernels.cpu.jit.scalars import as_f32, as_i32, as_i64, at, read_arguments, take_ticket
from headrace.tensor.kernels.cpu.jit.simd import ROW_STRIPS, pack_rows, panel_block
from headrace.tensor.kernels.cpu.jit.vector_ir import PANEL_ROWS, STRIP_COLUMNS
from headrace.tensor.kernels.cpu.launch_list import run_pending
from headrace.tensor.kernels.cpu.packing import DEPTH, pack_strips, padded

Pointer = Any

MOST_ROWS = PANEL_ROWS[0]
BLOCK_STRIPS = 16
"""Most strips that a worker takes at a time. A block's piece of DEPTH inputs stays in the L2 cache for all rows."""
CHUNK_ROWS = 120
"""Rows that are multiplied with one piece of a block before the next, so that their outputs stay in the L2 cache too."""
WORK_PER_THREAD = 1 << 18


class LinearArguments(NamedTuple):
    """block: strips in each of the blocks that `pack_strips` made."""

    x: int
    panels: int
    strips: int
    bias: int
    out: int
    rows: int
    inputs: int
    columns: int
    block: int
    counter: int


class FloatProduct(NamedTuple):
    """out [rows, columns] = x [rows, inputs] times the strips, plus bias [columns]. panels: x as `pack_panels` leaves it.

    x_ratio, word_ratio: inputs per element of the panels' and of the strips' pointer type.
    """

    panels: Pointer
    strips: Pointer
    out: Pointer
    bias: Pointer
    rows: int
    inputs: int
    columns: int
    x_ratio: int
    word_ratio: int


@helper
def panel_rows(left: int) -> int:
    """Rows of the next panel where `left` rows remain. Two rows cost as much as four: where a panel has at most six, eight are 4 + 4."""
    if MOST_ROWS == 6 and left == 8:
        return 4
    for rows in PANEL_ROWS:
        if rows <= left:
            return rows
    return 1


@helper
def pack_panels(x: Pointer, panels: Pointer, rows: int, inputs: int, ratio: int, worker: int, workers: int) -> None:
    """ratio: inputs per element of a panel."""
    row, number, items = 0, 0, inputs // ratio
    while row < rows:
        count = panel_rows(min(rows, (row // CHUNK_ROWS + 1) * CHUNK_ROWS) - row)
        if number % workers == worker:
            pack_rows(at(panels, row * items), at(x, row * inputs), items, inputs, count)
        row += count
        number += 1


def _pack_floats(arguments: int, worker: int, workers: int) -> None:
    a: LinearArguments = read_arguments(LinearArguments, arguments)
    pack_panels(as_f32(a.x), as_f32(a.panels), a.rows, a.inputs, 1, worker, workers)


def _pack_pairs(arguments: int, worker: int, workers: int) -> None:
    a: LinearArguments = read_arguments(LinearArguments, arguments)
    pack_panels(as_f32(a.x), as_i32(a.panels), a.rows, a.inputs, 2, worker, workers)


@helper
def multiply_panel(p: FloatProduct, weights: Pointer, row: int, count: int, column: int, strips: int, depth: int, length: int) -> None:
    out, x = at(p.out, row * p.columns + column), at(p.panels, (row * p.inputs + depth * count) // p.x_ratio)
    start, start_stride = (at(p.bias, column), 0) if depth == 0 else (out, p.columns)
    size, strip = length * STRIP_COLUMNS // p.word_ratio, 0
    while strip < strips:
        taken = ROW_STRIPS if count == 1 and strips - strip >= ROW_STRIPS else 1
        panel_block(out, p.columns, x, weights, size, length, start, start_stride, count, taken, 0)
        weights, out, start = at(weights, taken * size), at(out, taken * STRIP_COLUMNS), at(start, taken * STRIP_COLUMNS)
        strip += taken


@helper
def multiply_block(p: FloatProduct, first: int, last: int) -> None:
    strips = last - first
    for chunk in range(0, p.rows, CHUNK_ROWS):
        end = min(chunk + CHUNK_ROWS, p.rows)
        weights = at(p.strips, first * STRIP_COLUMNS * p.inputs // p.word_ratio)
        for depth in range(0, p.inputs, DEPTH):
            length, row = min(DEPTH, p.inputs - depth), chunk
            while row < end:
                count = panel_rows(end - row)
                multiply_panel(p, weights, row, count, first * STRIP_COLUMNS, strips, depth, length)
                row += count
            weights = at(weights, strips * length * STRIP_COLUMNS // p.word_ratio)


@helper
def multiply(p: FloatProduct, block: int, counter: Pointer) -> None:
    num_strips = p.columns // STRIP_COLUMNS
    first = take_ticket(counter) * block
    while first < num_strips:
        multiply_block(p, first, min(first + block, num_strips))
        first = take_ticket(counter) * block


def _multiply_f32(arguments: int, worker: int, workers: int) -> None:
    a: LinearArguments = read_arguments(LinearArguments, arguments)
    p = FloatProduct(as_f32(a.panels), as_f32(a.strips), as_f32(a.out), as_f32(a.bias), a.rows, a.inputs, a.columns, 1, 1)
    multiply(p, a.block, as_i64(a.counter))


def _multiply_bf16(arguments: int, worker: int, workers: int) -> None:
    a: LinearArguments = read_arguments(LinearArguments, arguments)
    p = FloatProduct(as_f32(a.panels), as_i32(a.strips), as_f32(a.out), as_f32(a.bias), a.rows, a.inputs, a.columns, 1, 2)
    multiply(p, a.block, as_i64(a.counter))


def _multiply_pairs(arguments: int, worker: int, workers: int) -> None:
    a: LinearArguments = read_arguments(LinearArguments, arguments)
    p = FloatProduct(as_i32(a.panels), as_i32(a.strips), as_f32(a.out), as_f32(a.bias), a.rows, a.inputs, a.columns, 2, 2)
    multiply(p, a.block, as_i64(a.counter))


class Arithmetic(enum.Enum):
    FLOAT32 = enum.auto()  # strips float32, rows float32
    WIDENED = enum.auto()  # strips bfloat16, rows float32: products of float32
    BFLOAT16 = enum.auto()  # strips bfloat16, rows rounded to bfloat16: products of bfloat16, sums float32


@cache
def _kernels(arithmetic: Arithmetic) -> tuple[int, int]:
    if arithmetic is Arithmetic.BFLOAT16:
        return compile_kernel(_pack_pairs), compile_kernel(_multiply_pairs)
    return compile_kernel(_pack_floats), compile_kernel(_multiply_f32 if arithmetic is Arithmetic.FLOAT32 else _multiply_bf16)


class StripLinear:
    """x is float32 or bfloat16. Sums are float32, rounded once to x's dtype."""

    KINDS: ClassVar = {torch.float32: "strips", torch.bfloat16: "strips, bfloat16 products"}
    runs_only_kernels = True

    def __init__(
        self, strips: Tensor, bias: Tensor, *, out_features: int, in_features: int, block: int, products: torch.dtype
    ) -> None:  # fmt: skip
        self.out_features, self.in_features, self.block, self.products = out_features, in_features, block, products
        self.columns = padded(out_features)
        self.strips, self.bias = strips, bias
        self.weight_bytes = strips.nbytes
        stored = Arithmetic.FLOAT32 if strips.dtype == torch.float32 else Arithmetic.WIDENED
        self.arithmetic = Arithmetic.BFLOAT16 if products == torch.bfloat16 else stored

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, products: torch.dtype = torch.float32) -> StripLinear:
        """weight [out, in] float32 or bfloat16, for which `can_strip` is true; it is copied. products: float32; or bfloat16, to which the
        weight and the rows of x are rounded."""
        out_features, in_features = weight.shape
        columns = padded(out_features)
        # At least four blocks per thread, where there are as many strips, so that one slow thread does not delay the product.
        block = max(1, min(BLOCK_STRIPS, columns // STRIP_COLUMNS // (4 * thread_limit())))
        padded_bias = torch.zeros(columns) if bias is None else F.pad(bias.float(), (0, columns - len(bias))).contiguous()
        strips = pack_strips(weight.to(products) if products == torch.bfloat16 else weight, block)
        return cls(strips, padded_bias, out_features=out_features, in_features=in_features, block=block, products=products)

    def packed(self) -> PackedLinear:
        return PackedLinear(
            kind=self.KINDS[self.products],
            out_features=self.out_features,
            in_features=self.in_features,
            group=0,
            block=self.block,
            tensors={"strips": self.strips, "bias": self.bias},
        )

    @classmethod
    def of(cls, packed: PackedLinear) -> StripLinear:
        """Raises ValueError when sizes or dtypes do not match, since the kernels check nothing."""
        strips, bias = packed.tensors["strips"], packed.tensors["bias"]
        products = next((dtype for dtype, kind in cls.KINDS.items() if kind == packed.kind), None)
        columns = padded(packed.out_features)
        items = columns * packed.in_features // (2 if strips.dtype == torch.int32 else 1)
        fits = (
            strips.dtype in {torch.float32: (torch.int32, torch.float32), torch.bfloat16: (torch.int32,), None: ()}[products]
            and (bias.dtype, bias.numel()) == (torch.float32, columns)
            and packed.in_features > 0
            and packed.in_features % 2 == 0
            and strips.numel() == items > 0
            and 1 <= packed.block <= BLOCK_STRIPS
        )
        if products is None or not fits:
            raise ValueError("the tensors do not fit the linear they are said to be")
        return cls(
            strips, bias, out_features=packed.out_features, in_features=packed.in_features, block=packed.block, products=products
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        rows, wide = x.shape[0], as_float32(x)
        if self.arithmetic is Arithmetic.BFLOAT16:
            panels = allocate_result((rows, self.in_features // 2), torch.int32)
        else:  # one row is a panel as it is
            panels = allocate_result(wide.shape, torch.float32) if rows > 1 else wide
        out = allocate_result((rows, self.columns), torch.float32)
        arguments = LinearArguments(
            x=wide.data_ptr(),
            panels=panels.data_ptr(),
            strips=self.strips.data_ptr(),
            bias=self.bias.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            inputs=self.in_features,
            columns=self.columns,
            block=self.block,
            counter=0,
        )
        memory = with_counter(arguments)
        to_panels, product = _kernels(self.arithmetic)
        if panels is not wide:
            launch(to_panels, memory, max(1, min(thread_limit(), rows // (2 * MOST_ROWS))), panels, wide)
        workers = max(1, min(thread_limit(), rows * self.in_features * self.out_features // WORK_PER_THREAD))
        launch(product, memory, workers, out, panels, self.strips, self.bias)
        return as_dtype(out if self.columns == self.out_features else out[:, : self.out_features], x.dtype)


def as_float32(x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    run_pending()
    return x.float().contiguous()


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == dtype:
        return x
    run_pending()
    return x.to(dtype)


def onednn_takes(dtype: torch.dtype) -> bool:
    """CPUs with no more than AVX2 cannot have bfloat16."""
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class OneDnnLinear:
    """The weight is reordered once for this CPU. x is rounded to its dtype, for which `onednn_takes` is true."""

    runs_only_kernels = True
    ROW_HINT = 32
    """Number of rows for which oneDNN chooses its layout; 32 was best or equal at every measured number (docs/experiments.md)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.numel() * weight.element_size()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROW_HINT)
        self.dtype, self.bias = weight.dtype, None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        run_pending()
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return result.to(x.dtype)
