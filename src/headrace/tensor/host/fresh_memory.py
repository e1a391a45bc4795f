"""A debug switch: memory allocated for a result holds NaN until it is written, so that reading it too early shows in the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

POISON = 0xFF
"""Every byte: NaN in float32, bfloat16 and float16; -1 in integers."""


class _Switch:
    is_on = False


_SWITCH = _Switch()


def is_poisoned() -> bool:
    return _SWITCH.is_on


@contextmanager
def poisoned(is_on: bool = True) -> Iterator[None]:
    before, _SWITCH.is_on = _SWITCH.is_on, is_on
    try:
        yield
    finally:
        _SWITCH.is_on = before


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """For memory that is written at once, filled with POISON under the switch; deferred kernels use `jit.launch.fresh`."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _SWITCH.is_on and made.numel():
        made.flatten().view(torch.uint8).fill_(POISON)
    return made
