"""Where Triton keeps compiled kernels, how its progress is reported, and a first kernel that finds a broken GPU setup.

Write access to the folder is enough to run code as this user (`machine.cache_folder`).

The first kernel, and the C launcher that Triton makes for it, are compiled at every start: a cached one would hide a compiler that no
longer works.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.machine.cache_folder import ENVIRONMENT, cache_root, open_private
from headrace.machine.gpus import MIN_CAPABILITY, too_old

MAX_REASON = 300
MAX_AGE_S = 3600.0
_SIZE, _PREFIX = 64, "trial-"


@cache
def _choose_folder() -> tuple[bool, str]:
    """Point Triton at this user's private folder, or at one that ends with the process."""
    try:
        folder = str(open_private(cache_root(os.environ), ("triton",)))
    except OSError as error:
        temporary = tempfile.TemporaryDirectory(prefix="headrace-triton-")
        triton.knobs.cache.dir = temporary.name
        _TEMPORARY.append(temporary)
        return False, f"kernels are compiled at every start: {error}; set {ENVIRONMENT} to a private folder"
    triton.knobs.cache.dir = folder
    return True, f"compiled kernels are kept in {folder}"


_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []


class TritonCompiler:
    """Implements `KernelCompiler`."""

    packages: tuple[str, ...] = ("triton",)
    expected: int | None = None

    def __init__(self) -> None:
        _choose_folder()

    def limit_threads(self, num_threads: int) -> str:
        return "none"

    def kept(self) -> tuple[bool, str]:
        return _choose_folder()

    def ahead(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def reporting(self, report: Callable[[int], None]) -> Iterator[None]:
        num_compiled = 0

        def listen(*, cache_hit: bool, **_: object) -> None:
            nonlocal num_compiled
            if not cache_hit:
                if not num_compiled:
                    report(0)
                num_compiled += 1
                report(num_compiled)

        before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, listen
        try:
            yield
        finally:
            triton.knobs.compilation.listener = before


@triton.jit
def _double_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + column, 2.0 * tl.load(x_ptr + column))


def find_fault(device: str) -> str:
    """Why no kernel can be compiled or run on the device, as one line of text; "" when the trial kernel ran with the right result."""
    try:
        x = torch.arange(_SIZE, dtype=torch.float32, device=device)
        if x.is_cuda and (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
            return too_old(capability).problem
        is_right = bool((double(x) == x + x).all())
    except subprocess.CalledProcessError as error:  # its words are the whole command; what the program said is on stderr
        return f"Triton cannot compile a kernel: {error.cmd[0]} fails with exit status {error.returncode}"
    except Exception as error:  # drivers, compilers and Triton's own assertions fail in many ways, each of which means the same
        return f"a first kernel cannot be compiled and run ({type(error).__name__}: {' '.join(str(error).split())[:MAX_REASON]})"
    return "" if is_right else "a first kernel gives a wrong result"


def _remove_abandoned(folder: Path) -> None:
    for old in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another start removes it
            if time.time() - old.stat().st_mtime > MAX_AGE_S:
                shutil.rmtree(old, ignore_errors=True)


def double(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    TritonCompiler()
    knobs = triton.knobs.cache
    _remove_abandoned(Path(knobs.dir))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=knobs.dir) as folder, knobs.scope():
        knobs.dir = folder
        _double_kernel[(1,)](x, out, BLOCK=x.numel())
    return out
