"""Compiles the kernels that take longest in a process of its own, while a first start reads weights and compiles the others.

    python -m headrace.tensor.kernels.cpu.ahead float32 bfloat16    attention of these queries and caches, then the drawing of tokens

Both take half of the time of all. `disk_cache` has one process wait for another that compiles the same kernel; so the start finds them, and
compiles what is left where this process fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.tensor.kernels.cpu import draw
from headrace.tensor.kernels.cpu.attention import paged
from headrace.tensor.kernels.cpu.jit.launch import CACHE, thread_limit


@contextmanager
def compiling_ahead(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> Iterator[None]:
    """The process ends with the block, or with this one. None is started for one thread, or where attention has been compiled."""
    function = paged.SOURCES.get((query_dtype, cache_dtype))
    if function is None or CACHE.directory is None or thread_limit() < 2 or any(CACHE.directory.rglob(f"paged.{function.__name__}-*.nbi")):
        yield
        return
    command = [sys.executable, "-P", "-m", __name__, *(str(dtype).removeprefix("torch.") for dtype in (query_dtype, cache_dtype))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def _end_with_parent() -> None:
    """Nothing is ever written to the pipe, which the kernel closes however the parent ends."""
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    paged.kernel(*(getattr(torch, name) for name in sys.argv[1:]))
    draw.kernel()
