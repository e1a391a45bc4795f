"""Tests the number of threads from cores and cgroups, read from made-up proc and sys folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.tensor.host.openmp import prepare_openmp
from headrace.tensor.host.threads import CpuShare, count_cores, plan_threads, read_cpu_share

pytestmark = pytest.mark.pure


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("share", "threads", "why"),
    [
        (CpuShare(8, 8, None), 8, "8 cores"),
        (CpuShare(8, 4, None), 4, "4 cores of 8 hardware threads"),
        (CpuShare(64, 32, 2.0), 2, "the cgroup allows 2 CPUs"),
        (CpuShare(64, 32, 2.9), 2, "the cgroup allows 2.9 CPUs"),
        (CpuShare(4, 4, 0.5), 1, "the cgroup allows 0.5 CPUs"),
        (CpuShare(4, 4, 16.0), 4, "4 cores"),
    ],
)
def test_threads_follow_cores_and_quota(share: CpuShare, threads: int, why: str) -> None:
    plan = plan_threads(None, share)
    assert (plan.num_threads, plan.reason) == (threads, why)


def test_a_number_that_was_asked_for_is_taken_or_refused() -> None:
    share = CpuShare(8, 4, 2.0)
    assert plan_threads(6, share).num_threads == 6
    for wrong in (0, -1, 9):
        with pytest.raises(ConfigError, match=r"num_threads: .* is outside 1\.\.8"):
            plan_threads(wrong, share)


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2"}
    _write(tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in siblings.items()})
    assert count_cores(tmp_path, [0, 1, 4, 5]) == 2
    assert count_cores(tmp_path, [0, 2]) == 2
    assert count_cores(tmp_path, [7, 8]) == 2, "unknown CPUs count as cores"


def test_this_machine_can_be_read() -> None:
    share = read_cpu_share()
    assert 1 <= share.cores <= share.cpus
    assert 1 <= plan_threads(None).num_threads <= share.cpus


def test_a_plan_reaches_torch_and_the_kernels() -> None:
    pytest.importorskip("numba")
    from headrace.tensor.backends import load_backend
    from headrace.tensor.kernels.cpu.jit import launch

    backend = load_backend("numba")
    torch_threads, limit = torch.get_num_threads(), launch.thread_limit()
    try:
        assert backend.limit_threads(plan_threads(1).num_threads) in ("omp", "tbb", "workqueue")
        assert (torch.get_num_threads(), launch.thread_limit()) == (1, 1)
    finally:
        torch.set_num_threads(torch_threads)
        launch.set_thread_limit(limit)


def test_openmp_threads_are_told_to_spin_briefly_unless_their_owner_decided() -> None:
    environ: dict[str, str] = {}
    assert "briefly" in prepare_openmp(environ, torch_is_loaded=False)
    assert environ == {"GOMP_SPINCOUNT": "1000"}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        decided = {name: "7"}
        assert f"{name}=7" in prepare_openmp(decided, torch_is_loaded=False)
        assert decided == {name: "7"}


def test_openmp_cannot_be_told_once_torch_is_there() -> None:
    environ: dict[str, str] = {}
    assert "torch was imported before" in prepare_openmp(environ)
    assert environ == {}
