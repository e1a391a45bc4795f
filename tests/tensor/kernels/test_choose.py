"""Kernels are chosen aloud, and everything works without Numba."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runner_kit import DenseLlama, save_tiny_llama

from headrace.core.errors import ConfigError
from headrace.tensor import backends
from headrace.tensor.backends import BackendModule, choose_backend, load_backend

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
from headrace.tensor.backends import choose_backend, load_backend

name, reason = choose_backend("auto", "cpu")
assert name == "reference" and "numba cannot be used (ModuleNotFoundError: No module named" in reason, reason
backend = load_backend(name)
assert backend.limit_threads(1) == "none"
assert backend.packing.pack_linear(torch.ones(2, 3), None)(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
try:
    choose_backend("numba", "cpu")
except ConfigError as error:
    print(error)

from headrace.engine.config import EngineConfig
from headrace.engine.runner_build import build_runner
from runner_kit import Planner, row_tokens

runner, info = build_runner(EngineConfig(model=sys.argv[1], num_kv_blocks=20, max_model_len=64))
planner = Planner(block_size=16)
planner.start(0, [5, 6, 7])
plans = [planner.plan((0, 0, 3, 1)), *(planner.plan((0, 3 + step, 1, 1)) for step in range(8))]
print("generated", [row_tokens(runner.submit(plan).result())[0][0] for plan in plans])
print(*info.decided, sep="\\n")
"""


@pytest.mark.process
def test_without_numba_the_reference_is_taken_and_said_and_generates(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_NUMBA, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kernels: numba cannot be used" in done.stdout
    assert "Install numba" in done.stdout
    assert f"generated {DenseLlama(folder).greedy([5, 6, 7], 9)}" in done.stdout
    assert "kernels: reference, slow: numba cannot be used" in done.stdout


def test_with_numba_it_is_taken() -> None:
    pytest.importorskip("numba")
    name, reason = choose_backend("auto", "cpu")
    assert (name, reason) == ("numba", "compiled for this CPU")
    assert load_backend(name).name == "numba"


@pytest.mark.parametrize(
    "error", [OSError("libLLVM.so: cannot open"), RuntimeError("cannot cache"), AttributeError("_ARRAY_API not found")]
)
def test_a_numba_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(name: str) -> None:
        if name == backends.BACKENDS["numba"].module:
            raise error

    monkeypatch.setattr(backends, "import_module", broken)
    name, reason = choose_backend("auto", "cpu")
    assert name == "reference"
    assert str(error) in reason
    with pytest.raises(ConfigError, match=type(error).__name__):
        choose_backend("numba", "cpu")


def test_reference_can_be_asked_for() -> None:
    assert choose_backend("reference", "cpu") == ("reference", "as configured")


def test_a_gpu_has_kernels_of_its_own_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert choose_backend("auto", "cuda") == ("triton", "compiled for this GPU")
    with pytest.raises(ConfigError, match="not on cpu"):
        choose_backend("triton", "cpu")
    monkeypatch.setitem(backends.BACKENDS, "triton", BackendModule("absent_module", ("cuda",), "", package="triton"))
    name, reason = choose_backend("auto", "cuda")
    assert (name, "triton cannot be used (ModuleNotFoundError" in reason) == ("reference", True)
    with pytest.raises(ConfigError, match="Install triton"):
        choose_backend("triton", "cuda")
    with pytest.raises(ConfigError, match="not on cuda"):
        choose_backend("numba", "cuda")


def test_only_numba_promises_determinism() -> None:
    pytest.importorskip("numba")
    assert load_backend("numba", deterministic=True).packing is not load_backend("numba").packing
    with pytest.raises(ConfigError, match="deterministic"):
        load_backend("reference", deterministic=True)
