"""Writes the process log to stderr: short lines on a terminal, one JSON object per event elsewhere.

An event is always one line: no traceback or client's text can forge one or colour a terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from datetime import UTC, datetime
from enum import StrEnum
from io import FileIO
from typing import TextIO

from headrace.core.clock import Clock

CLOSE_S = 2.0


class LineWriter:
    """num_dropped  lines that were not written whole"""

    def __init__(self, file: FileIO, *, name: str, max_queued: int) -> None:
        """file        closed when the thread ends
        max_queued  one more line is dropped and counted
        """
        self.num_dropped = 0
        self._max_queued = max_queued
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(file,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._queue.qsize() >= self._max_queued

    def write(self, line: str) -> None:
        """Never blocks."""
        if self.is_full:
            self.num_dropped += 1
        else:
            self._queue.put(line)

    def flush(self) -> None:
        """The thread writes each line at once."""

    def close(self, timeout_s: float = CLOSE_S) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self, file: FileIO) -> None:
        is_torn = False
        with file:
            while (line := self._queue.get()) is not None:
                data = line.encode("utf-8", "backslashreplace")
                num_left = _num_left(file, b"\n" + data if is_torn else data)
                is_torn = 0 < num_left < len(data) or (is_torn and num_left > 0)
                self.num_dropped += num_left > 0


def _num_left(file: FileIO, line: bytes) -> int:
    """Bytes that could not be written: they are not tried again."""
    data = memoryview(line)
    try:
        while data:
            num_written = file.write(data)
            if num_written is None:  # a non-blocking pipe whose reader has stopped
                break
            data = data[num_written:]
    except OSError:  # the disk is full, or the reader has closed
        pass
    return len(data)


ENVIRONMENT = "HEADRACE_LOG_FORMAT"
"""This variable names the log format where nothing else does."""

MAX_QUEUED = 1_000


class LogFormat(StrEnum):
    AUTO = "auto"
    TEXT = "text"
    JSON = "json"

    def on(self, is_terminal: bool) -> LogFormat:
        if self is not LogFormat.AUTO:
            return self
        return LogFormat.TEXT if is_terminal else LogFormat.JSON


class LogHandler(logging.StreamHandler[TextIO | LineWriter]):
    """A failure to write names the error's type alone: a whole chain of exceptions may quote a prompt."""

    _num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(self.stream, LineWriter) and not self.stream.is_full and (dropped := self.stream.num_dropped) > self._num_dropped:
            lost, self._num_dropped = dropped - self._num_dropped, dropped
            super().emit(logging.LogRecord(__name__, logging.WARNING, "", 0, "%d lines of the log were lost here", (lost,), None))
        super().emit(record)

    def close(self) -> None:
        if isinstance(self.stream, LineWriter):
            self.stream.close()
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        failure = sys.exc_info()[0]
        with contextlib.suppress(OSError, ValueError):
            print(f"a line of {printable(record.name)} could not be logged: {failure and failure.__name__}", file=sys.__stderr__)


def set_up_logging(log_format: LogFormat | None = None, stream: TextIO | None = None, *, process: str = "") -> None:
    """stream      None: stderr, written by a thread of its own"""
    stream = stream or sys.stderr
    chosen = (log_format or environment_format()).on(stream.isatty())
    is_own = stream is sys.__stderr__
    handler = LogHandler(LineWriter(FileIO(2, "w", closefd=False), name="log", max_queued=MAX_QUEUED) if is_own else stream)
    handler.setFormatter(JsonLine(process) if chosen is LogFormat.JSON else TextLine(process, is_short=stream.isatty()))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


def environment_format() -> LogFormat:
    try:
        return LogFormat(os.environ.get(ENVIRONMENT, LogFormat.AUTO))
    except ValueError:
        return LogFormat.AUTO


def printable(text: str) -> str:
    """Every control character becomes an escape, newlines of tracebacks too."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock_time(unix_s: float, *, is_short: bool) -> str:
    return time.strftime("%H:%M:%S" if is_short else "%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


class TextLine(logging.Formatter):
    """TIME [process] LEVEL: message, the level left out at INFO and below."""

    def __init__(self, process: str = "", *, is_short: bool = True) -> None:
        super().__init__("%(message)s")
        self._process = process
        self._is_short = is_short

    def format(self, record: logging.LogRecord) -> str:
        process = getattr(record, "child", self._process)
        words = [clock_time(record.created, is_short=self._is_short), f"[{process}]" if process else ""]
        words += [f"{record.levelname}:" if record.levelno > logging.INFO else "", super().format(record)]
        return printable(" ".join(word for word in words if word))


class JsonLine(logging.Formatter):
    """Entries of a mapping `facts`, given in `extra`, become keys."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        process = getattr(record, "child", self._process)
        entry: dict[str, object] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            **({"process": process} if process else {}),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        text = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        if text:
            entry["exception"] = text
        return json.dumps(entry, ensure_ascii=True, separators=(",", ":"), default=str)


def relay(line: str, child: str) -> None:
    """A child's log event keeps its time and level; any other line is logged as it is."""
    try:
        event = json.loads(line)
        record = logging.LogRecord(
            str(event["logger"]), logging.getLevelNamesMapping()[event["level"].upper()], "", 0, str(event["message"]), None, None
        )
        record.created = datetime.fromisoformat(event["time"]).timestamp()
        record.exc_text = event.get("exception")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        record = logging.LogRecord(__name__, logging.INFO, "", 0, line, None, None)
    record.child = child
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


INTERVAL_S = 10.0
"""Seconds between lines: an outage of an hour leaves 360."""


class LimitedLog:
    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._last_at = -math.inf
        self._num_left_out = 0

    def info(self, message: str, *args: object) -> None:
        now = self._clock()
        if now - self._last_at < INTERVAL_S:
            self._num_left_out += 1
            return
        more = f" (and {self._num_left_out} more since the last such line)" if self._num_left_out else ""
        self._last_at, self._num_left_out = now, 0
        self._log.info(f"{message}%s", *args, more)
