"""Tests parallel regions: entered from many threads at once, of a bounded size, and loaded from the disk cache in any order."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

numba = pytest.importorskip("numba")

from headrace.tensor.kernels.cpu.backend import KERNELS  # noqa: E402
from headrace.tensor.kernels.cpu.jit import launch  # noqa: E402
from headrace.tensor.kernels.cpu.linear import StripLinear  # noqa: E402

pytestmark = pytest.mark.socket


def test_many_threads_may_enter_regions_at_once() -> None:
    """One runner thread is the rule, but a second engine in the process, or a test, must not end it."""
    weight, x = torch.randn(512, 512), torch.randn(64, 512)
    layer = StripLinear.pack(weight, None)
    want_product, want_gate = layer(x), KERNELS.gated_activation(x, "silu")

    def work(_: int) -> bool:
        return torch.equal(layer(x), want_product) and torch.equal(KERNELS.gated_activation(x, "silu"), want_gate)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(60)))


def test_the_workqueue_layer_is_entered_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "threading_layer", lambda: "workqueue")
    inside = 0

    def region() -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        for _ in range(1000):
            pass
        inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: launch.guarded(region), range(200)))


def test_the_thread_limit_is_bounded_and_reaches_every_calling_thread() -> None:
    before = launch.thread_limit()
    try:
        assert launch.set_thread_limit(10**6) == numba.config.NUMBA_NUM_THREADS
        assert launch.set_thread_limit(0) == 1
        sizes: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: launch.guarded(lambda: sizes.append(numba.get_num_threads()))).result()
        launch.guarded(lambda: sizes.append(numba.get_num_threads()))
        assert sizes == [1, 1]
    finally:
        launch.set_thread_limit(before)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, 0.08838834764831845, 3.0e38, float("inf")])
def test_floats_pass_through_arguments(value: float) -> None:
    assert launch.float_bits(value) == int(torch.tensor(value).view(torch.int32))


FIRST = "from headrace.tensor.kernels.cpu.backend import KERNELS as k; import torch; k.gated_activation(torch.randn(2, 8), 'silu')"
THEN = (
    "from headrace.tensor.kernels.cpu.linear import StripLinear; import torch; x = torch.randn(3, 64); w = torch.randn(64, 64);"
    "assert (StripLinear.pack(w, None)(x) - x @ w.T).abs().max() < 1e-3"
)


@pytest.mark.slow
@pytest.mark.process
def test_code_compiled_beside_a_cached_region_can_be_loaded_later(tmp_path: Path) -> None:
    """Numba forgets to wake its threads for such code: the third process used to jump to address 0."""
    for program in (FIRST, THEN, THEN):
        environment = {"PATH": "/usr/bin:/bin", "HEADRACE_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr


HASWELL = (
    "+64bit,+avx,+avx2,+fma,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+f16c,+bmi,+bmi2,+popcnt,+cmov,+cx8,+cx16,+fxsr,+mmx,+lzcnt,+movbe"
)
NEHALEM = "+64bit,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cmov,+cx8,+cx16,+fxsr,+mmx"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "features", "lanes"), [("haswell", HASWELL, 8), ("nehalem", NEHALEM, 4)])
@pytest.mark.process
def test_kernels_hold_on_cpus_with_narrower_registers(name: str, features: str, lanes: int, tmp_path: Path) -> None:
    import os
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("compiles for older x86-64 CPUs")
    here = Path(__file__).parent
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "HEADRACE_CACHE_DIR": str(tmp_path / "cache")}
    check = f"from headrace.tensor.kernels.cpu.jit.vector_ir import LANES; assert LANES == {lanes}, LANES"
    subprocess.run([sys.executable, "-c", check], env=environment, check=True, timeout=60)
    files = [str(here / f"test_{part}.py") for part in ("attention", "elementwise", "linear", "packing", "integer_packing")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
