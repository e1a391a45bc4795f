"""Adapters of low rank on the GPU (`AdapterKernels`): adds to each token's output the update of its own adapter.

An update of rank r is cut into pieces of at most 16 ranks, the fewest that the matrix units multiply. `_shrink_kernel` computes the pieces'
inner values h = down x, `_expand_kernel` adds up h to y. A program takes a tile of tokens of one adapter, so where tokens are few each
adapter is read once. Which adapters are resident, their ranks, and the places of tokens are read on the device, so one captured graph
serves all of them.

Source: gathered updates of many adapters, Chen et al. 2023 (Punica).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.batch import StepAdapters
from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels import LowRankUpdate
from headrace.tensor.kernels.gpu.experts import order_by_expert

PIECE = tl.constexpr(16)
"""Ranks of a piece."""
MAX_UPDATES = 3
"""A linear has at most this many: stacked are queries, keys and values."""
FIELDS = tl.constexpr(7)
_ALIGNMENT = 16
_BLOCK_N = 128
_MAX_SPLITS, _MAX_PIECES = 8, 4
"""Programs that share a sum, and the pieces of a linear."""
_MAX_FEW = 256
"""Tokens of a step that are taken in small tiles: those of a place are few. There are no more variants, so captures compile all of them."""


class _Piece(NamedTuple):
    """An entry of an adapter's table, int64. down [rank, in], up [rows, rank]: bytes from the table's begin. scale: bits of a float32."""

    down: int
    up: int
    rank: int
    first_row: int
    rows: int
    scale: int
    is_float32: int


class TritonAdapter:
    """Implements `PackedAdapter` and `DeviceAdapter`.

    memory: int64 [linears + 1], where each linear's pieces begin in it and where they end; then the pieces; then their weights.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.num_bytes, self.address = memory, memory.numel(), memory.data_ptr()


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def _pieces_of(update: LowRankUpdate) -> list[tuple[Tensor, Tensor]]:
    size = PIECE.value
    downs, ups = update.down.split(size), update.up.split(size, dim=1)
    return [(down.contiguous(), up.contiguous()) for down, up in zip(downs, ups, strict=True)]


