"""Freed memory goes back to the system while a model is loaded.

Packing makes and frees temporaries of tens of megabytes between weights that stay. The C library keeps such holes for later; over the
layers of a model they add up to hundreds of megabytes that no one uses again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def return_freed_memory() -> None:
    """Ask the allocator to give whole free pages back. Milliseconds; does nothing where the C library is not glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
