"""Tests standard descriptors that are closed or cannot be written, in the place of those of the tests' own process."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from headrace.cli.main import main
from headrace.machine.standard_streams import open_standard_descriptors, prepare_standard_streams

pytestmark = pytest.mark.socket


@contextmanager
def replaced(number: int, descriptor: int | None) -> Iterator[None]:
    """`descriptor` (None: nothing) stands as standard descriptor `number` until the block ends."""
    kept = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10)
    if descriptor is None:
        os.close(number)
    else:
        os.dup2(descriptor, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


@pytest.fixture
def as_started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `headrace` with streams as the interpreter makes them, and returns its exit code."""

    def run(*arguments: str) -> int:
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = open(number, "w", buffering=1 if number == 2 else -1, encoding="utf-8", closefd=False)  # noqa: SIM115  # not to be closed
            monkeypatch.setattr(sys, name, stream)
            monkeypatch.setattr(sys, f"__{name}__", stream)
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.close()  # as at the interpreter's end, which prints what goes wrong here
        return int(ended.value.code or 0)

    return run


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_a_descriptor_that_is_closed_is_taken_before_a_socket_takes_it(closed: tuple[int, ...], capfd: pytest.CaptureFixture[str]) -> None:
    null = os.stat(os.devnull)
    with ExitStack() as stack:
        for number in closed:
            stack.enter_context(replaced(number, None))
        open_standard_descriptors()
        found = {number: os.fstat(number).st_rdev for number in closed}
        inheritable = [os.get_inheritable(number) for number in closed]
    assert found == dict.fromkeys(closed, null.st_rdev)
    assert all(inheritable), "children are started with them"


def test_open_descriptors_stay_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    before = [os.fstat(number) for number in range(3)]
    open_standard_descriptors()
    assert [os.fstat(number).st_ino for number in range(3)] == [each.st_ino for each in before]


def test_streams_that_were_closed_at_the_start_can_be_used(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The interpreter leaves None in the place of each, and a print to None goes to stdout."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
        monkeypatch.setattr(sys, f"__{name}__", None)
    prepare_standard_streams()
    print("out")
    print("an \ud800 escape", file=sys.stderr)
    sys.stdout.flush()
    assert capfd.readouterr() == ("out\n", "an \\ud800 escape\n")
    assert sys.stdin is not None


def test_a_stream_that_a_caller_has_put_in_its_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout, sys.stderr
    prepare_standard_streams()
    assert (sys.stdout, sys.stderr) == before


def test_a_full_disk_is_one_line_and_an_exit_code(as_started: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb") as full, replaced(1, full.fileno()):
        assert as_started("version") == 1
    assert capfd.readouterr().err == "headrace: standard output cannot be written (No space left on device)\n"


def test_a_reader_that_left_is_an_exit_code_and_no_word(as_started: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with replaced(1, writing):
        assert as_started("version") == 1
    os.close(writing)
    assert capfd.readouterr().err == ""


def test_a_stopped_reader_of_a_pipe_that_does_not_block_is_named(as_started: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    with replaced(1, writing):
        assert as_started("version") == 1
    os.close(reading)
    os.close(writing)
    assert "standard output cannot be written (Resource temporarily unavailable)" in capfd.readouterr().err


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(as_started: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    """The print of the error raised an error of its own, and the exit code was 1."""
    with open("/dev/full", "wb") as full, replaced(1, full.fileno()), replaced(2, full.fileno()):
        assert as_started("serve", "/no/such/folder", "--port", "0") == 3
        assert as_started("no-such-command") == 2
