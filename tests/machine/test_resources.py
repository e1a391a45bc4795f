"""Tests which memory and CPU time may be used, read from files of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.machine.resources import (
    MachineShare,
    cpu_quota,
    folders,
    machine_bytes,
    memory_domains,
    parse_meminfo,
    read_available,
    share_of,
)

pytestmark = pytest.mark.pure

GIB = 1 << 30
MEMINFO = f"MemTotal: {32 << 20} kB\nMemFree: {2 << 20} kB\nMemAvailable:   {20 << 20} kB\nHugePages_Total:       0\n"


def machine(root: Path, files: dict[str, str], *, cgroup: str = "0::/\n", meminfo: str = MEMINFO) -> Path:
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    found = read_available(machine(tmp_path, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "12345\n"}))
    assert (found.num_bytes, found.source) == (20 * GIB, "MemAvailable")


def test_a_v2_limit_less_what_is_used_without_idle_cache(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\nfile 7\ninactive_file {GIB}\nactive_file 9\n",
    }
    found = read_available(machine(tmp_path, files))
    assert (found.num_bytes, found.source) == (6 * GIB, "the cgroup's limit")


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """A pod's limit binds its containers."""
    files = {
        "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/pod/box/memory.max": f"{6 * GIB}\n",
        "sys/fs/cgroup/pod/box/memory.current": f"{1 * GIB}\n",
    }
    assert read_available(machine(tmp_path, files, cgroup="0::/pod/box\n")).num_bytes == GIB


def test_a_v1_limit(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"cache 1\ntotal_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
    }
    assert read_available(machine(tmp_path, files, cgroup="5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")).num_bytes == 3 * GIB // 2


def test_a_container_that_sees_only_its_own_root(tmp_path: Path) -> None:
    """/proc names the host's path, the mount shows the container's directory as its root."""
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n"}
    assert read_available(machine(tmp_path, files, cgroup="4:memory:/docker/abc\n")).num_bytes == GIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "100\n", "sys/fs/cgroup/memory.current": "250\n"}
    assert read_available(machine(tmp_path, files)).num_bytes == 0


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    root = machine(tmp_path, {})
    (root / "proc/self/cgroup").unlink()
    assert read_available(root).num_bytes == 20 * GIB


def test_paths_cannot_climb_out_of_the_mount(tmp_path: Path) -> None:
    mount = tmp_path / "sys/fs/cgroup"
    assert list(folders("memory", machine(tmp_path, {}, cgroup="0::/../../etc\n"))) == [mount / "etc", mount]


def test_the_container_bounds_the_machine(tmp_path: Path) -> None:
    assert machine_bytes(tmp_path) > 1 << 20
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1048576\n")
    assert machine_bytes(tmp_path) == 1 << 20, "also where nothing says which cgroup it is"
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert machine_bytes(tmp_path) > 1 << 20


@pytest.mark.parametrize(("text", "expected"), [("MemFree: 3 kB\n", 3072), ("", 0), ("MemFree: 3 kB\nMemAvailable: 5 kB\n", 5120)])
def test_older_kernels_say_less(text: str, expected: int) -> None:
    assert parse_meminfo(text) == expected


def test_this_machine_has_some_memory() -> None:
    assert read_available().num_bytes > 0


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
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


NODES = {"sys/devices/system/node/node0/cpulist": "0-1,4-5\n", "sys/devices/system/node/node1/cpulist": "2-3,6-7\n"}


def test_cpus_are_grouped_by_the_memory_next_to_them(tmp_path: Path) -> None:
    root = machine(tmp_path, {**NODES, "sys/devices/system/node/node2/cpulist": "\n"})
    assert memory_domains(range(8), root) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert memory_domains([2, 3], root) == [[2, 3]], "the other CPUs may not be used"
    assert memory_domains([0, 3, 9], root) == [[0], [3], [9]]


def test_cpus_of_which_the_system_says_nothing_are_one_domain(tmp_path: Path) -> None:
    assert memory_domains([0, 2, 5], tmp_path) == [[0, 2, 5]]
    assert memory_domains([], tmp_path) == []


def test_a_share_of_the_cpus_keeps_to_one_domain(tmp_path: Path) -> None:
    """Ids alternate between the halves of cores: an equal part of the ids would be half of each domain."""
    root = machine(tmp_path, NODES)
    assert [share_of(range(8), MachineShare(number, 2), root) for number in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [share_of(range(8), MachineShare(number, 4), root) for number in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
