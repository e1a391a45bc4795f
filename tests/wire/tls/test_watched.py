"""Tests that changed certificates are loaded beside their users: once each, again after a failure, and by one thread at most."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tls_kit import authority, write_certificates

from headrace.core import regular_files
from headrace.core.errors import ConfigError
from headrace.core.regular_files import READ_S, FileThread
from headrace.gateway.http.config import HttpTls
from headrace.gateway.http.tls import ServerCertificate
from headrace.wire.tls.files import LOOK_S, Certificates, TlsFiles, TlsRole, Watched, _stamp_of

pytestmark = pytest.mark.pure

SITE = authority()
Value = TypeVar("Value")
NOT_USED = "changed certificates are not used"


class Clock:
    """Stands still between two calls of `looked`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def looked(self, files: Watched[Value]) -> Value:
        """What a connection gets that comes when the files have been looked at."""
        self.now += LOOK_S
        files.current()
        files._looker.join()
        return files.current()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def gateway_files(folder: Path) -> TlsFiles:
    return write_certificates(folder, SITE, TlsRole.GATEWAY)


WATCHED: list[Callable[[TlsFiles, Clock], Watched[Any]]] = [
    lambda files, clock: Certificates(files, TlsRole.GATEWAY, clock),
    lambda files, clock: ServerCertificate(HttpTls(certificate=files.certificate, key=files.key), clock),
]
each_kind = pytest.mark.parametrize("watch", WATCHED, ids=["wire", "port"])


@each_kind
def test_changed_files_are_used_after_the_next_look_and_unchanged_ones_are_not_loaded(
    tmp_path: Path, clock: Clock, watch: Callable[[TlsFiles, Clock], Watched[Any]]
) -> None:
    files = watch(gateway_files(tmp_path), clock)
    first = files.current()
    assert clock.looked(files) is first
    gateway_files(tmp_path)
    assert files.current() is first, "the files are not looked at for every connection"
    clock.now += 3600.0
    assert files.current() is first, "no connection waits for a look"
    files._looker.join()
    assert files.current() is not first


@each_kind
def test_files_that_do_not_fit_yet_leave_the_last_good_ones_and_are_logged_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, watch: Callable[[TlsFiles, Clock], Watched[Any]]
) -> None:
    """A renewal writes its files one after another: between them the key does not fit."""
    at = gateway_files(tmp_path / "a")
    files = watch(at, clock)
    good = files.current()
    new = gateway_files(tmp_path / "b")
    os.replace(new.certificate, at.certificate)
    assert [clock.looked(files) for _ in range(3)] == [good] * 3
    assert caplog.text.count(NOT_USED) == caplog.text.count("does not fit") == 1
    os.replace(new.key, at.key)
    assert clock.looked(files) is not good


@each_kind
def test_a_renewed_key_is_used_once_its_mode_is_what_the_message_asks_for(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, watch: Callable[[TlsFiles, Clock], Watched[Any]]
) -> None:
    at = gateway_files(tmp_path)
    files = watch(at, clock)
    good = files.current()
    gateway_files(tmp_path)
    os.chmod(at.key, 0o644)
    assert clock.looked(files) is good
    assert f"chmod 600 {at.key}" in caplog.text
    os.chmod(at.key, 0o600)
    assert clock.looked(files) is not good


def test_a_change_of_mode_alone_is_a_change(tmp_path: Path, clock: Clock) -> None:
    loads: list[None] = []
    at = tmp_path / "file"
    at.touch(0o600)
    files = Watched((str(at),), lambda: loads.append(None), clock)
    clock.looked(files)
    assert len(loads) == 1
    os.chmod(at, 0o640)
    clock.looked(files)
    clock.looked(files)
    assert len(loads) == 2


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EIO])
@each_kind
def test_what_failed_for_want_of_something_else_is_tried_again(
    tmp_path: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    watch: Callable[[TlsFiles, Clock], Watched[Any]],
) -> None:
    """The files stay as they are, and what they could not be loaded for passes."""
    files = watch(gateway_files(tmp_path), clock)
    good = files.current()
    gateway_files(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(regular_files, "_read", refuse)
        assert [clock.looked(files) for _ in range(3)] == [good] * 3
    assert caplog.text.count(NOT_USED) == caplog.text.count(os.strerror(number)) == 1
    assert clock.looked(files) is not good


def test_a_fault_that_comes_again_is_logged_again(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    at = gateway_files(tmp_path)
    files = Certificates(at, TlsRole.GATEWAY, clock)
    for _ in range(2):
        os.unlink(at.key)
        clock.looked(files)
        gateway_files(tmp_path)
        clock.looked(files)
    assert caplog.text.count(NOT_USED) == 2


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Have a call of the file system wait until the test ends."""
    answered = threading.Event()

    def hang_at(name: str) -> None:
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, **named: answered.wait() and call(*args, **named))

    yield hang_at
    answered.set()
    for thread in threading.enumerate():
        if isinstance(thread, FileThread):
            thread.join()


@pytest.mark.parametrize("name", ["stat", "open"])
@each_kind
def test_a_mount_that_hangs_costs_one_thread_and_no_connection_waits(
    tmp_path: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    hang: Callable[[str], None],
    name: str,
    watch: Callable[[TlsFiles, Clock], Watched[Any]],
) -> None:
    """Each look left two threads behind for ever, or the event loop waited for three files."""
    files = watch(gateway_files(tmp_path), clock)
    good = files.current()
    gateway_files(tmp_path)
    hang(name)
    for _ in range(200):
        clock.now += LOOK_S
        assert files.current() is good
    assert sum(isinstance(thread, FileThread) for thread in threading.enumerate()) == 1
    assert clock.now > READ_S
    assert caplog.text.count("the file system does not answer") == 1


def test_a_connection_goes_on_where_no_thread_can_be_started(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Certificates(gateway_files(tmp_path), TlsRole.GATEWAY, clock)
    good = files.current()
    gateway_files(tmp_path)

    def refuse(self: FileThread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(FileThread, "start", refuse)
        for _ in range(3):
            clock.now += LOOK_S
            assert files.current() is good
    assert caplog.text.count("can't start new thread") == 1
    assert clock.looked(files) is not good


def test_a_change_while_the_files_are_loaded_is_seen_at_the_next_look(tmp_path: Path, clock: Clock) -> None:
    at = tmp_path / "file"
    at.write_text("first")

    def load() -> str:
        text = at.read_text()
        at.write_text("second")
        return text

    files = Watched((str(at),), load, clock)
    assert files.current() == "first"
    assert clock.looked(files) == "second"


def test_files_that_cannot_be_loaded_at_the_start_are_the_callers_error(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise ConfigError("tls", "is missing")

    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError, match="tls: is missing"):
        Watched(("/nowhere/file",), refuse, clock)
    assert caplog.text == ""
    assert _stamp_of(("/nowhere/file",)) == (None,)
