"""Tests that the choice of kernels is logged, and that everything works without Numba."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from runner_kit import DenseLlama, save_tiny_llama

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.runner.build import build_runner
from headrace.machine.gpus import Gpus, unusable
from headrace.tensor import backends
from headrace.tensor.backends import BackendModule, choose_backend, find_working_gpus, load_backend, try_kernels
from headrace.tensor.device import Cuda

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
from headrace.engine.runner.build import build_runner
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


@pytest.fixture
def _found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of which nothing that is cheap to see is wrong."""
    backends.find_working_gpus.cache_clear()
    monkeypatch.setattr(backends, "find_gpus", lambda: Gpus(("3", "5")))
    yield
    backends.find_working_gpus.cache_clear()


@pytest.mark.usefixtures("_found")
def test_a_first_kernel_is_tried_before_a_gpu_is_computed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = iter(["", "a first kernel gives a wrong result"])

    def find_fault(device: str) -> str:
        asked.append(device)
        return next(answers)

    trial = SimpleNamespace(find_fault=find_fault)
    triton = backends.BACKENDS["triton"]
    modules = {triton.module: None, triton.trial: trial}
    monkeypatch.setattr(backends, "import_module", modules.__getitem__)
    for requested, name in (("auto", "cpu"), ("numba", "cpu"), ("reference", "cpu"), ("reference", "cuda"), ("numba", "cuda")):
        try_kernels(requested, name)
    assert asked == [], "nothing to try, or refused elsewhere"
    try_kernels("auto", "cuda")
    with pytest.raises(ConfigError, match=r"^device: a first kernel gives a wrong result\. Mend it, or use device = cpu\.$"):
        try_kernels("triton", "cuda")
    assert asked == ["cuda", "cuda"]
    monkeypatch.setattr(BackendModule, "problem", lambda backend: "ImportError: libtriton.so")
    with pytest.raises(ConfigError, match=r"triton cannot be used \(ImportError: libtriton.so\)"):
        try_kernels("auto", "cuda")
    monkeypatch.setattr(backends, "find_gpus", lambda: unusable("triton is not installed", "Install it"))
    with pytest.raises(ConfigError, match="triton is not installed"):
        try_kernels("auto", "cuda")


def test_an_engine_on_a_gpu_tries_it_before_it_reads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "check", lambda device: None)
    monkeypatch.setattr(backends, "find_gpus", lambda: unusable("the driver is for CUDA 12.4", "Update the driver"))
    with pytest.raises(ConfigError, match=r"^device: the driver is for CUDA 12\.4\. Update the driver, or use device = cpu\.$"):
        build_runner(EngineConfig(model="/absent", device="cuda"))


@pytest.mark.usefixtures("_found")
@pytest.mark.parametrize(
    ("output", "error", "found"),
    [
        ("works", "", Gpus(("3", "5"))),
        ("a line of a library\nworks", "a warning", Gpus(("3", "5"))),
        ("fault\ngcc fails\nMend it.", "", Gpus((), "gcc fails", "Mend it.")),
        ("", "Segmentation fault", unusable("a first kernel cannot be tried (Segmentation fault)", "Mend it")),
        ("", "", unusable("a first kernel cannot be tried (no output)", "Mend it")),
    ],
)
def test_what_the_trials_process_says_is_what_auto_goes_by(monkeypatch: pytest.MonkeyPatch, output: str, error: str, found: Gpus) -> None:
    def run_probe(code: str, timeout_s: float, environment: dict[str, str]) -> tuple[str, str]:
        assert environment["CUDA_VISIBLE_DEVICES"] == "3"
        return output, error

    monkeypatch.setattr(backends, "run_probe", run_probe)
    assert find_working_gpus() == found


@pytest.mark.process
@pytest.mark.usefixtures("_found")
def test_the_trial_of_a_gpu_that_torch_does_not_see_fails_in_words() -> None:
    assert find_working_gpus() == Gpus((), "torch sees no GPU here", "Use device = cpu.")


def test_where_no_gpu_is_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    backends.find_working_gpus.cache_clear()
    monkeypatch.setattr(backends, "find_gpus", Gpus)
    monkeypatch.setattr(backends, "run_probe", None)
    assert find_working_gpus() == Gpus()


def test_only_numba_promises_determinism() -> None:
    pytest.importorskip("numba")
    assert load_backend("numba", deterministic=True).packing is not load_backend("numba").packing
    with pytest.raises(ConfigError, match="deterministic"):
        load_backend("reference", deterministic=True)
