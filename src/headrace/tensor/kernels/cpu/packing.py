"""Packs weights into strips, the order in which `linear` reads them.

Packing transposes items of four bytes: two bfloat16 that are neighbours in a row, or one float32. float32 weights are first packed as if
all were exact in bfloat16; where one is not, they are packed again as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from headrace.tensor.host import pages
from headrace.tensor.kernels.cpu.jit.launch import address_of, compile_kernel, helper, launch, thread_limit, with_counter, words
from headrace.tensor.kernels.cpu.jit.scalars import as_i32, as_i64, at, load, load_acquire, read_arguments, store, take_ticket
from headrace.tensor.kernels.cpu.jit.vector_ir import I32, I64, LANES, STRIP_COLUMNS, Emit, constant, gep, transpose
from headrace.tensor.kernels.cpu.launch_list import run_pending

Pointer = Any
_WORDS = ir.VectorType(I32, LANES)

DEPTH = 256
"""Inputs whose products are summed before they are added to the output: pieces of a panel and a strip of this depth fit the first-level
cache together. Another depth rounds differently."""
WORK_PER_THREAD = 1 << 17


def can_strip(weight: Tensor) -> bool:
    """Outputs are padded with zeros to whole strips."""
    out_features, in_features = weight.shape
    return in_features % 2 == 0 and out_features > 0 and in_features > 0


def padded(columns: int) -> int:
    return -(-columns // STRIP_COLUMNS) * STRIP_COLUMNS


def pack_strips(weight: Tensor, block: int) -> Tensor:
    """Weight [out, in] as one flat tensor: float32, or int32 words of two bfloat16 where nothing is lost by it.

    Blocks of `block` strips (the last may have fewer) follow each other. In a block, for each piece of DEPTH inputs (the last may be
    shorter) the strips' parts follow each other, so that `linear` reads memory strictly forward.
    """
    weight = weight.contiguous()
    if weight.dtype == torch.bfloat16:
        return _packed(weight, block, torch.int32)[0]
    words = narrowed(weight, block)
    return _packed(weight, block, torch.float32)[0] if words is None else words


def narrowed(weight: Tensor, block: int) -> Tensor | None:
    packed, is_exact = _packed(weight, block, torch.int32)
    return packed if is_exact else None


class StripArguments(NamedTuple):
    """items: of four bytes in a row of the result; depth: items per piece.

    is_exact: an int64 that is 1; it becomes 0 where a float32 is found that is no bfloat16.
    """

    source: int
    target: int
    rows: int
    items: int
    block: int
    depth: int
    is_exact: int
    counter: int


def _packed(weight: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    rows, inputs = weight.shape
    per_item = 2 if dtype == torch.int32 else 1
    target = pages.empty(padded(rows) * inputs // per_item, dtype)
    is_exact = words((1,))
    arguments = StripArguments(
        source=weight.data_ptr(),
        target=target.data_ptr(),
        rows=rows,
        items=inputs // per_item,
        block=block,
        depth=DEPTH // per_item,
        is_exact=address_of(is_exact),
        counter=0,
    )
    narrow, copy = _kernels()
    kernel = narrow if weight.dtype != dtype and weight.dtype == torch.float32 else copy
    launch(kernel, with_counter(arguments), max(1, min(thread_limit(), target.numel() // WORK_PER_THREAD)), target, weight)
    run_pending()
    return target, bool(is_exact[0])


@helper
def piece_start(strip: int, strips: int, block: int, items: int, first: int, length: int) -> int:
    leader = strip // block * block
    return STRIP_COLUMNS * (leader * items + min(block, strips - leader) * first + (strip - leader) * length)


def store_square(builder: ir.IRBuilder, rows: list[ir.Value], target: ir.Value, columns: int) -> None:
    for number, row in enumerate(transpose(builder, rows)):
        where = gep(builder, target, number * columns)
        builder.store(row, builder.bitcast(where, row.type.as_pointer()), align=4)


def shuffled(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, places: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(places)), list(places)))


def item_row(builder: ir.IRBuilder, source: ir.Value, stride: ir.Value, row: int, first: int) -> ir.Value:
    where = gep(builder, gep(builder, source, builder.mul(stride, I64(row))), first)
    return builder.load(builder.bitcast(where, _WORDS.as_pointer()), align=1)


@intrinsic
def copy_square(_: Any, source: Any, stride: Any, target: Any) -> tuple[Any, Emit]:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        store_square(builder, [item_row(builder, arguments[0], arguments[1], row, 0) for row in range(LANES)], arguments[2], STRIP_COLUMNS)
        return context.get_dummy_value()

    return types.void(source, types.intp, target), emit


@intrinsic
def narrow_square(_: Any, source: Any, stride: Any, target: Any) -> tuple[Any, Emit]:
    """`copy_square` for pairs of float32, stored as words of two bfloat16. Returns 0 if no value lost any of its bits."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        rows, lost = [], ir.Constant(_WORDS, None)
        for row in range(LANES):
            left, right = (item_row(builder, arguments[0], arguments[1], row, first) for first in (0, LANES))
            even, odd = (shuffled(builder, left, right, range(start, 2 * LANES, 2)) for start in (0, 1))
            lost = builder.or_(lost, builder.or_(even, odd))
            rows.append(builder.or_(builder.lshr(even, constant(_WORDS, 16)), builder.and_(odd, constant(_WORDS, 0xFFFF0000))))
        store_square(builder, rows, arguments[2], STRIP_COLUMNS)
        lanes = [builder.extract_element(lost, I32(lane)) for lane in range(LANES)]
        return builder.zext(builder.and_(reduce(builder.or_, lanes), I32(0xFFFF)), I64)

    return types.intp(source, types.intp, target), emit


