"""Threads from cores and cgroups, read from made-up proc and sys folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.tensor.host.openmp import prepare_openmp
from headrace.tensor.host.threads import CpuShare, count_cores, plan_threads, read_cpu_share, read_quota

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


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        # The tightest of a cgroup and those above it.
        (
            {
                "proc/self/cgroup": "0::/user.slice/job\n",
                "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/user.slice/job/cpu.max": "400000 100000\n",
            },
            1.5,
        ),
        # Inside a container the path may lead out of its own view.
        ({"proc/self/cgroup": "0::/../../docker/abc\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0),
        # Version 1: controllers mounted together, or under a plain name.
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpuacct,cpu:/docker/abc\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0"}, None),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    _write(tmp_path, files)
    assert read_quota(tmp_path) == quota


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
    from headrace.tensor.kernels import load_backend
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
