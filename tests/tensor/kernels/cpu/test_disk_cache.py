"""A disk that refuses compiled kernels costs the time to compile them again, and never the start."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from headrace.tensor.kernels.cpu.jit.disk_cache import DataFiles, Disk, KernelCache, keep


def run(folder: Path, *, max_file_bytes: int) -> subprocess.CompletedProcess[str]:
    """Compile and run a region in a process whose files may have so many bytes: what the system answers a full disk with, nearly."""
    program = (
        "import logging, resource\n"
        "logging.basicConfig(format='%(message)s')\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_file_bytes}, {max_file_bytes}))\n"
        "from headrace.tensor.kernels.cpu.jit import disk_cache, launch\n"
        "def kernel(arguments, worker, workers):\n"
        "    return\n"
        "launch.launch(launch.compile_kernel(kernel), [1], 2)\n"
        "print(disk_cache.DISK.refusal)\n"
    )
    path = folder.parent / "program.py"
    path.write_text(program)
    environment = {**os.environ, "HEADRACE_CACHE_DIR": str(folder)}
    return subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_a_full_disk_is_one_warning_and_the_kernels_run(tmp_path: Path) -> None:
    ended = run(tmp_path / "cache", max_file_bytes=64)  # semaphores are files of 32 bytes
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"compiled kernels cannot be kept in {tmp_path / 'cache'}")
    assert "File too large" in lines[0]
    assert "HEADRACE_CACHE_DIR" in lines[0]
    assert ended.stdout.startswith("compiled kernels cannot be kept")  # what is shown at start says so too
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_disk_with_room_keeps_them_without_a_word(tmp_path: Path) -> None:
    ended = run(tmp_path / "cache", max_file_bytes=1 << 30)
    assert (ended.returncode, ended.stderr, ended.stdout.strip()) == (0, "", "None")
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) >= 2


class Files:
    """Stands for the files of one function's cache, on a disk that fails."""

    def __init__(self, load_error: Exception | None = None, save_error: OSError | None = None) -> None:
        self.load_error, self.save_error, self.num_writes = load_error, save_error, 0

    def load(self, key: object) -> None:
        if self.load_error is not None:
            raise self.load_error

    def save(self, key: object, data: object) -> None:
        self.num_writes += 1
        if self.save_error is not None:
            raise self.save_error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    fresh = Disk()
    monkeypatch.setattr(KernelCache, "disk", fresh)
    return fresh


def doubled(value: int) -> int:
    return 2 * value


def compiled_with(files: Files) -> Any:
    from numba import njit

    function = njit(doubled)
    keep(function)
    function._cache._cache_file = files
    return function


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_whatever_the_disk_answers_the_function_is_compiled(
    number: int, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(OSError(number, os.strerror(number)), OSError(number, os.strerror(number)))
    assert compiled_with(files)(21) == 42
    assert disk.refusal is not None
    assert os.strerror(number) in disk.refusal
    assert str(tmp_path) in disk.refusal
    assert files.num_writes == 1
    assert compiled_with(files)(4) == 8
    assert files.num_writes == 1  # asked once
    assert len([record for record in caplog.records if "cannot be kept" in record.message]) == 1


def test_a_torn_file_is_made_anew(disk: Disk) -> None:
    files = Files(load_error=EOFError("Ran out of input"))
    assert compiled_with(files)(21) == 42
    assert disk.refusal is None
    assert files.num_writes == 1


def test_two_processes_that_write_at_once_write_no_code_under_the_others_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba gave both signatures the file number 1, and the second process ran the code of the first."""
    one, other = (DataFiles(str(tmp_path), "kernel", "stamp") for _ in range(2))
    write = one._save_data

    def write_after_the_other(name: str, data: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(other, "_load_index", dict)  # read before the first process wrote anything
            other.save("float", "code for float")
        write(name, data)

    monkeypatch.setattr(one, "_save_data", write_after_the_other)
    one.save("int", "code for int")
    started_next = DataFiles(str(tmp_path), "kernel", "stamp")
    assert [started_next.load(key) for key in ("int", "float")] == ["code for int", "code for float"]
