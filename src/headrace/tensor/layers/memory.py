"""Returns freed memory to the system while a model is loaded.

Packing frees temporaries of tens of megabytes between weights that stay, and the C library keeps these holes: hundreds of megabytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def return_freed_memory() -> None:
    """Takes milliseconds; does nothing if the C library is not glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
