"""Writes one line per HTTP request: how the request ended, never what was said. No prompt, answer or key enters a record. The only header
that does is a client's own short x-request-id.

JSON in a file or a pipe, a short line on a terminal.

Several gateways may write to one file or pipe: a line is one write, and short enough to stay whole.

`LineWriter` writes the lines: a full disk or a stopped reader costs lines, which are counted, never a request.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from io import FileIO
from operator import attrgetter

from headrace.observe.logs import CLOSE_S, LineWriter, LogFormat, clock_time, printable, timestamp

MAX_QUEUED = 10_000
"""The most lines that wait to be written. One more is dropped and counted."""

MAX_DETAIL_CHARS = 200
MAX_LINE_BYTES = 4096
"""A longer line, its end included, is written without the fields that may be long. Linux keeps a write of at most this length whole in a
pipe to which several processes write (PIPE_BUF)."""
OFF = "off"
STREAMS = {"on": 1, "stderr": 2}
"""Targets that are no file, and their descriptors."""


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    """The answer was sent whole."""
    REFUSED = "refused"
    """The request was refused for a field, a key or a full queue. Nothing was computed for it."""
    CANCELLED = "cancelled"
    """The client left or did not read."""
    DEADLINE = "deadline"
    FAILED = "failed"
    """The server failed."""


@dataclass(slots=True, kw_only=True)
class RequestLogRecord:
    """Filled while a request runs. Fields that stay None are left out of the line.

    request_id         made by the server; client_request_id is the client's own x-request-id, if it was short and plain
    client             address of the client, as far as the proxies before it are trusted
    time               Unix seconds when it came; an ISO 8601 timestamp in the line
    error              code of the error body, if one was sent
    limit              label of the tenant's or key's limit that refused it
    param, reason      the field that an error is about, and the rule that it broke; never a value of the client's
    detail             for the operator: the exception's type where the server failed, whether another replica could have gone on where
                       one was lost, that a shutdown ended the request; at most MAX_DETAIL_CHARS
    worker             which gateway worker answered, where there are several
    version            of the model's weights: its system_fingerprint
    cache_tier         the cache that answered instead of an engine: "response" or "idempotency"
    continued_id       request id of the stream that this request continues; its completion_tokens are those that it added
    num_resumes        how often a sequence was submitted again because its engine was lost; None: never
    ttft_s, latency_s  seconds since arrival at the gateway
    tpot_s             seconds of each token after the first, the mean over the sequences
    queue_time_s, prefill_s, decode_s, preempted_s, stalled_s
                       stages of the first sequence in its engine (`core.update.StageSeconds`), which add up to its time there. All but the
                       first are known at its end; a sequence that a stop string ended, which the gateway finds, has none
    """

    request_id: str
    method: str
    path: str
    time: float = 0.0
    status: int = 0
    outcome: Outcome = Outcome.FAILED
    client: str | None = None
    client_request_id: str | None = None
    worker: int | None = None
    tenant: str | None = None
    user: str | None = None
    key_id: str | None = None
    model: str | None = None
    version: str | None = None
    replica: str | None = None
    stream: bool | None = None
    n: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    continued_id: str | None = None
    num_resumes: int | None = None
    cached_tokens: int | None = None
    cache_tier: str | None = None
    finish_reasons: list[str] | None = None
    seed: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    queue_time_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    preempted_s: float | None = None
    stalled_s: float | None = None
    latency_s: float | None = None
    error: str | None = None
    limit: str | None = None
    param: str | None = None
    reason: str | None = None
    detail: str | None = None

    def shortened(self) -> RequestLogRecord:
        """A copy without the fields that may be long."""
        return replace(self, reason=None, detail=None, finish_reasons=None)

    def line(self) -> str:
        """One line of ASCII JSON. It has no control characters, so that nothing a client sends can forge a second line."""
        values = zip(_NAMES, _values_of(self), strict=True)
        kept = {name: round(value, 6) if isinstance(value, float) else value for name, value in values if value is not None}
        kept["time"] = timestamp(self.time)
        return _encode(kept)

    def text(self, *, is_short: bool) -> str:
        """The main fields as text for people. is_short: the time without the day, for a terminal"""
        words = [clock_time(self.time, is_short=is_short), self.method, self.path, str(self.status)]
        words += [self.outcome] if self.outcome is not Outcome.COMPLETED else []
        words += [", ".join(part for part in (self._why(), self._cost()) if part), f"({self.request_id})"]
        return printable(" ".join(word for word in words if word))

    def _why(self) -> str:
        """Error, reason and detail of a request that was not completed, as text."""
        about = f"{self.param}: expected {self.reason}" if self.param and self.reason else self.reason or self.param
        return ": ".join(word for word in (self.error, about, self.detail) if word)

    def _cost(self) -> str:
        parts = [self.model or ""]
        if self.completion_tokens is not None:
            parts.append(f"{self.prompt_tokens} tokens in, {self.completion_tokens} out")
        if self.ttft_s is not None:
            parts.append(f"first after {self.ttft_s:.3f} s")
        if self.latency_s is not None:
            parts.append(f"{self.latency_s:.3f} s")
        return ", ".join(part for part in parts if part)


_NAMES = tuple(item.name for item in fields(RequestLogRecord))
_values_of = attrgetter(*_NAMES)
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


class RequestLog:
    """Writes request log records. target: "on" (stdout), "stderr", "off", or a file's path (appended to). Raises OSError if it cannot be
    opened.

    log_format  format on a stream; a file is always JSON
    worker      set as `worker` in every record; None: there is one gateway
    """

    def __init__(self, target: str, log_format: LogFormat = LogFormat.AUTO, *, worker: int | None = None) -> None:
        self._worker = worker
        self._is_terminal = target in STREAMS and os.isatty(STREAMS[target])
        self._is_text = target in STREAMS and log_format.on(self._is_terminal) is LogFormat.TEXT
        self._lines = None if target == OFF else LineWriter(_open(target), name="request-log", max_queued=MAX_QUEUED)

    @property
    def num_dropped(self) -> int:
        return 0 if self._lines is None else self._lines.num_dropped

    def write(self, record: RequestLogRecord) -> None:
        """Queue one line; never blocks. A full queue drops the line and counts it."""
        if self._lines is None:
            return
        record.worker = self._worker
        self._lines.write(self._line(record))

    def _line(self, record: RequestLogRecord) -> str:
        line = self._encoded(record)
        return line if len(line.encode("utf-8", "replace")) <= MAX_LINE_BYTES else self._encoded(record.shortened())

    def _encoded(self, record: RequestLogRecord) -> str:
        return (record.text(is_short=self._is_terminal) if self._is_text else record.line()) + "\n"

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queued lines, for at most `timeout_s` seconds."""
        if self._lines is not None:
            self._lines.close(timeout_s)


def _open(target: str) -> FileIO:
    if target in STREAMS:
        return FileIO(STREAMS[target], "w", closefd=False)
    return FileIO(target, "a")
