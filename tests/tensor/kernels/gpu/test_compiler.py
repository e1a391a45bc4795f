"""Tests the first kernel: it runs on a GPU and in the interpreter, compiles for the oldest GPU, and one line says what stands in
its way.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from ahead_of_time import compiling_for

from headrace.tensor.kernels.gpu import compiler
from headrace.tensor.kernels.gpu.compiler import TritonCompiler

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if IS_INTERPRETED else "cuda"


@pytest.mark.gpu
@pytest.mark.process
@pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="there is no GPU")
def test_a_device_that_works_has_no_fault() -> None:
    TritonCompiler()
    before = triton.knobs.cache.dir
    assert compiler.find_fault(DEVICE) == ""
    assert triton.knobs.cache.dir == before
    assert list(Path(before).glob("trial-*")) == []


@pytest.mark.process
def test_it_compiles_for_the_oldest_gpu(tmp_path: Path) -> None:
    with compiling_for(80, tmp_path) as compiled:
        compiler.double(torch.empty(64, device="meta"))
    assert [kernel.name for kernel in compiled] == ["_double_kernel"]
    assert list(tmp_path.iterdir()) == [], "nothing of it is kept, so that it is compiled at every start"


@pytest.mark.process
def test_where_no_driver_is_a_fault_is_one_line() -> None:
    fault = compiler.find_fault("cuda")
    assert fault.startswith("a first kernel cannot be compiled and run (")
    assert "\n" not in fault


@pytest.mark.pure
@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (
            subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/a.c"]),
            "cannot compile a kernel: /usr/bin/gcc fails with exit status 1",
        ),
        (AssertionError("libcuda.so cannot found!\nPlease"), "run (AssertionError: libcuda.so cannot found! Please)"),
        (PermissionError(13, "denied"), "run (PermissionError: [Errno 13] denied)"),
    ],
)
def test_what_a_compiler_or_a_library_says_is_kept(monkeypatch: pytest.MonkeyPatch, error: Exception, fault: str) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(compiler, "double", fail)
    assert compiler.find_fault("cpu").endswith(fault)


@pytest.mark.pure
def test_a_wrong_result_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "double", lambda x: x)
    assert compiler.find_fault("cpu") == "a first kernel gives a wrong result"
