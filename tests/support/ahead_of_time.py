"""Compiles Triton kernels for a GPU that is not there, and says what each needs of it.

While `compiling_for` runs, Triton sees a driver that compiles every launch and runs none: kernels are launched by the code that launches
them on a device, over tensors of the meta device. A kernel that needs more shared memory than the device has fails as it does there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import ty_to_cpp

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""By compute capability: A100, H100."""
_NUMBERS = count(1000)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """local_bytes: of each thread, for what its registers do not hold."""

    name: str
    registers: int
    local_bytes: int
    shared_bytes: int


@contextmanager
def compiling_for(capability: int, cache: Path) -> Iterator[list[CompiledKernel]]:
    """What has been compiled so far, in order. cache: Triton's folder of compiled kernels."""
    compiled: list[CompiledKernel] = []
    driver, knobs = triton.runtime.driver, triton.knobs.cache
    before, folder = driver._active, knobs.dir
    driver._active, knobs.dir = _driver(capability, compiled), str(cache)
    try:
        yield compiled
    finally:
        driver._active, knobs.dir = before, folder


def _driver(capability: int, compiled: list[CompiledKernel]) -> Any:
    """What Triton asks of a driver. Its device has a number of its own: Triton keeps what it compiled for a device as long as it lives."""
    number = next(_NUMBERS)

    def load(name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[int, int, int, int, int]:
        registers, local_bytes = _usage(binary)
        compiled.append(CompiledKernel(name, registers, local_bytes, shared_bytes))
        return 0, 0, registers, local_bytes // 4, 1024

    def launcher(source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    return SimpleNamespace(
        launcher_cls=launcher,
        utils=SimpleNamespace(load_binary=load, get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES[capability]}),
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("meta"),
        map_python_to_cpp_type=ty_to_cpp,
    )


def _usage(binary: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]
