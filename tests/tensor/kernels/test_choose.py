"""Kernels are chosen aloud, and everything works without Numba."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.core.errors import ConfigError
from headrace.tensor.kernels import choose, load_backend
from headrace.tensor.kernels.choose import choose_kernels

pytestmark = pytest.mark.pure

WITHOUT_NUMBA = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import torch
from headrace.core.errors import ConfigError
from headrace.tensor.kernels import load_backend
from headrace.tensor.kernels.choose import choose_kernels
from headrace.tensor.host.threads import apply_threads, plan_threads

name, reason = choose_kernels("auto", "cpu")
assert name == "reference" and "numba cannot be used (ModuleNotFoundError: No module named" in reason, reason
plan = plan_threads(None)
assert plan.layer == "none"
apply_threads(plan)
packing = load_backend(name).packing
assert packing.pack_linear(torch.ones(2, 3), None)(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
try:
    choose_kernels("numba", "cpu")
except ConfigError as error:
    print(error)
"""


@pytest.mark.process
def test_without_numba_the_reference_is_taken_and_said() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kernels: numba cannot be used" in done.stdout
    assert "Install numba" in done.stdout


def test_with_numba_it_is_taken() -> None:
    pytest.importorskip("numba")
    name, reason = choose_kernels("auto", "cpu")
    assert (name, reason) == ("numba", "compiled for this CPU")
    assert load_backend(name).name == "numba"


@pytest.mark.parametrize(
    "error", [OSError("libLLVM.so: cannot open"), RuntimeError("cannot cache"), AttributeError("_ARRAY_API not found")]
)
def test_a_numba_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(name: str) -> None:
        raise error

    monkeypatch.setattr(choose, "import_module", broken)
    name, reason = choose_kernels("auto", "cpu")
    assert name == "reference"
    assert str(error) in reason
    with pytest.raises(ConfigError, match=type(error).__name__):
        choose_kernels("numba", "cpu")


def test_reference_can_be_asked_for() -> None:
    assert choose_kernels("reference", "cpu") == ("reference", "as configured")


def test_other_devices_have_the_reference_alone() -> None:
    assert choose_kernels("auto", "cuda")[0] == "reference"
    with pytest.raises(ConfigError, match="not on cuda"):
        choose_kernels("numba", "cuda")


def test_only_numba_promises_determinism() -> None:
    pytest.importorskip("numba")
    assert load_backend("numba", deterministic=True).packing is not load_backend("numba").packing
    with pytest.raises(ConfigError, match="deterministic"):
        load_backend("reference", deterministic=True)
