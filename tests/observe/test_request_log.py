"""Tests the request log: one line per request, whatever a client puts into it; lines are lost before requests are held up."""

from __future__ import annotations

import json
import os
import pty
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from finished import finished
from patience import PATIENCE_S

from headrace.observe import request_log
from headrace.observe.finished_request import Outcome
from headrace.observe.logs import LogFormat
from headrace.observe.request_log import MAX_QUEUED, RequestLog, line_of, text_of

pytestmark = pytest.mark.socket


@pytest.mark.pure
def test_line_is_json_without_what_is_not_known() -> None:
    line = json.loads(line_of(finished(status=200, ttft_s=0.123456789)))
    assert line["ttft_s"] == 0.123457
    assert "error" not in line


@pytest.mark.pure
@pytest.mark.parametrize("path", ["/a\r\nSet-Cookie: x", "/\x1b[31mred", "/\u2028", "/\ud800", '/"},{"x":"'])
def test_line_stays_one_line_of_ascii(path: str) -> None:
    line = line_of(finished(path=path))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["path"] == path


def test_lines_reach_the_file_in_order(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log.jsonl"))
    for number in range(50):
        log.write(finished(status=number))
    log.close(PATIENCE_S)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == list(range(50))
    assert log.num_dropped == 0


def write_lines(target: str, worker: int, num_lines: int) -> None:
    log = RequestLog(target, worker=worker)
    for number in range(num_lines):
        log.write(finished(status=number, reason="x" * (number * 37 % 3900), path="/" + "\U0001f600" * 199))
    log.close(PATIENCE_S)
    assert log.num_dropped == 0


@pytest.mark.parametrize("is_pipe", [True, False])
def test_lines_of_several_processes_stay_whole(tmp_path: Path, is_pipe: bool) -> None:
    """Each log has its own descriptor and thread, as in a process of its own: the system appends whole lines, or would not."""
    target = tmp_path / "log"
    if is_pipe:
        os.mkfifo(target)
        both_ends = os.open(target, os.O_RDWR)  # so that neither a late writer nor the reader waits for the other end
    else:
        target.touch()
    with target.open() as reader, ThreadPoolExecutor(4) as pool:
        reading = pool.submit(reader.read) if is_pipe else None
        for writing in [pool.submit(write_lines, str(target), worker, 300) for worker in range(3)]:
            writing.result()
        if is_pipe:
            os.close(both_ends)
        text = reading.result() if reading is not None else reader.read()
    found = [json.loads(line) for line in text.splitlines()]
    assert sorted((line["worker"], line["status"]) for line in found) == [(worker, number) for worker in range(3) for number in range(300)]
    assert {"reason" in line for line in found} == {True, False}, "a line that is too long for a pipe lost what made it so"


def test_lines_that_cannot_be_written_are_counted() -> None:
    log = RequestLog("/dev/full")
    for _ in range(3):
        log.write(finished())
    log.close(PATIENCE_S)
    assert log.num_dropped == 3


def test_a_stopped_reader_costs_lines_not_requests(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = RequestLog(str(pipe))
    for _ in range(MAX_QUEUED + 2000):  # the pipe takes about 64 KiB, the queue its share
        log.write(finished(detail="x" * 60))
    assert log.num_dropped > 0
    os.close(reader)  # the writer's next write fails instead of waiting
    log.close(PATIENCE_S)


def test_a_full_pipe_that_does_not_block_costs_lines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer tried again for as long as the reader was stopped: a core, and the interpreter's lock."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    monkeypatch.setitem(request_log.STREAMS, "stdout", writing)
    log = RequestLog("stdout", LogFormat.JSON)
    for _ in range(1000):
        log.write(finished(detail="x" * 200))
    log.close(PATIENCE_S)
    assert log.num_dropped > 0
    assert log.num_dropped < 1000
    os.close(reading)
    os.close(writing)


def test_no_log_is_no_thread() -> None:
    log = RequestLog("off")
    log.write(finished())
    log.close(PATIENCE_S)
    assert log.num_dropped == 0


@pytest.mark.pure
def test_the_version_is_that_of_the_model_that_answered() -> None:
    asked = finished(model="big", version="fp_big")
    assert (asked.model, asked.version) == ("big", "fp_big")
    answered = asked._replace(answered=asked.answered._replace(model="small"))
    assert (answered.model, answered.version) == ("small", None)


@pytest.mark.pure
def test_time_is_a_timestamp() -> None:
    assert json.loads(line_of(finished(time=1_795_399_722.6589)))["time"] == "2026-11-23T02:08:42.658Z"


COMPLETE = {"status": 200, "outcome": Outcome.COMPLETED, "model": "m", "prompt_tokens": 5, "completion_tokens": 64, "ttft_s": 0.05}
REFUSED = {"status": 400, "outcome": Outcome.REFUSED, "error": "invalid_value", "param": "top_p", "reason": "0 < top_p <= 1"}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (COMPLETE, "200 m, 5 tokens in, 64 out, first after 0.050 s, 1.500 s (abc)"),
        (REFUSED, "400 refused invalid_value: top_p: expected 0 < top_p <= 1, 1.500 s (abc)"),
        ({"status": 500, "error": "internal_error", "detail": "KeyError"}, "500 failed internal_error: KeyError, 1.500 s (abc)"),
        ({"status": 503, "error": "unavailable", "reason": "no room"}, "503 failed unavailable: no room, 1.500 s (abc)"),
    ],
)
def test_people_read_a_short_line(fields: dict[str, object], said: str) -> None:
    text = text_of(finished(latency_s=1.5, **fields), is_short=True)
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/chat/completions (.*)", text)
    assert text.split(" ", 3)[3] == said


