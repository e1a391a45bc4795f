"""Memory that may be taken, read from files of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.memory import cgroup_available, cgroup_directories, parse_meminfo, read_available

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
    machine(tmp_path, {"memory.max": "100\n", "memory.current": "250\n"})
    assert cgroup_available(tmp_path) == 0


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    root = machine(tmp_path, {})
    (root / "proc/self/cgroup").unlink()
    assert read_available(root).num_bytes == 20 * GIB


def test_paths_cannot_climb_out_of_the_mount(tmp_path: Path) -> None:
    assert cgroup_directories("0::/../../etc\n", tmp_path) == [tmp_path / "etc", tmp_path]


@pytest.mark.parametrize(("text", "expected"), [("MemFree: 3 kB\n", 3072), ("", 0), ("MemFree: 3 kB\nMemAvailable: 5 kB\n", 5120)])
def test_older_kernels_say_less(text: str, expected: int) -> None:
    assert parse_meminfo(text) == expected


def test_this_machine_has_some_memory() -> None:
    assert read_available().num_bytes > 0
