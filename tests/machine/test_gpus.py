"""Tests that GPUs are found without torch, and that the reason why one cannot be used is said."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.machine import gpus
from headrace.machine.gpus import Gpus, deal_gpu, find_gpus, parse_probe

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    find_gpus.cache_clear()
    yield
    find_gpus.cache_clear()


DRIVER = "Mend the driver (nvidia-smi shows its state), or use device = cpu."


@pytest.mark.parametrize(
    ("output", "error", "visible", "found"),
    [
        ("13000 9.0 9.0", "", None, Gpus(("0", "1"))),
        ("13000 9.0 9.0", "", "3,5", Gpus(("3", "5"))),
        ("13010 8.0", "", "GPU-8f2a", Gpus(("GPU-8f2a",))),
        ("13000 9.0", "", "0,9", Gpus(("0",))),
        ("13000 9.0 7.5 12.0", "", None, Gpus(("0", "2"))),
        ("status 999", "", None, Gpus((), "the driver does not answer (status 999)", DRIVER)),
        ("", "OSError: no libcuda.so.1", None, Gpus((), "the driver does not answer (OSError: no libcuda.so.1)", DRIVER)),
        ("", "", None, Gpus((), "the driver does not answer (no output)", DRIVER)),
    ],
)
def test_what_the_driver_says(output: str, error: str, visible: str | None, found: Gpus) -> None:
    assert parse_probe(output, error, visible, "13.0") == found


@pytest.mark.parametrize(
    ("output", "torch_cuda", "problem", "remedy"),
    [
        ("13000", "13.0", "the driver finds no GPU", "CUDA_VISIBLE_DEVICES"),
        ("13000 7.0 7.5", "13.0", "the GPU has compute capability 7.5, and the kernels need 8.0", "Ampere"),
        ("12040 9.0", "13.0", "the driver is for CUDA 12.4, older than the CUDA 13.0 of this torch", "a torch for CUDA 12"),
        ("12040", "13.0", "the driver is for CUDA 12.4, older than the CUDA 13.0 of this torch", "Update the driver"),
        ("12020 9.0", "12.8", "", ""),
        ("13000 9.0", "12.8", "", ""),
        ("12020 9.0", "", "", ""),
    ],
)
def test_a_card_or_a_driver_that_is_too_old_is_named_with_its_remedy(output: str, torch_cuda: str, problem: str, remedy: str) -> None:
    found = parse_probe(output, "", None, torch_cuda)
    assert (found.problem, found.names) == (problem, () if problem else ("0",))
    assert remedy in found.remedy
    assert found.remedy.endswith("or use device = cpu.") == bool(problem)


@pytest.mark.parametrize(
    ("version", "problem", "torch_cuda"),
    [
        ("cuda: Optional[str] = None", "this torch is a build without CUDA", None),
        ("cuda: Optional[str] = '13.0'", "", "13.0"),
        ("cuda = '12.8'", "", "12.8"),
        ("", "", ""),
    ],
)
def test_a_torch_without_cuda_is_told_by_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, problem: str, torch_cuda: str | None
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{version}\nhip = None\n")
    installed = {"torch": SimpleNamespace(origin=str(tmp_path / "__init__.py")), "triton": SimpleNamespace()}
    monkeypatch.setattr(gpus, "find_spec", installed.get)
    assert gpus._torch_cuda() == torch_cuda
    assert (gpus._missing_software() or Gpus()).problem == problem
    del installed["triton"]
    assert (gpus._missing_software() or Gpus()).problem == (problem or "triton is not installed")
    installed.clear()
    assert (gpus._missing_software() or Gpus()).problem == "torch is not installed"


def test_a_compiler_is_looked_for_as_triton_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, include = tmp_path / "bin", tmp_path / "include"
    programs.mkdir()
    include.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(include))

    def problem(**environ: str) -> str:
        return (gpus._missing_compiler(environ) or Gpus()).problem

    assert problem() == "Triton needs a C compiler, and finds neither gcc nor clang"
    assert problem(CC="icc") == "Triton compiles with CC, and 'icc' is not found"
    (programs / "clang").touch(mode=0o755)
    assert problem() == problem(CC="clang") == f"Triton needs Python's headers, and {include} has no Python.h"
    assert problem(CC="") == "Triton compiles with CC, and '' is not found"
    (tmp_path / "Python.h").touch()
    assert problem(CPATH=str(tmp_path)) == ""
    (include / "Python.h").touch()
    assert problem() == problem(CC="clang") == ""


def test_a_gpu_that_is_hidden_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(gpus, "_missing_software", lambda: None)
    monkeypatch.setattr(gpus, "_missing_compiler", lambda environ: None)
    monkeypatch.setattr(gpus, "run_probe", lambda code, timeout_s: ("13000 9.0", ""))
    monkeypatch.setenv(gpus.VISIBLE, "")
    assert find_gpus() == Gpus()
    find_gpus.cache_clear()
    monkeypatch.delenv(gpus.VISIBLE)
    assert find_gpus() == Gpus(("0",))


@pytest.mark.process
def test_the_driver_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question itself, against a driver that is not there; and against a driver that has two GPUs."""
    output, error = gpus.run_probe(gpus._PROBE, gpus.PROBE_S)
    assert "libcuda.so.1" in error or output
    assert parse_probe(*gpus.run_probe("print(13000, 9.0, '9.0')", 30), None) == Gpus(("0", "1"))
    assert gpus.run_probe("import os; print(os.environ)", 30, {"ONLY": "this"})[0].count("ONLY") == 1
    assert gpus.run_probe("import os; os.abort()", 30, {}) == ("", "its process ended with -6")
    assert gpus.run_probe("import time; time.sleep(60)", 0.1) == ("", "no answer within 0.1 s")
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert "/absent/python" in parse_probe(*gpus.run_probe(gpus._PROBE, 30), None).problem


FAKE_DRIVER = """
import ctypes
class Function:
    def __init__(self, name): self.name = name
    def __call__(self, pointer, *arguments):
        value = {"cuDriverGetVersion": 12080, "cuDeviceGetCount": 2, "cuDeviceGet": arguments[0] + 7 if arguments else 0}.get(self.name)
        if self.name == "cuDeviceGetAttribute":
            value = {(75, 7): 9, (76, 7): 0, (75, 8): 7, (76, 8): 5}[arguments]
        if value is not None:
            pointer._obj.value = value
        return INIT if self.name == "cuInit" else 0
class Driver:
    def __init__(self, name): assert name == "libcuda.so.1"
    def __getattr__(self, name): return Function(name)
ctypes.CDLL = Driver
"""


@pytest.mark.process
@pytest.mark.parametrize(("init", "output"), [(0, "12080 9.0 7.5"), (100, "12080"), (803, "status 803")])
def test_the_driver_is_asked_for_its_version_and_each_gpus_capability(init: int, output: str) -> None:
    assert gpus.run_probe(f"INIT = {init}\n{FAKE_DRIVER}{gpus._PROBE}", 30) == (output, "")


def test_processes_are_dealt_gpus_in_turn_and_know_how_many_share_theirs() -> None:
    assert [deal_gpu(("0", "1"), index, 2) for index in range(2)] == [("0", 0), ("1", 0)]
    assert [deal_gpu(("4", "7"), index, 3) for index in range(3)] == [("4", 1), ("7", 0), ("4", 1)]
    assert deal_gpu(("0",), 2, 3) == ("0", 2)