@pytest.mark.pure
@pytest.mark.parametrize("path", ["/a\r\nSet-Cookie: x", "/\x1b[31mred", "/\u2028", "/\ud800"])
def test_a_short_line_stays_one_line(path: str) -> None:
    assert text_of(finished(path=path, reason=path, detail=path, model=path, method=path), is_short=True).isprintable()


@pytest.mark.parametrize(("log_format", "is_json"), [(LogFormat.AUTO, False), (LogFormat.TEXT, False), (LogFormat.JSON, True)])
def test_a_terminal_gets_text_unless_json_is_asked_for(monkeypatch: pytest.MonkeyPatch, log_format: LogFormat, is_json: bool) -> None:
    """A real terminal in the place of stderr."""
    ours, terminal = pty.openpty()
    monkeypatch.setitem(request_log.STREAMS, "stderr", terminal)
    log = RequestLog("stderr", log_format)
    log.write(finished(**COMPLETE))
    log.close(PATIENCE_S)
    written = os.read(ours, 4096).decode()
    os.close(terminal)
    os.close(ours)
    assert written.startswith("{") == is_json


@pytest.mark.parametrize(("log_format", "is_json"), [(LogFormat.AUTO, True), (LogFormat.TEXT, False), (LogFormat.JSON, True)])
def test_a_pipe_gets_json_unless_text_is_asked_for(monkeypatch: pytest.MonkeyPatch, log_format: LogFormat, is_json: bool) -> None:
    ours, theirs = os.pipe()
    monkeypatch.setitem(request_log.STREAMS, "on", theirs)
    log = RequestLog("on", log_format)
    log.write(finished(**COMPLETE))
    log.close(PATIENCE_S)
    os.close(theirs)
    with open(ours, encoding="utf-8") as pipe:
        written = pipe.read()
    assert written.startswith("{") == is_json
    assert is_json or re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d POST ", written), "a file is read on another day"


def test_a_file_is_json_whatever_is_asked_for(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"), LogFormat.TEXT)
    log.write(finished(**COMPLETE))
    log.close(PATIENCE_S)
    assert json.loads((tmp_path / "log").read_text())["outcome"] == "completed"
