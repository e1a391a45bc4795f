"""Tests the kernels of adapters, compiled ahead of time for A100 and H100: the few variants fit the device, and nothing waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ahead_of_time import compiling_for

from headrace.tensor.batch import StepAdapters
from headrace.tensor.kernels.gpu.adapters import TritonAdapters

pytestmark = [pytest.mark.slow, pytest.mark.process]


def blank(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90])
def test_steps_of_few_and_of_many_tokens_have_a_variant_each(tmp_path: Path, capability: int, dtype: torch.dtype) -> None:
    with compiling_for(capability, tmp_path) as compiled:
        for rows in (1, 1024, 7, 20, 100, 256, 257, 5000):
            step = StepAdapters(blank(rows, dtype=torch.int32), (None,) * 33, addresses=blank(33, dtype=torch.int64), max_rank=64)
            TritonAdapters("meta").apply(blank(rows, 6144, dtype=dtype), blank(rows, 4096, dtype=dtype), 3, step)
    names = [kernel.name for kernel in compiled]
    assert (names.count("_shrink_kernel"), names.count("_expand_kernel")) == (2, 2)
    assert not [kernel for kernel in compiled if kernel.local_bytes]
