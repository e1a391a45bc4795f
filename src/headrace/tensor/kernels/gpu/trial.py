"""Compiles and runs a small Triton kernel when an engine starts, to find a broken GPU setup in a second or two, before weights are loaded.

The kernel, and the C launcher that Triton makes for it, are compiled at every start: a cached kernel of an earlier start would hide a
compiler that no longer works.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.machine.gpus import MIN_CAPABILITY, too_old
from headrace.tensor.kernels.gpu.compiler import TritonCompiler

MAX_REASON = 300
MAX_AGE_S = 3600.0
"""Seconds after which the folder of a trial belongs to a trial that was killed."""
_SIZE, _PREFIX = 64, "trial-"


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
    """2 * x, as a new tensor, computed by a kernel that is compiled in an empty folder inside Triton's private cache folder."""
    out = torch.empty_like(x)
    TritonCompiler()
    knobs = triton.knobs.cache
    _remove_abandoned(Path(knobs.dir))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=knobs.dir) as folder, knobs.scope():
        knobs.dir = folder
        _double_kernel[(1,)](x, out, BLOCK=x.numel())
    return out
