"""Sampling on the GPU: implements `DeviceChoice` with the Triton kernels of this module, `choice_edits` and `choice_filters`.

Sums over the vocabulary are made in another order than on the host, and in single precision, so a random number on the border between two
tokens may choose the other one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.core.sampling import MAX_LOGPROBS
from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.choice import MAX_TABLE_CHANGES, ChoiceKind, DecodeRows, RowTensors, SlotTensors
from headrace.tensor.kernels.gpu import choice_edits, choice_filters
from headrace.tensor.kernels.gpu.choice_rows import (
    CONTEXT,
    ID,
    LOGPROB,
    NUM_TOP,
    POSITION,
    RANK,
    ROW_SLOT,
    TOKEN,
    TOP_ID,
    TOP_LOGPROB,
    TOPS,
    field,
    load_logits,
    parts_of,
)

_BLOCK = 256


@triton.jit
def _write_tables_kernel(tables_ptr, changes_ptr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = i < tl.load(changes_ptr)
    place = tl.load(changes_ptr + 1 + i, mask=used, other=0)
    tl.store(tables_ptr + place, tl.load(changes_ptr + 1 + MOST + i, mask=used, other=0), mask=used)


@triton.jit(do_not_specialize=["count"])
def _decode_rows_kernel(
    fields_ptr, tables_ptr, newest_ptr, ids_ptr, positions_ptr, mappings_ptr, out_ptr, stride, group_stride, width, count,
    GROUPS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = field(fields_ptr, stride, row, ROW_SLOT).to(tl.int64)
    position = field(fields_ptr, stride, row, POSITION)
    token = field(fields_ptr, stride, row, ID)
    tl.store(ids_ptr + row, tl.where(token < 0, tl.load(newest_ptr + slot), token).to(tl.int64))
    tl.store(positions_ptr + row, position.to(tl.int64))
    number = (field(fields_ptr, stride, row, CONTEXT) + S - 1) // S
    for group in tl.static_range(GROUPS):
        table = tables_ptr + group * group_stride + slot * width
        block = tl.load(table + position // S).to(tl.int64)
        tl.store(mappings_ptr + group * count + row, block * S + position % S)
        target = out_ptr + (group * count + row).to(tl.int64) * width
        for begin in range(0, number, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            tl.store(target + i, tl.load(table + i, mask=i < number, other=0), mask=i < number)


@triton.jit
def _take_best(x, token, is_left):
    """(best logit, of equal ones the lowest id, what is left without it)."""
    best = tl.max(tl.where(is_left, x, float("-inf")), axis=0)
    at = tl.min(tl.where(is_left & (x == best), token, 2147483647), axis=0)
    return best, at, is_left & (token != at)


@triton.jit
def _parts_kernel(
    x_ptr, fields_ptr, chosen_ptr, tops_ptr, ids_ptr, sums_ptr, ranks_ptr, x_stride, stride, chosen_stride,
    V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Per part: its best TOPS, its peak and the sum of exponentials under it, how many are better than the chosen token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_top = field(fields_ptr, stride, row, NUM_TOP)
    chosen = tl.load(chosen_ptr + TOKEN * chosen_stride + row)
    if (num_top >= 0) & (chosen >= 0):
        token = part * SIZE + tl.arange(0, SIZE)
        x = load_logits(x_ptr + row * x_stride, token, V)
        spot = row * PARTS + part
        value = tl.load(x_ptr + row * x_stride + chosen).to(tl.float32)
        tl.store(ranks_ptr + spot, tl.sum((x > value).to(tl.int32), axis=0))
        peak = tl.max(x, axis=0)
        tl.store(sums_ptr + spot * 2, peak)
        tl.store(sums_ptr + spot * 2 + 1, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), axis=0))
        left = token < V
        for i in range(num_top):
            best, at, left = _take_best(x, token, left)
            tl.store(tops_ptr + spot * TOPS + i, best)
            tl.store(ids_ptr + spot * TOPS + i, at)


@triton.jit
def _report_kernel(
    x_ptr, fields_ptr, chosen_ptr, tops_ptr, ids_ptr, sums_ptr, ranks_ptr, x_stride, stride, chosen_stride,
    PARTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    num_top = field(fields_ptr, stride, row, NUM_TOP)
    target = chosen_ptr + row
    chosen = tl.load(target + TOKEN * chosen_stride)
    if (num_top >= 0) & (chosen >= 0):
        spot = row * PARTS + tl.arange(0, PARTS)
        peaks, sums = tl.load(sums_ptr + spot * 2), tl.load(sums_ptr + spot * 2 + 1)
        peak = tl.max(peaks, axis=0)
        log_sum = peak + tl.log(tl.sum(sums * tl.exp(tl.where(sums > 0.0, peaks - peak, 0.0)), axis=0))
        value = tl.load(x_ptr + row * x_stride + chosen).to(tl.float32) - log_sum
        tl.store(target + LOGPROB * chosen_stride, value.to(tl.int32, bitcast=True))
        tl.store(target + RANK * chosen_stride, 1 + tl.sum(tl.load(ranks_ptr + spot), axis=0))
        i = tl.arange(0, PARTS * PADDED)
        place = (row * PARTS + i // PADDED) * TOPS + i % PADDED
        left = i % PADDED < num_top
        x = tl.load(tops_ptr + place, mask=left, other=float("-inf"))
        token = tl.load(ids_ptr + place, mask=left, other=2147483647)
        left = left & (token < 2147483647)
        for n in range(num_top):
            best, at, left = _take_best(x, token, left)
            tl.store(target + (TOP_ID + n) * chosen_stride, at)
            tl.store(target + (TOP_LOGPROB + n) * chosen_stride, (best - log_sum).to(tl.int32, bitcast=True))


def _report(logits: Tensor, fields: Tensor, chosen: Tensor) -> None:
    count, sizes, device = fields.shape[1], parts_of(logits.shape[1]), fields.device
    parts = sizes["PARTS"]
    tops, ids = empty((count, parts, MAX_LOGPROBS), torch.float32, device), empty((count, parts, MAX_LOGPROBS), torch.int32, device)
    sums, ranks = empty((count, parts, 2), torch.float32, device), empty((count, parts), torch.int32, device)
    arguments = (logits, fields, chosen, tops, ids, sums, ranks, logits.stride(0), fields.stride(0), chosen.stride(0))
    _parts_kernel[(count, parts)](*arguments, V=sizes["V"], PARTS=parts, SIZE=sizes["SIZE"], num_warps=8)
    _report_kernel[(count,)](*arguments, PARTS=parts, PADDED=triton.next_power_of_2(MAX_LOGPROBS), num_warps=4)


class TritonChoice:
    def write_tables(self, tables: Tensor, changes: Tensor) -> None:
        _write_tables_kernel[(MAX_TABLE_CHANGES // _BLOCK,)](tables, changes, MOST=MAX_TABLE_CHANGES, BLOCK=_BLOCK, num_warps=2)

    def decode_rows(self, fields: Tensor, slots: SlotTensors, block_size: int) -> DecodeRows:
        (groups, _, width), count, device = slots.tables.shape, fields.shape[1], fields.device
        ids, positions = empty((count,), torch.int64, device), empty((count,), torch.int64, device)
        mappings, tables = empty((groups, count), torch.int64, device), empty((groups, count, width), torch.int32, device)
        _decode_rows_kernel[(count,)](
            fields, slots.tables, slots.newest, ids, positions, mappings, tables, fields.stride(0), slots.tables.stride(0), width, count,
            GROUPS=groups, S=block_size, BLOCK=128, num_warps=1,
        )  # fmt: skip
        return DecodeRows(ids, positions, mappings, tables)

    def choose(self, logits: Tensor, fields: Tensor, slots: SlotTensors, rows: RowTensors, kind: ChoiceKind) -> None:
        chosen = rows.chosen[:, : fields.shape[1]]
        choice_filters.choose(choice_edits.edit(logits, fields, slots, rows) if kind.edited else logits, fields, slots, chosen, kind)
        if kind.reported:
            _report(logits, fields, chosen)
