"""Linear layers for the CPU: what a weight is packed into, once, and how it is multiplied.

`StripLinear` is ours. Its weight lies in strips of COLUMNS rows, interleaved register by register, so that any number of rows of x reads
it as one stream. Every output is the same sequence of fused multiply-adds whatever the number of rows: a row's result does not depend on
its batch, to the bit. A float32 weight all of whose values are exact in bfloat16 (a converted bfloat16 checkpoint) is *stored* as
bfloat16: nothing is lost, arithmetic stays float32, and a decode step reads half the bytes.

`OneDnnLinear` hands the product to oneDNN with a weight reordered once. Its rounding depends on the row count.
Which one is taken: `cpu_features.linear_path`, a committed table. Reference: `reference.PlainLinear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.tensor.kernels.launch import compile_kernel, entry, guarded, helper, run_workers, thread_limit
from headrace.tensor.kernels.simd import as_f32, as_i32, as_i64, at, fold_block, load, store, strip_block, take_ticket
from headrace.tensor.kernels.vector_ir import COLUMNS, LANES

Pointer = Any

ROWS = 4
DEPTH = 1024
"""Elements of four rows of x walked at once; a multiple of 2 LANES."""
BLOCK_STRIPS = 16
"""Most strips in a block, the unit of work: its weights stay in the second-level cache while all rows of x pass over them."""
SLAB_ELEMENTS = 1 << 22
"""Weights packed at a time."""
WORK_PER_THREAD = 1 << 18
"""Multiply-adds worth a second thread."""


def fits_bfloat16(weight: Tensor) -> bool:
    """True where every value of `weight` [out, in] is a bfloat16: the lower half of its float32 bits is zero."""
    if weight.dtype == torch.bfloat16:
        return True
    return all(not bool((slab.contiguous().view(torch.int32) & 0xFFFF).any()) for slab in _slabs(weight, 1))


def _slabs(weight: Tensor, multiple: int) -> Iterator[Tensor]:
    """Rows of `weight` in slices of some megabytes, of a multiple of `multiple` rows, so that temporary copies stay small."""
    rows = max(1, SLAB_ELEMENTS // (weight.shape[1] * multiple)) * multiple
    for first in range(0, weight.shape[0], rows):
        yield weight[first : first + rows]


def can_strip(weight: Tensor) -> bool:
    """Shapes that strips can hold without padding."""
    out_features, in_features = weight.shape
    return out_features % COLUMNS == 0 and in_features % (2 * LANES) == 0 and out_features > 0 and in_features > 0


def pack_strips(weight: Tensor, block: int) -> Tensor:
    """Weight [out, in] as one flat tensor: float32, or int32 words of two bfloat16 where nothing is lost by it.

    Blocks of `block` strips (the last may have fewer) stand one after the other. In a block, for each piece of DEPTH inputs (the last may
    be shorter) its strips stand one after the other, so that the work of `multiply_rows` reads memory strictly forward.
    """
    is_exact = fits_bfloat16(weight)
    packed = torch.empty(weight.numel() // 2 if is_exact else weight.numel(), dtype=torch.int32 if is_exact else torch.float32)
    used = 0
    for slab in _slabs(weight, block * COLUMNS):
        strips = slab.float().reshape(-1, COLUMNS, weight.shape[1])
        whole = strips.shape[0] // block * block
        for group in (strips[:whole].reshape(-1, block, COLUMNS, weight.shape[1]), strips[whole:].unsqueeze(0)):
            if group.numel() > 0:
                pieces = torch.cat([_interleave(piece, is_exact).flatten(1) for piece in torch.split(group, DEPTH, dim=-1)], dim=1)
                packed[used : used + pieces.numel()] = pieces.flatten()
                used += pieces.numel()
    return packed


def _interleave(piece: Tensor, is_exact: bool) -> Tensor:
    """[..., COLUMNS, length] -> [..., length / LANES, COLUMNS, LANES], or the words of `strip_block` at half as many elements."""
    shape, length = piece.shape[:-1], piece.shape[-1]
    if not is_exact:
        return piece.reshape(*shape, length // LANES, LANES).transpose(-3, -2).contiguous()
    halves = piece.to(torch.bfloat16).reshape(*shape, length // (2 * LANES), 2, LANES).view(torch.int16)
    return halves.transpose(-1, -2).transpose(-4, -3).contiguous().view(torch.int32).squeeze(-1)


class Product(NamedTuple):
    """out [rows, N] = x [rows, K] times the strips; word_ratio: weights per element of the strips' pointer type."""

    x: Pointer
    strips: Pointer
    out: Pointer
    rows: int
    in_features: int
    out_features: int
    word_ratio: int


