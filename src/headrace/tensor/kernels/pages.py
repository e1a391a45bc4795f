"""Memory for weights: large pages, because it is filled once and then read from end to end at every step.

The system maps memory at first touch, page by page. In pages of 2 MiB that costs a few per cent of writing the memory; in pages of 4 KiB
it costs more than the writing. Where the system does not give large pages the memory is as good as any.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20
"""Read by one thread at a time; smaller memory is left to torch, which reuses it."""


def empty(num_elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor, its memory not written yet and its own."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < CHUNK_BYTES:
        return torch.empty(num_elements, dtype=dtype)
    return torch.frombuffer(map_pages(num_bytes), dtype=dtype, count=num_elements)


def map_pages(num_bytes: int) -> mmap.mmap:
    """Private memory of zeros, in large pages if the system gives them. It lives as long as a tensor over it."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_bytes(path: Path, start: int, num_bytes: int) -> Tensor:
    """Bytes [start, start + num_bytes) of a file as flat uint8, in memory of its own: what becomes of the file afterwards is no matter.

    Large ones are copied by as many threads as torch computes with. Raises OSError.
    """
    memory = empty(num_bytes, torch.uint8)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with memoryview(memory.numpy()) as view:  # type: ignore[arg-type]
            parts = [(view[first : first + CHUNK_BYTES], start + first) for first in range(0, num_bytes, CHUNK_BYTES)]
            if len(parts) == 1:
                _fill(descriptor, *parts[0])
            elif parts:
                with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                    list(pool.map(lambda part: _fill(descriptor, *part), parts))
    finally:
        os.close(descriptor)
    return memory


def _fill(descriptor: int, target: memoryview, position: int) -> None:
    with target:
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], position + done)
            if count == 0:
                raise OSError("the file became shorter while it was read")
            done += count
