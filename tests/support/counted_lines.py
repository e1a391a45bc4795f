"""Counts how much a call does, in lines of Python: the same on every machine, however busy it is.

What a library does in C is not counted; a quadratic step there shows in the figures of `make test-timing`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_lines(call: Callable[[], object]) -> int:
    count = 0

    def trace(_frame: FrameType, _event: str, _arg: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def growth(call_of: Callable[[int], Callable[[], object]], size: int) -> float:
    """How many times as much a call of this size does as one of a quarter of it: 4 where it is linear, 16 where it is quadratic."""
    return num_lines(call_of(size)) / num_lines(call_of(size // 4))
