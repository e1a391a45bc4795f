"""Tests log lines for people and for machines: one per event whatever is in it, with its time, and a child's events under its name."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from datetime import UTC, datetime

import pytest

from headrace.observe.logs import ENVIRONMENT, INTERVAL_S, JsonLine, LimitedLog, LogFormat, TextLine, relay, set_up_logging, timestamp

pytestmark = pytest.mark.pure

HOSTILE = "line one\nFAKE line two \x1b[31m\u2028\u202e"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def failure() -> logging.LogRecord:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        return logging.LogRecord("headrace.x", logging.ERROR, __file__, 1, "failed", (), (type(error), error, error.__traceback__))


def test_text_escapes_tracebacks() -> None:
    text = TextLine().format(failure())
    assert text.isprintable()
    assert "ValueError: line one\\nFAKE line two \\x1b[31m\\u2028\\u202e" in text


def test_json_holds_the_traceback_in_one_ascii_line() -> None:
    line = JsonLine().format(failure())
    assert line.isascii()
    assert line.isprintable()
    event = json.loads(line)
    assert (event["level"], event["logger"], event["message"]) == ("error", "headrace.x", "failed")
    assert event["exception"].endswith(f"ValueError: {HOSTILE}")


def test_time_is_utc_for_machines_and_local_for_people() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 1, "x", (), None)
    record.created = 1_795_399_722.6589
    assert json.loads(JsonLine().format(record))["time"] == timestamp(record.created) == "2026-11-23T02:08:42.658Z"
    assert TextLine().format(record) == time.strftime("%H:%M:%S x", time.localtime(record.created))
    assert TextLine(is_short=False).format(record) == time.strftime("%Y-%m-%d %H:%M:%S x", time.localtime(record.created))


@pytest.mark.parametrize(
    ("log_format", "environment", "stream", "is_json"),
    [
        (LogFormat.AUTO, "text", io.StringIO, True),
        (LogFormat.AUTO, "json", Terminal, False),
        (LogFormat.JSON, "text", Terminal, True),
        (LogFormat.TEXT, "json", io.StringIO, False),
        (None, "", io.StringIO, True),
        (None, "text", io.StringIO, False),
        (None, "json", Terminal, True),
        (None, "nonsense", Terminal, False),
    ],
)
def test_who_decides_on_the_form(
    monkeypatch: pytest.MonkeyPatch, log_format: LogFormat | None, environment: str, stream: type[io.StringIO], is_json: bool
) -> None:
    monkeypatch.setenv(ENVIRONMENT, environment)
    written = stream()
    set_up_logging(log_format, written)
    logging.getLogger("a").warning("b %d", 1)
    assert written.getvalue().startswith("{") == is_json
    assert json.loads(written.getvalue())["message"] == "b 1" if is_json else re.search(r"\d WARNING: b 1$", written.getvalue())


def test_a_childs_event_is_logged_with_its_own_time_and_level_under_its_name() -> None:
    written = io.StringIO()
    set_up_logging(LogFormat.JSON, written)
    record = failure()
    record.created = 1_795_399_722.6589
    relay(JsonLine().format(record), "tiny-0")
    assert json.loads(written.getvalue()) == {**json.loads(JsonLine().format(record)), "process": "tiny-0"}
    terminal = Terminal()
    set_up_logging(LogFormat.TEXT, terminal)
    relay(JsonLine().format(record), "tiny-0")
    assert re.match(r"\d\d:\d\d:\d\d \[tiny-0\] ERROR: failed\\nTraceback", terminal.getvalue())
    assert terminal.getvalue().count("\n") == 1


def test_a_childs_event_below_the_programs_level_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    record = logging.LogRecord("headrace.a", logging.INFO, "", 0, "loaded", None, None)
    for level, num_lines in ((logging.WARNING, 0), (logging.INFO, 1)):
        with caplog.at_level(level):
            relay(JsonLine().format(record), "rank 1")
        assert len(caplog.records) == num_lines


@pytest.mark.parametrize(
    "line",
    [
        "Fatal Python error: Aborted",
        "",
        "{",
        "[1]",
        "3",
        '{"message":"no level"}',
        '{"time":"soon","level":"info","logger":"a","message":"b"}',
        '{"time":"2026-11-23T02:08:42.658Z","level":"loud","logger":"a","message":"b"}',
        '{"time":5,"level":5,"logger":5,"message":5}',
        "\x1b[2Jcleared %s %d",
    ],
)
def test_what_a_child_prints_beside_its_log_is_a_line_as_it_is(line: str) -> None:
    written = io.StringIO()
    set_up_logging(LogFormat.JSON, written)
    relay(line, "tiny-0")
    event = json.loads(written.getvalue())
    assert (event["message"], event["process"], event["level"]) == (line, "tiny-0", "info")
    assert abs(datetime.fromisoformat(event["time"]).timestamp() - datetime.now(UTC).timestamp()) < 60


def test_a_line_nested_too_deeply_is_a_line_like_others(caplog: pytest.LogCaptureFixture) -> None:
    """It ended the task that reads a child's output, and the child stopped at a full pipe."""
    with caplog.at_level(logging.INFO):
        relay("[" * 60_000, "r0")
    assert caplog.records


def test_a_line_that_cannot_be_written_shows_no_exceptions_texts(capfd: pytest.CaptureFixture[str]) -> None:
    """The standard handler prints the chain of the exceptions being handled, a prompt in one of their texts included."""
    broken = io.StringIO()
    set_up_logging(LogFormat.JSON, broken)
    broken.close()
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError:
        logging.getLogger("a").error("failed")
    assert capfd.readouterr().err == "a line of a could not be logged: ValueError\n"


def test_a_storm_of_equal_events_is_one_line_an_interval_that_counts_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = LimitedLog(logging.getLogger("storm"), lambda: now)
    with caplog.at_level(logging.INFO, logger="storm"):
        for _ in range(1280):
            log.info("a request falls back: %s", "100 % full")
            now += 1 / 64
        now += INTERVAL_S
        log.info("a request falls back: %s", "gone")
        now += INTERVAL_S
        log.info("a request falls back: %s", "gone")
    assert [record.getMessage() for record in caplog.records] == [
        "a request falls back: 100 % full",
        "a request falls back: 100 % full (and 639 more since the last such line)",
        "a request falls back: gone (and 639 more since the last such line)",
        "a request falls back: gone",
    ]
