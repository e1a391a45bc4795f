"""One line per request, whatever a client puts into it; lines are lost before requests are held up."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from headrace.observe.logs import OneLine
from headrace.observe.request_log import MAX_QUEUED, RequestLog, RequestRecord


def record(**fields: object) -> RequestRecord:
    made = RequestRecord(request_id="abc", method="POST", path="/v1/chat/completions")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_line_is_json_without_what_is_not_known() -> None:
    line = json.loads(record(status=200, ttft_s=0.123456789).line())
    assert line["ttft_s"] == 0.123457
    assert "error" not in line


@pytest.mark.parametrize("path", ["/a\r\nSet-Cookie: x", "/\x1b[31mred", "/\u2028", "/\ud800", '/"},{"x":"'])
def test_line_stays_one_line_of_ascii(path: str) -> None:
    line = record(path=path).line()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["path"] == path


def test_lines_reach_the_file_in_order(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log.jsonl"))
    for number in range(50):
        log.write(record(status=number))
    log.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == list(range(50))
    assert log.num_dropped == 0


def test_lines_that_cannot_be_written_are_counted() -> None:
    log = RequestLog("/dev/full")
    for _ in range(3):
        log.write(record())
    log.close()
    assert log.num_dropped == 3


def test_a_stopped_reader_costs_lines_not_requests(tmp_path: Path) -> None:
    import os

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = RequestLog(str(pipe))
    for _ in range(MAX_QUEUED + 2000):  # the pipe takes about 64 KiB, the queue its share
        log.write(record(detail="x" * 60))
    assert log.num_dropped > 0
    os.close(reader)  # the writer's next write fails instead of waiting
    log.close()


def test_no_log_is_no_thread() -> None:
    log = RequestLog("none")
    log.write(record())
    log.close()
    assert log.num_dropped == 0


def test_process_log_escapes_tracebacks() -> None:
    try:
        raise ValueError("line one\nFAKE line two \x1b[31m")
    except ValueError as error:
        entry = logging.LogRecord("headrace", logging.ERROR, __file__, 1, "failed", (), (type(error), error, error.__traceback__))
    text = OneLine().format(entry)
    assert text.isprintable()
    assert "ValueError: line one\\nFAKE line two \\x1b[31m" in text
