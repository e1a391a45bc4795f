"""Tests that only a regular file within its bounds is read, and that no file keeps its reader waiting."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core import regular_files
from headrace.core.regular_files import check_regular, in_time, read_file

pytestmark = pytest.mark.pure


def reason(path: Path | str, max_bytes: int = 100) -> str:
    with pytest.raises(OSError) as caught:
        read_file(path, max_bytes)
    assert caught.value.strerror
    return caught.value.strerror


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert read_file(file, 100) == b"x" * 100
    assert reason(file, 99) == "larger than 99 bytes"
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_file(str(link), 100) == b"x" * 100
    file.write_bytes(b"")
    assert read_file(file, 100) == b""


def link_to_fifo(path: str) -> None:
    os.mkfifo(f"{path}.fifo")
    os.symlink(f"{path}.fifo", path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "a FIFO, not a regular file"),
        (os.mkdir, "a directory, not a regular file"),
        (lambda path: os.symlink("/dev/zero", path), "a device, not a regular file"),
        (link_to_fifo, "a FIFO, not a regular file"),
        (lambda path: os.symlink(path, path), "Too many levels of symbolic links"),
        (lambda path: None, "No such file or directory"),
    ],
    ids=["FIFO", "folder", "device", "link to a FIFO", "loop", "nothing"],
)
def test_what_is_no_regular_file_is_named(tmp_path: Path, make: Callable[[str], None], words: str) -> None:
    path = tmp_path / "path"
    make(str(path))
    assert reason(path) == words
    with pytest.raises(OSError, match=words):
        check_regular(path)


@pytest.mark.socket
def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("path")
        assert reason("path") == "a socket, not a regular file"


def test_a_path_with_a_nul_is_an_error_of_the_file(tmp_path: Path) -> None:
    assert "null" in reason(f"{tmp_path}/a\0b")


def test_a_file_that_may_not_be_read_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so that the system's answer is played."""
    file = tmp_path / "file"
    file.write_bytes(b"x")

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    assert reason(file) == "Permission denied"


@pytest.mark.parametrize("more", [b"y", b"y" * 200])
def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 50)
    check = regular_files._check_kind
    looks = iter([False, True])

    def then_grow(info: os.stat_result) -> None:
        check(info)
        if next(looks):
            with file.open("ab") as writer:
                writer.write(more)

    monkeypatch.setattr(regular_files, "_check_kind", then_grow)
    assert reason(file) == ("it changed while it was read" if len(more) == 1 else "larger than 100 bytes")


def test_a_file_that_becomes_a_fifo_before_it_is_opened_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "path")
    monkeypatch.setattr(regular_files, "check_regular", lambda path: None)
    assert reason(tmp_path / "path") == "a FIFO, not a regular file"


@pytest.mark.parametrize("call", ["open", "fstat"])
def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Before it is opened the new one, afterwards the old one, and never a part of each."""
    file, new = tmp_path / "file", tmp_path / "new"
    file.write_bytes(b"old" * 9)
    new.write_bytes(b"new, and longer" * 3)
    real = getattr(os, call)

    def replaced(*args: object) -> object:
        if new.exists():
            new.replace(file)
        return real(*args)

    monkeypatch.setattr(os, call, replaced)
    assert read_file(file, 100) == (b"new, and longer" * 3 if call == "open" else b"old" * 9)
    assert read_file(file, 100) == b"new, and longer" * 3


def test_where_no_thread_can_be_started_the_file_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert reason(tmp_path / "file") == "can't start new thread"


@pytest.mark.parametrize("limit_s", [None, 0.01])
def test_a_file_system_that_does_not_answer_is_given_up(limit_s: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is left behind, and the process ends without it."""
    answered = threading.Event()
    monkeypatch.setattr(regular_files, "READ_S", 0.01 if limit_s is None else 3600.0)
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
            in_time(answered.wait, limit_s)
        [left] = [thread for thread in threading.enumerate() if thread.name == "file"]
        assert left.daemon
    finally:
        answered.set()
    left.join()


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("a bug"), KeyboardInterrupt()])
def test_every_error_of_the_thread_is_the_callers(error: BaseException) -> None:
    """Whatever was no OSError was called a file system that does not answer."""

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        in_time(fail)
