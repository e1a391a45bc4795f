"""Triton kernels that choose one token per row of logits: the best token, or a random one among those that top_k, top_p and min_p keep.

The logits are not sorted. A radix search finds the smallest kept logit, three bits per pass, among integers with the same order as the
floats (`choice_rows.order`). For each part of a row, and for each of seven levels, a pass sums the number of tokens (top_k) or the
probability mass (top_p) at or above the level. The next pass adds the sums of the parts, and so knows the three bits.

The rules are those of `kernels.filters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.tensor.host.fresh_memory import empty
from headrace.tensor.kernels.choice import ChoiceKind, SlotTensors
from headrace.tensor.kernels.gpu.choice_rows import (
    MIN_P,
    SLOT,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    UNIFORM,
    field,
    is_penalised,
    load_logits,
    order,
    parts_of,
    real_field,
    value_of,
)

_SUMS = tl.constexpr(8)
_ABOVE, _NUM_ABOVE, _NUM_TIED, _KEPT = (tl.constexpr(i) for i in range(4))
"""Sums of `_level_kernel`: mass and number above the level, number at it, mass above it that min_p keeps."""
_ALL = tl.constexpr(2147483520.0)


@triton.jit
def _peak_kernel(
    x_ptr, peaks_ptr, places_ptr, x_stride, V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Per part: its largest logit, and the lowest id that has it; infinity where a logit is NaN."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([C], float("-inf"), tl.float32)
    at = tl.full([C], V, tl.int32)
    bad = tl.zeros([C], tl.int32)
    for begin in range(0, SIZE, C):
        token = part * SIZE + begin + tl.arange(0, C)
        x = load_logits(x_ptr + row * x_stride, token, V)
        bad += (x != x).to(tl.int32)
        at = tl.where(x > best, token, at)
        best = tl.where(x > best, x, best)
    peak = tl.max(best, axis=0)
    tl.store(places_ptr + row * PARTS + part, tl.min(tl.where(best == peak, at, V), axis=0))
    tl.store(peaks_ptr + row * PARTS + part, tl.where(tl.sum(bad, axis=0) > 0, float("inf"), peak))


@triton.jit
def _row_peak(peaks_ptr, row, PARTS: tl.constexpr):
    return tl.max(tl.load(peaks_ptr + row * PARTS + tl.arange(0, PARTS)), axis=0)


@triton.jit
def _part_sum(sums_ptr, row, NAME: tl.constexpr, PARTS: tl.constexpr):
    return tl.load(sums_ptr + (row * PARTS + tl.arange(0, PARTS)) * _SUMS + NAME)


@triton.jit
def _lowest(BITS: tl.constexpr):
    return tl.full([], -(1 << (BITS - 1)), tl.int64)


@triton.jit
def _next_level(levels_ptr, sums_ptr, row, wanted, shift, PARTS: tl.constexpr, BITS: tl.constexpr):
    level = tl.load(levels_ptr + row).to(tl.int64)
    j = tl.arange(0, _SUMS)
    part = tl.arange(0, PARTS)
    sums = tl.sum(tl.load(sums_ptr + (row * PARTS + part[:, None]) * _SUMS + j[None, :]), axis=0)
    is_level = (j < _SUMS - 1) & (level + ((j + 1).to(tl.int64) << shift) < (1 << (BITS - 1)))
    return level + (tl.sum((is_level & (sums >= wanted)).to(tl.int64), axis=0) << shift)


@triton.jit
def _mass_wanted(fields_ptr, stride, row, peaks_ptr, level_ptr, sums_ptr, V: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr):
    """top_p of the mass that top_k keeps. level, sums: of the k-th best logit."""
    temperature = real_field(fields_ptr, stride, row, TEMPERATURE)
    level = tl.load(level_ptr + row)
    tied = tl.sum(_part_sum(sums_ptr, row, _NUM_TIED, PARTS), axis=0)
    kept = tl.minimum(
        tied, field(fields_ptr, stride, row, TOP_K).to(tl.float32) - tl.sum(_part_sum(sums_ptr, row, _NUM_ABOVE, PARTS), axis=0)
    )
    each = tl.exp((value_of(level, BITS) - _row_peak(peaks_ptr, row, PARTS)) / temperature)
    mass = tl.sum(_part_sum(sums_ptr, row, _ABOVE, PARTS), axis=0) + tl.where(kept > 0.0, kept * each, 0.0)
    return real_field(fields_ptr, stride, row, TOP_P) * mass


@triton.jit(do_not_specialize=["shift", "num_rows"], do_not_specialize_on_alignment=["levels_ptr"])
def _digit_kernel(
    x_ptr, fields_ptr, peaks_ptr, levels_ptr, sums_ptr, k_level_ptr, k_sums_ptr, shift, x_stride, stride, num_rows,
    V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr,
    IS_FIRST: tl.constexpr, OF_MASS: tl.constexpr,
):  # fmt: skip
    """The level of top_k (by number) or of top_p (by mass). levels, sums: of all passes, this one's second."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = real_field(fields_ptr, stride, row, TEMPERATURE)
    if OF_MASS:
        is_asked = (temperature > 0.0) & (real_field(fields_ptr, stride, row, TOP_P) < 1.0)
    else:
        is_asked = (temperature > 0.0) & (field(fields_ptr, stride, row, TOP_K) < V)
    if is_asked:
        if IS_FIRST:
            level = _lowest(BITS)
        else:
            if OF_MASS:
                wanted = _mass_wanted(fields_ptr, stride, row, peaks_ptr, k_level_ptr, k_sums_ptr, V, PARTS, BITS)
            else:
                wanted = field(fields_ptr, stride, row, TOP_K).to(tl.float32)
            level = _next_level(levels_ptr, sums_ptr, row, wanted, shift + STEP, PARTS, BITS)
            levels_ptr += num_rows
            sums_ptr += num_rows * PARTS * _SUMS
        if part == 0:
            tl.store(levels_ptr + row, level.to(tl.int32))
        peak = _row_peak(peaks_ptr, row, PARTS)
        j = tl.arange(0, _SUMS)
        levels = tl.minimum(level + ((j + 1).to(tl.int64) << shift), (1 << (BITS - 1)) - 1).to(tl.int32)
        sums = tl.zeros([C, _SUMS], tl.float32)
        for begin in range(0, SIZE, C):
            token = part * SIZE + begin + tl.arange(0, C)
            x = load_logits(x_ptr + row * x_stride, token, V)
            weight = tl.where(token < V, 1.0, 0.0)
            if OF_MASS:
                weight = tl.where(token < V, tl.exp((x - peak) / temperature), 0.0)
            sums += tl.where(order(x, BITS)[:, None] >= levels[None, :], weight[:, None], 0.0)
        tl.store(sums_ptr + (row * PARTS + part) * _SUMS + j, tl.sum(sums, axis=0))


