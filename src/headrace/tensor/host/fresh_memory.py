"""A debug switch: memory made for a result holds NaN until it is written, so that reading it too early is seen and not guessed.

Tests turn it on (tests/tensor/conftest.py). Of integers it makes -1, whose bytes are those of a NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

POISON = 0xFF
"""Every byte: NaN in float32, bfloat16 and float16."""


class _Switch:
    is_on = False


_SWITCH = _Switch()


def is_poisoned() -> bool:
    return _SWITCH.is_on


@contextmanager
def poisoned(is_on: bool = True) -> Iterator[None]:
    """Process-wide, for as long as the block runs."""
    before, _SWITCH.is_on = _SWITCH.is_on, is_on
    try:
        yield
    finally:
        _SWITCH.is_on = before


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """torch.empty, poisoned under the switch. For what is written now; results of kernels that may be put off: `jit.launch.fresh`."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _SWITCH.is_on and made.numel():
        made.flatten().view(torch.uint8).fill_(POISON)
    return made