def _laid_out(linears: Sequence[Sequence[LowRankUpdate]]) -> Tensor:
    """The memory of an adapter, uint8, on the host."""
    of_linears = [[(update, *piece) for update in updates for piece in _pieces_of(update)] for updates in linears]
    pieces = [piece for some in of_linears for piece in some]
    begins = len(linears) + 1 + FIELDS.value * torch.tensor([0, *map(len, of_linears)]).cumsum(0)
    end = 8 * int(begins[-1])
    table, weights = [], list[tuple[int, Tensor]]()
    for update, down, up in pieces:
        at = _aligned(end), _aligned(_aligned(end) + down.nbytes)
        weights += zip(at, (down, up), strict=True)
        end = at[1] + up.nbytes
        table.append(_Piece(*at, len(down), update.first_row, len(up), _bits(update.scale), int(down.dtype == torch.float32)))
    memory = torch.zeros(end, dtype=torch.uint8)
    header = torch.cat((begins, torch.tensor(table, dtype=torch.int64).flatten()))
    for begin, tensor in ((0, header), *weights):
        memory[begin : begin + tensor.nbytes] = tensor.flatten().view(torch.uint8)
    return memory


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@triton.jit
def _dot(w, x, acc, IS_EXACT: tl.constexpr):
    """Products of values of 8 or 11 bits are exact in the matrix units' tf32 as well, which rounds to 11 bits."""
    if w.dtype == x.dtype and not IS_EXACT:
        return tl.dot(w, x, acc)
    else:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee" if IS_EXACT else "tf32")


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    """Weights begin at multiples of 16 bytes, which the compiler cannot see."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _tile(start_ptr, index, PLACES: tl.constexpr, PLACES_P: tl.constexpr, M_P: tl.constexpr):
    """(place of a tile, its first token, the end of the place's tokens) in the order of tokens; the place is beyond PLACES where there are
    fewer tiles."""
    each = 1 + tl.arange(0, PLACES_P)
    starts = tl.load(start_ptr + each, mask=each <= PLACES, other=0)
    ends = tl.load(start_ptr + each + 1, mask=each <= PLACES, other=0)
    tiles = (ends - starts + M_P - 1) // M_P
    place = 1 + tl.sum((tl.cumsum(tiles, 0) <= index).to(tl.int32), axis=0)
    before = tl.sum(tl.where(each < place, tiles, 0), axis=0)
    begin = tl.sum(tl.where(each == place, starts, 0), axis=0) + (index - before) * M_P
    return place, begin, tl.sum(tl.where(each == place, ends, 0), axis=0)


@triton.jit
def _pieces(address_ptr, place, linear):
    """(address of the place's adapter, the linear's first piece, how many it has)."""
    adapter = tl.load(address_ptr + place)
    table = adapter.to(tl.pointer_type(tl.int64))
    begin = tl.load(table + linear)
    return adapter, table + begin, (tl.load(table + linear + 1) - begin) // FIELDS


@triton.jit
def _inner_values(
    down_ptr, rank, x_ptr, row_at, has_row, first, last, K: tl.constexpr, M_P: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[PIECE, M_P]: down [rank, K] times the rows of x, summed over input blocks first .. last."""
    r, column = tl.arange(0, PIECE)[:, None], tl.arange(0, BLOCK_K)
    acc = tl.zeros([PIECE, M_P], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * BLOCK_K + column
        down = tl.load(down_ptr + r * K + at[None, :], mask=(r < rank) & (at < K)[None, :], other=0.0)
        x = tl.load(x_ptr + row_at[None, :] + at[:, None], mask=has_row[None, :] & (at < K)[:, None], other=0.0)
        acc = _dot(down, x, acc, x.dtype == tl.float32)
    return acc


@triton.jit(do_not_specialize=["rows", "linear"])
def _shrink_kernel(
    x_ptr, h_ptr, address_ptr, order_ptr, start_ptr, rows, linear, x_st,
    K: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, PLACES_P: tl.constexpr, M_P: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h [SPLIT, rows, WIDTH]: parts of the scaled inner values of each token's pieces."""
    place, begin, end = _tile(start_ptr, tl.program_id(1), PLACES, PLACES_P, M_P)
    if place > PLACES:
        return
    m, split = begin + tl.arange(0, M_P), tl.program_id(2)
    row = tl.load(order_ptr + m, mask=m < end, other=0).to(tl.int64)
    adapter, piece, num_pieces = _pieces(address_ptr, place, linear)
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first, last = blocks * split // SPLIT, blocks * (split + 1) // SPLIT
    for number in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        at = piece + number * FIELDS
        down, rank, is_float32 = adapter + tl.load(at), tl.load(at + 2), tl.load(at + 6)
        scale = tl.load(at + 5).to(tl.int32).to(tl.float32, bitcast=True)
        column = tl.arange(0, PIECE) + number * PIECE
        if is_float32 == 1:
            acc = _inner_values(_pointer(down, tl.float32), rank, x_ptr, row * x_st, m < end, first, last, K, M_P, BLOCK_K, STAGES)
        else:
            acc = _inner_values(_pointer(down, tl.bfloat16), rank, x_ptr, row * x_st, m < end, first, last, K, M_P, BLOCK_K, STAGES)
        tl.store(h_ptr + (split * rows + row)[None, :] * WIDTH + column[:, None], acc * scale, mask=(m < end)[None, :])


@triton.jit(do_not_specialize=["rows", "linear"])
def _expand_kernel(
    y_ptr, h_ptr, address_ptr, order_ptr, start_ptr, rows, linear, y_st,
    N: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, PLACES_P: tl.constexpr, M_P: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """y [rows, N] += up h."""
    place, begin, end = _tile(start_ptr, tl.program_id(1), PLACES, PLACES_P, M_P)
    if place > PLACES:
        return
    adapter, piece, num_pieces = _pieces(address_ptr, place, linear)
    if num_pieces == 0:
        return
    m, begin_n, r = begin + tl.arange(0, M_P), tl.program_id(0) * BLOCK_N, tl.arange(0, PIECE)
    row = tl.load(order_ptr + m, mask=m < end, other=0).to(tl.int64)
    n = begin_n + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, M_P], tl.float32)
    for number in range(num_pieces):
        at = piece + number * FIELDS
        rank, first_row, num_rows = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
        if (first_row < begin_n + BLOCK_N) & (first_row + num_rows > begin_n):
            up, index = adapter + tl.load(at + 1), (n - first_row)[:, None] * rank + r[None, :]
            is_inside = ((n >= first_row) & (n < first_row + num_rows))[:, None] & (r < rank)[None, :]
            if tl.load(at + 6) == 1:
                w = tl.load(_pointer(up, tl.float32) + index, mask=is_inside, other=0.0)
            else:
                w = tl.load(_pointer(up, tl.bfloat16) + index, mask=is_inside, other=0.0).to(tl.float32)
            h = tl.zeros([PIECE, M_P], tl.float32)
            column = (r + number * PIECE)[:, None]
            for split in tl.static_range(SPLIT):
                h += tl.load(h_ptr + (split * rows + row)[None, :] * WIDTH + column, mask=(m < end)[None, :], other=0.0)
            acc = _dot(w, h, acc, y_ptr.dtype.element_ty == tl.float32)
    target = y_ptr + row[None, :] * y_st + n[:, None]
    inside = (m < end)[None, :] & (n < N)[:, None]
    y = tl.load(target, mask=inside, other=0.0)
    tl.store(target, (y.to(tl.float32) + acc).to(y.dtype), mask=inside)


class TritonAdapters:
    """Implements `AdapterKernels`. Steps come with `addresses`."""

    def __init__(self, device: str) -> None:
        self.device = device

    def pack(self, linears: Sequence[Sequence[LowRankUpdate]]) -> TritonAdapter:
        assert max(map(len, linears), default=0) <= MAX_UPDATES
        return TritonAdapter(_laid_out(linears).to(self.device))

    def apply(self, y: Tensor, x: Tensor, linear: int, step: StepAdapters) -> Tensor:
        rows, k, n = x.shape[0], x.shape[1], y.shape[1]
        if not rows:
            return y
        assert step.addresses is not None
        assert x.stride(1) == y.stride(1) == 1
        places, width = len(step.addresses) - 1, MAX_UPDATES * PIECE.value * triton.cdiv(step.max_rank, PIECE.value)
        m_p, most_splits = (16, _MAX_SPLITS) if rows <= _MAX_FEW else (64, 1)
        block_k, stages = (64, 1) if x.dtype == torch.float32 else (128, 3)
        splits = max(1, min(most_splits, k // 1024))
        tiles = min(places, rows) + rows // m_p  # at least as many as there are
        h = empty((splits, rows, width), torch.float32, x.device)
        shared = (h, step.addresses, *_order(step, rows), rows, linear)
        _shrink_kernel[(min(_MAX_PIECES, width // PIECE.value), tiles, splits)](
            x, *shared, x.stride(0), K=k, WIDTH=width, PLACES=places, PLACES_P=triton.next_power_of_2(places), M_P=m_p,
            BLOCK_K=min(block_k, max(16, triton.next_power_of_2(k))), SPLIT=splits, STAGES=stages, num_warps=4,
        )  # fmt: skip
        _expand_kernel[(triton.cdiv(n, _BLOCK_N), tiles)](
            y, *shared, y.stride(0), N=n, WIDTH=width, PLACES=places, PLACES_P=triton.next_power_of_2(places), M_P=m_p, BLOCK_N=_BLOCK_N,
            SPLIT=splits, num_warps=4,
        )  # fmt: skip
        return y


def _order(step: StepAdapters, rows: int) -> tuple[Tensor, Tensor]:
    if rows not in step.orders:
        assert step.addresses is not None
        step.orders[rows] = order_by_expert(step.slots_of(rows), len(step.addresses))
    return step.orders[rows]
