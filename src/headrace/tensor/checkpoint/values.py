"""Checks a checkpoint's values, whatever its header says: NaN, infinities, and one 16-bit dtype mistaken for the other.

A dtype other than config.json's is no fault. Refused are values that no training leaves behind. Magnitudes are compared as integers:
without the sign bit, the bits of floats are ordered as their values are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
_CHUNK = 1 << 17
"""Elements checked at a time: they are read twice, the second time from the CPU's cache."""
_STRIDE = 8
"""One value in this many of the sampled bytes is kept."""
MIN_SAMPLE = 4096
"""With fewer sampled values nothing is concluded about a checkpoint."""


def num_not_finite(tensor: Tensor) -> int:
    """How many values of a contiguous float tensor are NaN or infinite. If none is, no memory is allocated."""
    signed = tensor.view(_BITS[tensor.dtype]).numpy().reshape(-1)
    unsigned = signed.view(f"u{signed.dtype.itemsize}")
    infinity, sign = _INFINITY[tensor.dtype], 1 << (8 * signed.dtype.itemsize - 1)
    for first in range(0, len(signed), _CHUNK):
        part = slice(first, first + _CHUNK)
        # The largest positive magnitude, and the largest negative one: as unsigned integers, negative floats are above all positive ones.
        if signed[part].max() >= infinity or unsigned[part].max() >= sign + infinity:
            return int((~torch.isfinite(tensor)).sum())
    return 0


class Sample:
    """A sample of 16-bit matrices, to tell whether they were written in the other 16-bit dtype than the header says."""

    def __init__(self) -> None:
        self._bits: dict[str, list[np.ndarray]] = {"F16": [], "BF16": []}

    def add(self, dtype: str, data: bytes) -> None:
        """Little-endian values. Dtypes other than F16 and BF16 are ignored."""
        if dtype in self._bits:
            self._bits[dtype].append(np.frombuffer(data, "<u2", count=len(data) // 2)[::_STRIDE])

    def contradiction(self) -> str | None:
        for dtype, looks_wrong in (("F16", _looks_like_bfloat16), ("BF16", _looks_like_float16)):
            parts = self._bits[dtype]
            magnitudes = np.concatenate(parts) & 0x7FFF if parts else np.empty(0, np.uint16)
            magnitudes = magnitudes[magnitudes != 0]
            if len(magnitudes) >= MIN_SAMPLE and (reason := looks_wrong(magnitudes)) is not None:
                return f"the weights are called {dtype} and {reason}"
        return None


def _looks_like_bfloat16(magnitudes: np.ndarray) -> str | None:
    """Why values labelled float16 are bfloat16; None if they are not.

    bfloat16's eight exponent bits, read as float16's five, shrink a range of many binades to less than one, around 1. Real weights spread
    over decades: the smallest hundredth of a normal distribution lies below a fiftieth of its median. Rounded weights may spread less, but
    take few distinct values.
    """
    low, middle, high = (float(value.view(np.float16)) for value in _at(magnitudes, 0.01, 0.5, 0.99))
    is_narrow = low > 0.5 * middle and 0.25 < middle < 4.0
    if is_narrow and len(np.unique(magnitudes)) >= 256:
        return f"98 % of them lie between {low:.3g} and {high:.3g}, as bytes of BF16 do when they are read as F16"
    return None


def _looks_like_float16(magnitudes: np.ndarray) -> str | None:
    """Why values labelled bfloat16 are float16; None if they are not. Read so, one binade becomes eight, all far below 1."""
    values = [float((np.uint32(value) << np.uint32(16)).view(np.float32)) for value in _at(magnitudes, 0.25, 0.75, 0.9)]
    if values[2] < 1e-3 and values[1] > 1000 * values[0]:
        return f"half of them lie between {values[0]:.3g} and {values[1]:.3g}, as bytes of F16 do when they are read as BF16"
    return None


def _at(magnitudes: np.ndarray, *shares: float) -> list[np.uint16]:
    places = [int(share * (len(magnitudes) - 1)) for share in shares]
    return [np.uint16(value) for value in np.partition(magnitudes, places)[places]]