@helper
def copy_piece(source: Pointer, stride: int, count: int, target: Pointer, length: int) -> None:
    """[count, length] at `stride` -> [length, STRIP_COLUMNS], zeros where there is no row."""
    for left in range(0, STRIP_COLUMNS, LANES):
        whole = length // LANES * LANES if left + LANES <= count else 0
        for item in range(0, whole, LANES):
            copy_square(at(source, left * stride + item), stride, at(target, item * STRIP_COLUMNS + left))
        for column in range(left, left + LANES):
            for item in range(whole, length):
                store(load(source, column * stride + item) if column < count else 0, target, item * STRIP_COLUMNS + column)


@helper
def narrow_piece(source: Pointer, stride: int, count: int, target: Pointer, length: int) -> int:
    lost = 0
    for left in range(0, STRIP_COLUMNS, LANES):
        whole = length // LANES * LANES if left + LANES <= count else 0
        for item in range(0, whole, LANES):
            lost |= narrow_square(at(source, left * stride + 2 * item), stride, at(target, item * STRIP_COLUMNS + left))
        for column in range(left, left + LANES):
            row = at(source, column * stride)
            for item in range(whole, length):
                low, high = (load(row, 2 * item), load(row, 2 * item + 1)) if column < count else (0, 0)
                lost |= (low | high) & 0xFFFF
                store((low >> 16) & 0xFFFF | high & -0x10000, target, item * STRIP_COLUMNS + column)
    return lost


def _copy(arguments: int, worker: int, workers: int) -> None:
    a: StripArguments = read_arguments(StripArguments, arguments)
    strips, counter = -(-a.rows // STRIP_COLUMNS), as_i64(a.counter)
    strip = take_ticket(counter)
    while strip < strips:
        row, count = strip * STRIP_COLUMNS, min(STRIP_COLUMNS, a.rows - strip * STRIP_COLUMNS)
        for first in range(0, a.items, a.depth):
            length = min(a.depth, a.items - first)
            piece = at(as_i32(a.target), piece_start(strip, strips, a.block, a.items, first, length))
            copy_piece(at(as_i32(a.source), row * a.items + first), a.items, count, piece, length)
        strip = take_ticket(counter)


def _narrow(arguments: int, worker: int, workers: int) -> None:
    """Where a value is found that is no bfloat16, the result must not be used."""
    a: StripArguments = read_arguments(StripArguments, arguments)
    strips, counter, is_exact = -(-a.rows // STRIP_COLUMNS), as_i64(a.counter), as_i64(a.is_exact)
    strip = take_ticket(counter)
    while strip < strips and load_acquire(is_exact) != 0:
        row, count, lost = strip * STRIP_COLUMNS, min(STRIP_COLUMNS, a.rows - strip * STRIP_COLUMNS), 0
        for first in range(0, a.items, a.depth):
            length = min(a.depth, a.items - first)
            piece = at(as_i32(a.target), piece_start(strip, strips, a.block, a.items, first, length))
            lost |= narrow_piece(at(as_i32(a.source), 2 * (row * a.items + first)), 2 * a.items, count, piece, length)
        if lost != 0:
            store(0, is_exact, 0)
        strip = take_ticket(counter)


@cache
def _kernels() -> tuple[int, int]:
    return compile_kernel(_narrow), compile_kernel(_copy)
