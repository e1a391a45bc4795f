"""Tests that compiled kernels are kept in a folder that is ours alone, or not at all, and that a disk that refuses them costs the time to
compile them again, and never the start.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from headrace.machine.cache_folder import cache_root, open_private
from headrace.tensor.kernels.cpu.jit import disk_cache, launch
from headrace.tensor.kernels.cpu.jit.disk_cache import DataFiles, Disk, KernelCache, choose_cache, code_key, keep

pytestmark = pytest.mark.pure


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


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """What the system answers a full disk with, nearly. Semaphores are files of 32 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def kernel(arguments: int, worker: int, workers: int) -> None:
    return


def test_a_full_disk_is_one_warning_and_the_kernels_run(disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch.threading_layer()  # its region has a place of its own, and is compiled before
    with files_of_at_most(64):
        launch.launch(launch.compile_kernel(kernel), [1], 2)
    [record] = caplog.records
    assert record.getMessage().startswith(f"compiled kernels cannot be kept in {tmp_path}")
    assert "File too large" in record.getMessage()
    assert "HEADRACE_CACHE_DIR" in record.getMessage()
    assert disk.refusal is not None
    assert disk.refusal.startswith("compiled kernels cannot be kept"), "what is shown at start says so too"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_disk_with_room_keeps_them_without_a_word(disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch.launch(launch.compile_kernel(kernel), [1], 2)
    assert (disk.refusal, caplog.records) == (None, [])
    assert list(tmp_path.rglob("*.nbc"))


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


def test_what_another_process_compiles_is_waited_for_in_a_pure_test_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two processes of the tests compile a kernel at once, the test of the later one may not fail for its wait."""
    answers = iter((False, True))
    monkeypatch.setattr(disk_cache, "_locked", lambda _: next(answers))
    with disk_cache.only_here(tmp_path / "kernel.lock"):
        assert next(answers, None) is None


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        chosen = choose_cache(tmp_path / "cache", "key")
    finally:
        os.umask(previous)
    assert chosen.directory == tmp_path / "cache" / "numba" / "key"
    for path in (chosen.directory, chosen.directory.parent, tmp_path / "cache"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert str(chosen.directory) in chosen.reason


def test_an_existing_folder_that_others_may_read_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "numba" / "key"
    folder.mkdir(parents=True, mode=0o755)
    tmp_path.chmod(0o700)
    open_private(tmp_path, ("numba", "key"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, depth: int, mode: int) -> None:
    root = tmp_path / "cache"
    (root / "numba" / "key").mkdir(parents=True)
    chain = [root, root / "numba", root / "numba" / "key"]
    for path in chain:
        path.chmod(0o700)
    chain[depth].chmod(mode)
    chosen = choose_cache(root, "key")
    assert chosen.directory is None
    assert f"{chain[depth]} may be written by others (mode {mode:04o})" in chosen.reason
    assert "HEADRACE_CACHE_DIR" in chosen.reason


def test_a_link_is_refused(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    root.mkdir(mode=0o700)
    elsewhere.mkdir(mode=0o700)
    (root / "numba").symlink_to(elsewhere)
    chosen = choose_cache(root, "key")
    assert chosen.directory is None
    assert "a link" in chosen.reason


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    chosen = choose_cache(tmp_path / "cache", "key")
    assert chosen.directory is None
    assert f"belongs to user {owner}" in chosen.reason


def test_a_place_that_cannot_hold_folders_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert choose_cache(file / "cache", "key").directory is None


def test_the_key_changes_with_sources_and_cpu(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    key = code_key(tmp_path, "skylake +avx")
    assert key.startswith("skylake-")
    assert code_key(tmp_path, "skylake +avx") == key
    assert code_key(tmp_path, "skylake +avx2") != key
    (tmp_path / "b.py").write_text("")
    assert code_key(tmp_path, "skylake +avx") != key


def test_where_the_cache_is() -> None:
    assert cache_root({"HEADRACE_CACHE_DIR": "/a"}) == Path("/a")
    assert cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/headrace")
    assert cache_root({"XDG_CACHE_HOME": "b"}) == Path.home() / ".cache/headrace"
    assert cache_root({}) == Path.home() / ".cache" / "headrace"