@triton.jit(do_not_specialize_on_alignment=["levels_ptr"])
def _level_kernel(
    x_ptr, fields_ptr, peaks_ptr, levels_ptr, digit_sums_ptr, k_level_ptr, k_sums_ptr, out_level_ptr, out_sums_ptr, x_stride, stride,
    V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """Sums at the level that the last pass has found. OF: what was looked for, 0 nothing, 1 top_k, 2 top_p after it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = real_field(fields_ptr, stride, row, TEMPERATURE)
    if temperature > 0.0:
        level = _lowest(BITS)
        if OF == 1:
            top_k = field(fields_ptr, stride, row, TOP_K)
            if top_k < V:
                level = _next_level(levels_ptr, digit_sums_ptr, row, top_k.to(tl.float32), 0, PARTS, BITS)
        if OF == 2:
            level = tl.load(k_level_ptr + row).to(tl.int64)
            if real_field(fields_ptr, stride, row, TOP_P) < 1.0:
                wanted = _mass_wanted(fields_ptr, stride, row, peaks_ptr, k_level_ptr, k_sums_ptr, V, PARTS, BITS)
                level = _next_level(levels_ptr, digit_sums_ptr, row, wanted, 0, PARTS, BITS)
        if part == 0:
            tl.store(out_level_ptr + row, level.to(tl.int32))
        min_p, peak = real_field(fields_ptr, stride, row, MIN_P), _row_peak(peaks_ptr, row, PARTS)
        above, kept = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        num_above, num_tied = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for begin in range(0, SIZE, C):
            token = part * SIZE + begin + tl.arange(0, C)
            x = load_logits(x_ptr + row * x_stride, token, V)
            key = order(x, BITS)
            weight = tl.exp((x - peak) / temperature)
            is_above = (token < V) & (key > level)
            above += tl.where(is_above, weight, 0.0)
            kept += tl.where(is_above & (weight >= min_p), weight, 0.0)
            num_above += is_above.to(tl.float32)
            num_tied += ((token < V) & (key == level)).to(tl.float32)
        target = out_sums_ptr + (row * PARTS + part) * _SUMS
        tl.store(target + _ABOVE, tl.sum(above, axis=0))
        tl.store(target + _NUM_ABOVE, tl.sum(num_above, axis=0))
        tl.store(target + _NUM_TIED, tl.sum(num_tied, axis=0))
        tl.store(target + _KEPT, tl.sum(kept, axis=0))


@triton.jit
def _num_ties(
    fields_ptr, stride, row, peaks_ptr, k_level_ptr, k_sums_ptr, level, each, sums_ptr, V: tl.constexpr, PARTS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """How many tokens at the level are kept. each: their weight."""
    ties = tl.full([], _ALL, tl.float32)
    top_k = field(fields_ptr, stride, row, TOP_K)
    if top_k < V:
        ties = top_k.to(tl.float32) - tl.sum(_part_sum(k_sums_ptr, row, _NUM_ABOVE, PARTS), axis=0)
    if real_field(fields_ptr, stride, row, TOP_P) < 1.0:
        wanted = _mass_wanted(fields_ptr, stride, row, peaks_ptr, k_level_ptr, k_sums_ptr, V, PARTS, BITS)
        needed = tl.ceil((wanted - tl.sum(_part_sum(sums_ptr, row, _ABOVE, PARTS), axis=0)) / tl.maximum(each, 1e-30))
        needed = tl.minimum(tl.maximum(needed, 1.0), _ALL)
        ties = tl.where(level == tl.load(k_level_ptr + row), tl.minimum(ties, needed), needed)
    return ties


@triton.jit
def _pick(
    row_ptr, fields_ptr, stride, row, peak, peaks_ptr, k_level_ptr, k_sums_ptr, level_ptr, sums_ptr,
    V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, IS_FILTERED: tl.constexpr,
):  # fmt: skip
    temperature, min_p = real_field(fields_ptr, stride, row, TEMPERATURE), real_field(fields_ptr, stride, row, MIN_P)
    level, p = tl.load(level_ptr + row), tl.arange(0, PARTS)
    each = tl.exp((value_of(level, BITS) - peak) / temperature)
    ties = tl.full([], _ALL, tl.float32)
    if IS_FILTERED:
        ties = _num_ties(fields_ptr, stride, row, peaks_ptr, k_level_ptr, k_sums_ptr, level, each, sums_ptr, V, PARTS, BITS)
    tied = _part_sum(sums_ptr, row, _NUM_TIED, PARTS)
    stay = tl.minimum(tl.maximum(ties - (tl.cumsum(tied, axis=0) - tied), 0.0), tied)
    mass = _part_sum(sums_ptr, row, _KEPT, PARTS) + tl.where(tl.where(stay > 0.0, each, -1.0) >= min_p, stay * each, 0.0)
    running = tl.cumsum(mass, axis=0)
    target = real_field(fields_ptr, stride, row, UNIFORM) * tl.sum(mass, axis=0)
    part = tl.min(tl.where((running > target) & (mass > 0.0), p, PARTS), axis=0)
    part = tl.where(part < PARTS, part, tl.max(tl.where(mass > 0.0, p, 0), axis=0))
    token = part * SIZE + tl.arange(0, SIZE)
    x = load_logits(row_ptr, token, V)
    key, weight = order(x, BITS), tl.exp((x - peak) / temperature)
    at_level = (token < V) & (key == level)
    rank = tl.cumsum(at_level.to(tl.int32), axis=0).to(tl.float32)
    is_first = at_level & (rank <= tl.sum(tl.where(p == part, stay, 0.0), axis=0))
    kept = (token < V) & ((key > level) | is_first) & (weight >= min_p) & (weight > 0.0)
    sums = tl.sum(tl.where(p == part, running - mass, 0.0), axis=0) + tl.cumsum(tl.where(kept, weight, 0.0), axis=0)
    found = tl.min(tl.where(kept & (sums > target), token, V), axis=0)
    return tl.where(found < V, found, tl.maximum(tl.max(tl.where(kept, token, -1), axis=0), 0))


@triton.jit
def _pick_kernel(
    x_ptr, fields_ptr, peaks_ptr, places_ptr, k_level_ptr, k_sums_ptr, level_ptr, sums_ptr, chosen_ptr, newest_ptr, seen_ptr,
    x_stride, stride, chosen_stride, V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr,
    IS_SAMPLED: tl.constexpr, IS_FILTERED: tl.constexpr, IS_EDITED: tl.constexpr,
):  # fmt: skip
    """The row's token becomes the slot's newest and is counted there; -1 where the logits are no distribution."""
    row, p = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    peaks = tl.load(peaks_ptr + row * PARTS + p)
    peak = tl.max(peaks, axis=0)
    is_fine = (peak > float("-inf")) & (peak < float("inf"))
    token = tl.where(is_fine, tl.min(tl.where(peaks == peak, tl.load(places_ptr + row * PARTS + p), V), axis=0), -1)
    if IS_SAMPLED:
        if is_fine & (real_field(fields_ptr, stride, row, TEMPERATURE) > 0.0):
            token = _pick(
                x_ptr + row * x_stride, fields_ptr, stride, row, peak, peaks_ptr, k_level_ptr, k_sums_ptr, level_ptr, sums_ptr,
                V, PARTS, SIZE, BITS, IS_FILTERED,
            )  # fmt: skip
    slot = field(fields_ptr, stride, row, SLOT).to(tl.int64)
    tl.store(chosen_ptr + TOKEN * chosen_stride + row, token)
    tl.store(newest_ptr + slot, tl.maximum(token, 0))
    if IS_EDITED:
        if (token >= 0) & is_penalised(fields_ptr, stride, row):
            place = seen_ptr + slot * V + token
            tl.store(place, tl.load(place) + 1)


_STEP = 3
"""Bits of a digit: seven levels and what is below them."""


@dataclass(frozen=True, slots=True)
class _Level:
    key: Tensor
    sums: Tensor


class _Rows:
    def __init__(self, logits: Tensor, fields: Tensor) -> None:
        self.logits, self.fields, self.device = logits, fields, fields.device
        self.count, self.sizes = fields.shape[1], parts_of(logits.shape[1])
        self.parts = self.sizes["PARTS"]
        self.bits = 16 if logits.dtype == torch.bfloat16 else 32
        self.strides = (logits.stride(0), fields.stride(0))
        self.peaks = empty((self.count, self.parts), torch.float32, self.device)
        self.places = empty((self.count, self.parts), torch.int32, self.device)
        _peak_kernel[self._grid](logits, self.peaks, self.places, logits.stride(0), **self.sizes, num_warps=4)

    @property
    def _grid(self) -> tuple[int, int]:
        return self.count, self.parts

    def at_level(self, of: int, digits: _Level | None = None, best: _Level | None = None) -> _Level:
        found = _Level(
            empty((self.count,), torch.int32, self.device), empty((self.count, self.parts, _SUMS.value), torch.float32, self.device)
        )
        digits, best = digits or found, best or found
        _level_kernel[self._grid](
            self.logits, self.fields, self.peaks, digits.key, digits.sums, best.key, best.sums, found.key, found.sums, *self.strides,
            **self.sizes, BITS=self.bits, OF=of, num_warps=4,
        )  # fmt: skip
        return found

    def find_digits(self, best: _Level | None = None) -> _Level:
        """Finds top_k's level, or given that one, top_p's."""
        shifts = list(range(0, self.bits, _STEP))[::-1]
        keys = empty((len(shifts), self.count), torch.int32, self.device)
        sums = empty((len(shifts), self.count, self.parts, _SUMS.value), torch.float32, self.device)
        top_k = best or _Level(keys[0], sums[0])
        for number, shift in enumerate(shifts):
            first = max(0, number - 1)
            _digit_kernel[self._grid](
                self.logits, self.fields, self.peaks, keys[first], sums[first], top_k.key, top_k.sums, shift, *self.strides, self.count,
                **self.sizes, BITS=self.bits, STEP=_STEP, IS_FIRST=number == 0, OF_MASS=best is not None, num_warps=4,
            )  # fmt: skip
        return _Level(keys[-1], sums[-1])

    def pick(self, best: _Level | None, level: _Level | None, slots: SlotTensors, chosen: Tensor, kind: ChoiceKind) -> None:
        none = _Level(self.places, self.peaks)
        best, level = best or none, level or none
        arguments: tuple[Any, ...] = (self.peaks, self.places, best.key, best.sums, level.key, level.sums, chosen, slots.newest, slots.seen)
        sizes = {name: size for name, size in self.sizes.items() if name != "C"}
        _pick_kernel[(self.count,)](
            self.logits, self.fields, *arguments, *self.strides, chosen.stride(0), **sizes, BITS=self.bits, IS_SAMPLED=kind.sampled,
            IS_FILTERED=kind.filtered, IS_EDITED=kind.edited, num_warps=8 if kind.sampled else 1,
        )  # fmt: skip


def choose(logits: Tensor, fields: Tensor, slots: SlotTensors, chosen: Tensor, kind: ChoiceKind) -> None:
    """logits [B, V]; fields [NUM_FIELDS, B]; chosen [NUM_CHOSEN, B], written; so are the newest tokens and counts of `slots`."""
    rows = _Rows(logits, fields)
    best = level = None
    if kind.filtered:
        best = rows.at_level(1, rows.find_digits())
        level = rows.at_level(2, rows.find_digits(best), best)
    elif kind.sampled:
        level = rows.at_level(0)
    rows.pick(best, level, slots, chosen, kind)