@helper
def multiply_four(p: Product, row: int, first: int, last: int, sums: Pointer) -> None:
    """Outputs of strips [first, last), a block, for rows row .. row + 3.

    The depth is walked in pieces, so that a piece of x stays in the first-level cache while the block's strips pass; the sums of all
    strips wait in `sums`.
    """
    weights = at(p.strips, first * COLUMNS * p.in_features // p.word_ratio)
    for depth in range(0, p.in_features, DEPTH):
        left, length = at(p.x, row * p.in_features + depth * ROWS), min(DEPTH, p.in_features - depth)
        for strip in range(last - first):
            strip_block(at(sums, strip * ROWS * COLUMNS * LANES), left, weights, length, ROWS)
            weights = at(weights, length * COLUMNS // p.word_ratio)
    for strip in range(last - first):
        target = at(p.out, row * p.out_features + (first + strip) * COLUMNS)
        fold_block(target, p.out_features, at(sums, strip * ROWS * COLUMNS * LANES), ROWS)


@helper
def multiply_one(p: Product, row: int, first: int, last: int, sums: Pointer) -> None:
    """The same for one row; sums in the same order, so the same bits."""
    weights = at(p.strips, first * COLUMNS * p.in_features // p.word_ratio)
    for depth in range(0, p.in_features, DEPTH):
        left, length = at(p.x, row * p.in_features + depth), min(DEPTH, p.in_features - depth)
        for strip in range(last - first):
            strip_block(at(sums, strip * COLUMNS * LANES), left, weights, length, 1)
            weights = at(weights, length * COLUMNS // p.word_ratio)
    for strip in range(last - first):
        target = at(p.out, row * p.out_features + (first + strip) * COLUMNS)
        fold_block(target, p.out_features, at(sums, strip * COLUMNS * LANES), 1)


@helper
def add_bias(p: Product, bias: Pointer, first: int, last: int) -> None:
    for row in range(p.rows):
        for column in range(first * COLUMNS, last * COLUMNS):
            store(load(p.out, row * p.out_features + column) + load(bias, column), p.out, row * p.out_features + column)


@helper
def multiply(p: Product, bias_at: int, block: int, counter: Pointer) -> None:
    """Take blocks of strips until none is left."""
    memory = np.zeros(block * ROWS * COLUMNS * LANES, np.float32)
    sums, num_strips = as_f32(memory.ctypes.data), p.out_features // COLUMNS
    first = take_ticket(counter) * block
    while first < num_strips:
        last = min(first + block, num_strips)
        fours = p.rows // ROWS * ROWS
        for row in range(0, fours, ROWS):
            multiply_four(p, row, first, last, sums)
        for row in range(fours, p.rows):
            multiply_one(p, row, first, last, sums)
        if bias_at != 0:
            add_bias(p, as_f32(bias_at), first, last)
        first = take_ticket(counter) * block
    memory[0] = 0.0  # the memory lives until here


def _multiply_f32(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    p = Product(as_f32(load(a, 0)), as_f32(load(a, 1)), as_f32(load(a, 3)), load(a, 4), load(a, 5), load(a, 6), 1)
    multiply(p, load(a, 2), load(a, 7), as_i64(load(a, 8)))


def _multiply_bf16(arguments: int, worker: int, workers: int) -> None:
    a = as_i64(arguments)
    p = Product(as_f32(load(a, 0)), as_i32(load(a, 1)), as_f32(load(a, 3)), load(a, 4), load(a, 5), load(a, 6), 2)
    multiply(p, load(a, 2), load(a, 7), as_i64(load(a, 8)))


@cache
def _kernel(is_bf16: bool) -> int:
    return compile_kernel(_multiply_bf16 if is_bf16 else _multiply_f32)


@entry
def _run(kernel: int, arguments: np.ndarray, workers: int) -> None:
    counter = np.zeros(1, np.int64)
    arguments[8] = counter.ctypes.data
    run_workers(kernel, arguments.ctypes.data, workers)
    arguments[8] = counter[0]  # both arrays live until here


def interleave_rows(x: Tensor) -> Tensor:
    """x [rows, in] as one block of memory: whole fours of rows interleaved register by register, the rest row by row."""
    rows, in_features = x.shape
    fours = rows // ROWS * ROWS
    if fours == 0:
        return x.contiguous()
    packed = x[:fours].reshape(fours // ROWS, ROWS, in_features // LANES, LANES).transpose(1, 2).reshape(fours, in_features)
    return packed if fours == rows else torch.cat([packed, x[fours:]])


class StripLinear:
    """See the module. x may be float32 or bfloat16; sums are float32 and rounded to x's dtype once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in] of float32 or bfloat16; `can_strip(weight)` holds."""
        self.out_features, self.in_features = weight.shape
        # At least four blocks per thread where there are enough, so that one slow thread does not hold up the rest.
        self.block = max(1, min(BLOCK_STRIPS, self.out_features // COLUMNS // (4 * thread_limit())))
        self.strips = pack_strips(weight, self.block)
        self.bias = None if bias is None else bias.float().contiguous()
        self.weight_bytes = self.strips.numel() * self.strips.element_size()
        self.is_bf16 = self.strips.dtype == torch.int32

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        wide = interleave_rows(x.float())
        out = torch.empty((rows, self.out_features), dtype=torch.float32)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        arguments = [
            wide.data_ptr(),
            self.strips.data_ptr(),
            bias,
            out.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
            self.block,
            0,
        ]
        workers = max(1, min(thread_limit(), rows * self.in_features * self.out_features // WORK_PER_THREAD))
        guarded(_run, _kernel(self.is_bf16), np.array(arguments, np.int64), workers)
        return out.to(x.dtype)


class OneDnnLinear:
    """oneDNN's product with a weight reordered once for this CPU. weight float32 or bfloat16, x of the same dtype."""

    ROW_HINT = 32
    """Row count the layout is chosen for; 32 was best or equal at every measured count (docs/experiments.md)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.numel() * weight.element_size()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROW_HINT)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result
