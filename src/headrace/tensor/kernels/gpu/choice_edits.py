"""Triton kernels that apply penalties, grammar masks, logit bias and masked end tokens to rows of logits, in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.choice import RowTensors, SlotTensors
from headrace.tensor.kernels.gpu.choice_rows import (
    FREQUENCY,
    GENERATED,
    MASK,
    NUM_BIAS,
    NUM_ENDS,
    PRESENCE,
    REPETITION,
    SLOT,
    field,
    is_penalised,
    load_logits,
    parts_of,
    real_field,
)

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _penalised(x, seen, fields_ptr, stride, row):
    repetition = real_field(fields_ptr, stride, row, REPETITION)
    number = (seen & GENERATED).to(tl.float32)
    x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
    x = x - real_field(fields_ptr, stride, row, FREQUENCY) * number
    return tl.minimum(x - tl.where(number > 0, real_field(fields_ptr, stride, row, PRESENCE), 0.0), _LARGEST)


@triton.jit
def _edited(x, token, is_used, fields_ptr, stride, row, seen_ptr, masks_ptr, V: tl.constexpr):
    if is_penalised(fields_ptr, stride, row):
        slot = field(fields_ptr, stride, row, SLOT).to(tl.int64)
        x = _penalised(x, tl.load(seen_ptr + slot * V + token, mask=is_used, other=0), fields_ptr, stride, row)
    mask = field(fields_ptr, stride, row, MASK).to(tl.int64)
    if mask >= 0:
        word = tl.load(masks_ptr + mask * ((V + 31) // 32) + token // 32, mask=is_used, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def _edit_kernel(
    x_ptr, fields_ptr, seen_ptr, masks_ptr, out_ptr, left_ptr, x_stride, stride,
    V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """left [B, PARTS]: tokens that are not masked; -1 where a logit is NaN or infinite, so that the row is no distribution."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bad, left = tl.zeros([C], tl.int32), tl.zeros([C], tl.int32)
    for begin in range(0, SIZE, C):
        token = part * SIZE + begin + tl.arange(0, C)
        x = load_logits(x_ptr + row * x_stride, token, V)
        bad += tl.where(x < float("inf"), 0, 1)
        x = _edited(x, token, token < V, fields_ptr, stride, row, seen_ptr, masks_ptr, V)
        left += (x > float("-inf")).to(tl.int32)
        tl.store(out_ptr + row * V + token, x, mask=token < V)
    tl.store(left_ptr + row * PARTS + part, tl.where(tl.sum(bad, axis=0) > 0, -1, tl.sum(left, axis=0)))


@triton.jit
def _bias_kernel(
    x_ptr, fields_ptr, seen_ptr, masks_ptr, out_ptr, bias_ids_ptr, biases_ptr, x_stride, stride, V: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, number = field(fields_ptr, stride, row, SLOT).to(tl.int64), field(fields_ptr, stride, row, NUM_BIAS)
    i = tl.arange(0, MOST)
    used = i < number
    token = tl.load(bias_ids_ptr + slot * MOST + i, mask=used, other=0)
    x = tl.load(x_ptr + row * x_stride + token, mask=used, other=0.0).to(tl.float32)
    x += tl.load(biases_ptr + slot * MOST + i, mask=used, other=0.0)
    x = _edited(x, token, used, fields_ptr, stride, row, seen_ptr, masks_ptr, V)
    tl.store(out_ptr + row * V + token, x, mask=used)


@triton.jit
def _ends_kernel(
    fields_ptr, out_ptr, left_ptr, end_ids_ptr, stride, num_ends, V: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, number = field(fields_ptr, stride, row, SLOT).to(tl.int64), field(fields_ptr, stride, row, NUM_ENDS)
    i, part = tl.arange(0, MOST), tl.arange(0, PARTS)
    used = i < number
    token = tl.load(end_ids_ptr + slot * num_ends + i, mask=used, other=0)
    x = tl.load(out_ptr + row * V + token, mask=used, other=float("-inf"))
    left = tl.load(left_ptr + row * PARTS + part)
    others = tl.sum(left, axis=0) - tl.sum((x > float("-inf")).to(tl.int32), axis=0)
    tl.store(out_ptr + row * V + token, float("-inf"), mask=used & (others > 0))
    if tl.min(left, axis=0) < 0:
        tl.store(out_ptr + row * V, float("nan"))


def edit(logits: Tensor, fields: Tensor, slots: SlotTensors, rows: RowTensors) -> Tensor:
    """logits [B, V] float32 after their edits: the first rows of `rows.edited`. A row that was no distribution holds NaN."""
    count, vocab = logits.shape
    sizes, stride = parts_of(vocab), fields.stride(0)
    left = empty((count, sizes["PARTS"]), torch.int32, fields.device)
    edited = rows.edited[:count]
    common = (logits, fields, slots.seen, rows.masks, edited)
    _edit_kernel[(count, sizes["PARTS"])](*common, left, logits.stride(0), stride, **sizes, num_warps=4)
    num_bias, num_ends = slots.bias_ids.shape[1], slots.end_ids.shape[1]
    _bias_kernel[(count,)](*common, slots.bias_ids, slots.biases, logits.stride(0), stride, V=vocab, MOST=num_bias, num_warps=4)
    most = triton.next_power_of_2(num_ends)
    _ends_kernel[(count,)](
        fields, edited, left, slots.end_ids, stride, num_ends, V=vocab, PARTS=sizes["PARTS"], MOST=most, num_warps=1
    )  # fmt: skip
    return edited
