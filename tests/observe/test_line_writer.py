"""Tests the thread that writes log lines: a reader that stops or a disk that fills costs lines, and never whoever logs."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from io import FileIO
from typing import Any

import pytest
from patience import PATIENCE_S, until

from headrace.observe import logs
from headrace.observe.logs import LineWriter, LogFormat, LogHandler, set_up_logging

pytestmark = pytest.mark.socket


class Failing(FileIO):
    """A file on a disk that fills: fails from the given byte on, until `is_full` is False."""

    def __init__(self, name: str, room: int) -> None:
        super().__init__(name, "w")
        self.room, self.is_full = room, True

    def write(self, data: Any) -> int:
        given = bytes(data)
        if self.is_full:
            given = given[: self.room]
            self.room -= len(given)
            if not given:
                raise OSError(errno.ENOSPC, "no space")
        return super().write(given)


def test_a_line_that_was_cut_short_does_not_swallow_the_next_one(tmp_path: object) -> None:
    path = f"{tmp_path}/log"
    file = Failing(path, room=3)
    lines = LineWriter(file, name="test", max_queued=10)
    lines.write("first\n")
    lines.write("second\n")
    until(lambda: lines.num_dropped == 2, PATIENCE_S)
    file.is_full = False
    lines.write("third\n")
    lines.close(PATIENCE_S)
    with open(path, encoding="ascii") as written:
        assert written.read() == "fir\nthird\n"


def test_a_pipe_that_nobody_reads_holds_up_nobody() -> None:
    reading, writing = os.pipe()
    lines = LineWriter(FileIO(writing, "w"), name="test", max_queued=100)
    for _ in range(1000):
        lines.write("x" * 1000 + "\n")
    assert lines.num_dropped >= 1000 - 100 - (1 << 20) // 1001, "what the pipe holds, and the queue"
    assert lines.is_full
    lines.close(0.0)
    os.close(reading)  # the thread's write fails, and it ends


def pipe_as_stderr(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(reading, writing): a pipe in the place of standard error. No fixture: pytest puts its own stream back before the test."""
    reading, writing = os.pipe()
    stream = open(writing, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # nothing to close
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "__stderr__", stream)
    monkeypatch.setattr(logs, "FileIO", lambda number, mode, closefd: FileIO(writing, mode, closefd=closefd))
    return reading, writing


def test_the_process_log_goes_on_when_its_reader_does_and_says_how_much_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pipe_as_stderr(monkeypatch)
    set_up_logging(LogFormat.JSON)
    for number in range(3000):
        logging.getLogger("a").info("%d %s", number, "x" * 500)  # would wait for ever
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, LogHandler)
    assert isinstance(handler.stream, LineWriter)
    dropped = handler.stream.num_dropped
    assert dropped > 0
    found: list[dict[str, str]] = []

    def read() -> None:
        with open(reading, encoding="ascii") as lines:
            found.extend(map(json.loads, lines))

    thread = threading.Thread(target=read)
    thread.start()
    until(handler.stream._queue.empty, PATIENCE_S)  # room for both lines
    logging.getLogger("a").info("again")
    handler.close()
    os.close(writing)
    thread.join(PATIENCE_S)
    messages = [each["message"] for each in found]
    lost = [int(message.split()[0]) for message in messages if message.endswith("lines of the log were lost here")]
    assert messages[-1] == "again"
    assert sum(lost) == dropped
    assert messages[0].startswith("0 x")
    assert len(found) == 3000 - dropped + len(lost) + 1


def test_the_end_of_the_log_is_written_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pipe_as_stderr(monkeypatch)
    set_up_logging(LogFormat.TEXT)
    for number in range(50):
        logging.getLogger("a").info("line %d", number)
    logging.getLogger().handlers[0].close()  # as logging.shutdown does
    os.close(writing)
    with open(reading, encoding="utf-8") as lines:
        assert [line.rsplit(" ", 1)[1] for line in lines] == [f"{number}\n" for number in range(50)]
