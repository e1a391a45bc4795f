"""GPUs are found without torch, and what stands in their way is said."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.core import gpus
from headrace.core.gpus import Gpus, find_gpus, parse_probe

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    find_gpus.cache_clear()


@pytest.mark.parametrize(
    ("output", "error", "visible", "found"),
    [
        ("2", "", None, Gpus(("0", "1"))),
        ("2", "", "3,5", Gpus(("3", "5"))),
        ("1", "", "GPU-8f2a", Gpus(("GPU-8f2a",))),
        ("1", "", "0,9", Gpus(("0",))),
        ("0", "", None, Gpus(problem="the driver finds no GPU")),
        ("status 999", "", None, Gpus(problem="the driver does not answer (status 999)")),
        ("", "OSError: libcuda.so.1: cannot open", None, Gpus(problem="the driver does not answer (OSError: libcuda.so.1: cannot open)")),
        ("", "", None, Gpus(problem="the driver does not answer (no output)")),
    ],
)
def test_what_the_driver_says(output: str, error: str, visible: str | None, found: Gpus) -> None:
    assert parse_probe(output, error, visible) == found


@pytest.mark.parametrize(
    ("version", "problem"), [("cuda: Optional[str] = None", "this torch is a build without CUDA"), ("cuda = '13.0'", "")]
)
def test_a_torch_without_cuda_is_told_by_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, problem: str
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{version}\nhip = None\n")
    installed = {"torch": SimpleNamespace(origin=str(tmp_path / "__init__.py")), "triton": SimpleNamespace()}
    monkeypatch.setattr(gpus, "find_spec", installed.get)
    assert gpus._missing_software() == problem
    del installed["triton"]
    assert gpus._missing_software() == (problem or "triton is not installed")
    installed.clear()
    assert gpus._missing_software() == "torch is not installed"


def test_a_gpu_that_is_hidden_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(gpus, "_missing_software", lambda: "")
    monkeypatch.setattr(gpus, "_ask_driver", lambda: ("1", ""))
    monkeypatch.setenv(gpus.VISIBLE, "")
    assert find_gpus() == Gpus()
    find_gpus.cache_clear()
    monkeypatch.delenv(gpus.VISIBLE)
    assert find_gpus() == Gpus(("0",))


@pytest.mark.process
def test_the_driver_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question itself, against a driver that is not there; and against a driver that has two GPUs."""
    assert "libcuda.so.1" in "".join(gpus._ask_driver()) or gpus._ask_driver()[0]
    monkeypatch.setattr(gpus, "_PROBE", "print(1 + 1)")
    assert parse_probe(*gpus._ask_driver(), None) == Gpus(("0", "1"))
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert "/absent/python" in parse_probe(*gpus._ask_driver(), None).problem
