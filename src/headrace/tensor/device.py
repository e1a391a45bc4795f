"""The devices that an engine computes on, each a value.

Another device is a class and a row of DEVICES here, its word and its defaults in `engine.config`, and kernels of its own where those in
plain torch are too slow (`tensor.backends`).
"""

from __future__ import annotations

import gc
import math
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.core.load import GpuUse
from headrace.machine.gpus import find_gpus
from headrace.machine.resources import Available, read_available, read_text
from headrace.tensor.host import pages
from headrace.tensor.host.cpu_features import CpuFeatures
from headrace.tensor.launches import CudaLaunches, Launches

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIGNMENT = 64
"""Bytes: a cache line, which is also the widest vector register."""


FLOAT_BYTES = 4


class TensorDevice:
    """name: torch's word for it. has_fp8: whether it multiplies float8_e4m3fn."""

    @property
    def has_fp8(self) -> bool:
        return False

    def __init__(self, name: str) -> None:
        self.name = name

    def empty_weight(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.name)

    def zeroed_bytes(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self.name)

    def read_gpu(self) -> GpuUse | None:
        """None where there is none. Callable from any thread."""
        return None

    def make_launches(self) -> Launches | None:
        """None: a step is computed where it is called."""
        return None


class Cpu(TensorDevice):
    def check(self) -> None:
        """It is always there."""

    @property
    def title(self) -> str:
        return self.name

    @property
    def identity(self) -> str:
        """Compared where results are, beside the processor's family."""
        return self.name

    def free_memory(self) -> Available:
        return read_available()

    def step_itemsize(self, activations: torch.dtype) -> int:
        """Bytes of a number in a step's tensors: of `activations`, or of float32 where that is computed in between."""
        return FLOAT_BYTES

    def working_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Memory beside weights, KV cache and a step's tensors, for steps of up to `num_rows` sequences."""
        return 0

    def empty_weight(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pages.empty(math.prod(shape), dtype).view(shape)

    def zeroed_bytes(self, shape: tuple[int, ...]) -> Tensor:
        """Touches no page. torch would write them: seconds per GiB where page faults are slow."""
        num_bytes = math.prod(shape)
        memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
        skip = -memory.ctypes.data % _ALIGNMENT
        return torch.from_numpy(memory[skip : skip + num_bytes]).view(shape)

    def resolve_dtype(
        self, requested: str, checkpoint_dtype: str, features: CpuFeatures, *, is_rounded: bool = False
    ) -> tuple[torch.dtype, str]:
        """The dtype to compute with, and why.

        requested         "auto" | "float32" | "bfloat16" | "float16"
        checkpoint_dtype  dtype of most stored weights
        is_rounded        whether linears are multiplied as small integers
        """
        if requested == "float16":
            return torch.float32, "CPUs compute float16 in float32, which holds every value of it"
        if requested != "auto":
            return DTYPES[requested], "as configured"
        if checkpoint_dtype == "float32":
            return torch.float32, "as the checkpoint says"
        if checkpoint_dtype == "float16":
            return torch.float32, "the checkpoint is float16, which CPUs compute in float32"
        if is_rounded:
            return torch.float32, "rounded weights are multiplied as integers, which casts from and to bfloat16 would only hold up"
        if not features.has_bf16:
            return torch.float32, "the checkpoint is bfloat16, which this CPU would compute in software; weights stay bfloat16 in memory"
        return torch.bfloat16, "as the checkpoint says; this CPU has bfloat16 products"

    def default_kv_dtype(
        self, requested: str, computed: torch.dtype, checkpoint_dtype: str, features: CpuFeatures
    ) -> tuple[torch.dtype, str]:
        if requested == "auto" and checkpoint_dtype == "bfloat16" and features.has_bf16:
            return torch.bfloat16, "as the checkpoint says; this CPU computes with it"
        return computed, "as computed"


GPU_WORKING_BYTES = 768 << 20
MAX_REASON = 300
FP8_CAPABILITY = (8, 9)
"""The first GPUs that multiply FP8."""


class Cuda(TensorDevice):
    """The GPU that torch uses by itself. `features` says nothing of it."""

    def check(self) -> None:
        if not torch.cuda.is_available():
            gpus = find_gpus()
            raise ConfigError("device", gpus.problem or "torch sees no GPU here", gpus.remedy or "Use device = cpu.")
        try:
            found = int(torch.ones(2, device=self.name).sum())
        except (RuntimeError, AssertionError) as error:  # the latter: torch is a build for CPUs
            reason = " ".join(str(error).split())[:MAX_REASON]
            raise ConfigError("device", f"the GPU does not compute ({reason})", "Mend it, or use device = cpu.") from error
        if found != 2:
            raise ConfigError("device", f"the GPU adds 1 and 1 to {found}", "Mend it, or use device = cpu.")

    @property
    def title(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def has_fp8(self) -> bool:
        return torch.cuda.get_device_capability() >= FP8_CAPABILITY

    def read_gpu(self) -> GpuUse:
        free, total = torch.cuda.mem_get_info()
        try:
            utilization = torch.cuda.utilization() / 100  # asks NVML
        except (ModuleNotFoundError, RuntimeError):
            return GpuUse(total - free, total)
        return GpuUse(total - free, total, utilization)

    def make_launches(self) -> Launches:
        return CudaLaunches()

    @property
    def identity(self) -> str:
        return f"{self.title}, driver {driver_version()}"

    def free_memory(self) -> Available:
        """What torch keeps of memory that was given back is free as well, and so is what only a garbage collection gives back."""
        gc.collect()
        torch.cuda.empty_cache()
        return Available(torch.cuda.mem_get_info()[0], "the GPU")

    def step_itemsize(self, activations: torch.dtype) -> int:
        return activations.itemsize

    def working_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Logits and counts of tokens for each row stay; the rest is of libraries, captured graphs and fragments (an estimate)."""
        return GPU_WORKING_BYTES + 2 * FLOAT_BYTES * num_rows * vocab_size

    def resolve_dtype(
        self, requested: str, checkpoint_dtype: str, features: CpuFeatures, *, is_rounded: bool = False
    ) -> tuple[torch.dtype, str]:
        if requested != "auto":
            return DTYPES[requested], "as configured"
        return DTYPES[checkpoint_dtype], "as the checkpoint says"

    def default_kv_dtype(
        self, requested: str, computed: torch.dtype, checkpoint_dtype: str, features: CpuFeatures
    ) -> tuple[torch.dtype, str]:
        return computed, "as computed"


def driver_version(root: Path = Path("/")) -> str:
    text = read_text(root / "proc/driver/nvidia/version") or ""
    found = re.search(r"Kernel Module\b.*?(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else "unknown"


CPU, CUDA = Cpu("cpu"), Cuda("cuda")
ComputeDevice = Cpu | Cuda
DEVICES: dict[str, ComputeDevice] = {device.name: device for device in (CPU, CUDA)}
META = TensorDevice("meta")
