"""Allocates tensors in huge pages (`tensor.host.file_memory`), and reads the bytes of a file into such tensors."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from headrace.tensor.host import fresh_memory
from headrace.tensor.host.file_memory import FileReading, map_pages

LEAST_BYTES = 8 << 20
"""Smaller memory is left to torch, which reuses it."""


def empty(num_elements: int, dtype: torch.dtype) -> Tensor:
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < LEAST_BYTES:
        return fresh_memory.empty((num_elements,), dtype)
    return torch.frombuffer(map_pages(num_bytes), dtype=dtype, count=num_elements)


def bytes_of(tensor: Tensor) -> memoryview:
    """tensor: contiguous, on the host"""
    memory: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return memory


def read_bytes(path: Path, start: int, num_bytes: int) -> Tensor:
    """Bytes [start, start + num_bytes) of a file as flat uint8, in memory of its own. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = empty(num_bytes, torch.uint8)
        with memoryview(memory.numpy()) as view:  # type: ignore[arg-type]
            FileReading(descriptor, [(view, start)], torch.get_num_threads() - 1 if num_bytes >= LEAST_BYTES else 0).wait()
        return memory
    finally:
        os.close(descriptor)
