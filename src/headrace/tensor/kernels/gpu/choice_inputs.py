"""Triton kernels that run before the forward pass of a decode step: one updates block tables, one makes the model's inputs.

The inputs (token ids, positions, slot mappings, block tables) are made on the GPU from the block tables and the newest tokens that the
GPU keeps per sequence slot. A step can therefore be launched before the host has read the tokens of the step before. The kernels
implement two methods of the protocol `DeviceChoice` (`tensor.kernels.choice`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.choice import MAX_TABLE_CHANGES, DecodeRows, SlotTensors
from headrace.tensor.kernels.gpu.choice_rows import CONTEXT, ID, POSITION, ROW_SLOT, field

_BLOCK = 256


@triton.jit
def _write_tables_kernel(tables_ptr, changes_ptr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = i < tl.load(changes_ptr)
    place = tl.load(changes_ptr + 1 + i, mask=used, other=0)
    tl.store(tables_ptr + place, tl.load(changes_ptr + 1 + MOST + i, mask=used, other=0), mask=used)


def write_tables(tables: Tensor, changes: Tensor) -> None:
    """Write block ids into tables [G, N + 1, M] int32, in place. changes: see `DeviceChoice.write_tables`."""
    _write_tables_kernel[(MAX_TABLE_CHANGES // _BLOCK,)](tables, changes, MOST=MAX_TABLE_CHANGES, BLOCK=_BLOCK, num_warps=2)


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


def decode_rows(fields: Tensor, slots: SlotTensors, block_size: int) -> DecodeRows:
    """The model's inputs for B rows of one token each, as new tensors. fields: [NUM_FIELDS, B] int32, see `DeviceChoice.decode_rows`."""
    (groups, _, width), count, device = slots.tables.shape, fields.shape[1], fields.device
    ids, positions = empty((count,), torch.int64, device), empty((count,), torch.int64, device)
    mappings, tables = empty((groups, count), torch.int64, device), empty((groups, count, width), torch.int32, device)
    _decode_rows_kernel[(count,)](
        fields, slots.tables, slots.newest, ids, positions, mappings, tables, fields.stride(0), slots.tables.stride(0), width, count,
        GROUPS=groups, S=block_size, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return DecodeRows(ids, positions, mappings, tables)
