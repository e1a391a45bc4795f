"""Writes one line per HTTP request: how the request ended, never what was said (`finished_request`).

A full disk or a stopped reader costs lines, which are counted, never a request.
"""

from __future__ import annotations

import json
import os
from io import FileIO
from operator import attrgetter

from headrace.observe.finished_request import FinishedRequest, Outcome
from headrace.observe.logs import CLOSE_S, LineWriter, LogFormat, clock_time, printable, timestamp

MAX_QUEUED = 10_000

MAX_LINE_BYTES = 4096
"""Linux keeps a write of at most this length whole in a pipe (PIPE_BUF); a longer line loses fields."""
OFF = "off"
STREAMS = {"on": 1, "stderr": 2}


FIELDS = {
    "request_id": "arrival.request_id",
    "method": "arrival.method",
    "path": "arrival.path",
    "time": "arrival.time",
    "status": "end.status",
    "outcome": "end.outcome",
    "client": "arrival.client",
    "client_request_id": "arrival.client_request_id",
    "trace_id": "trace_id",
    "worker": "worker",
    "tenant": "caller.tenant",
    "user": "caller.user",
    "key_id": "caller.key_id",
    "model": "model",
    "requested_model": "asked.requested_model",
    "adapter": "adapter",
    "version": "version",
    "replica": "answered.replica",
    "stream": "asked.stream",
    "n": "asked.n",
    "prompt_tokens": "answered.usage.prompt_tokens",
    "completion_tokens": "answered.usage.completion_tokens",
    "continued_id": "answered.continued_id",
    "num_resumes": "answered.num_resumes",
    "cached_tokens": "answered.usage.cached_tokens",
    "estimated_tokens": "answered.usage.estimated_tokens",
    "cache_tier": "answered.cache_tier",
    "finish_reasons": "answered.finish_reasons",
    "seed": "answered.seed",
    "ttft_s": "answered.times.ttft_s",
    "tpot_s": "answered.times.tpot_s",
    "queue_time_s": "answered.times.queue_time_s",
    "prefill_s": "answered.times.prefill_s",
    "decode_s": "answered.times.decode_s",
    "preempted_s": "answered.times.preempted_s",
    "stalled_s": "answered.times.stalled_s",
    "latency_s": "end.latency_s",
    "error": "end.error",
    "limit": "end.limit",
    "param": "end.param",
    "reason": "end.reason",
    "detail": "detail",
    "prompt_blocks": "answered.prompt_blocks",
}
"""Field of a line -> where `FinishedRequest` has it."""

LONG_FIELDS = ("reason", "detail", "finish_reasons", "prompt_blocks")

_values_of = attrgetter(*FIELDS.values())
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


def line_of(request: FinishedRequest, *, is_cut: bool = False) -> str:
    """ASCII without control characters, so that no client can forge a second line."""
    values = zip(FIELDS, _values_of(request), strict=True)
    kept = {name: round(value, 6) if isinstance(value, float) else value for name, value in values if value is not None}
    kept["time"] = timestamp(request.arrival.time)
    for name in LONG_FIELDS if is_cut else ():
        kept.pop(name, None)
    return _encode(kept)


def text_of(request: FinishedRequest, *, is_short: bool) -> str:
    arrival, end = request.arrival, request.end
    words = [clock_time(arrival.time, is_short=is_short), arrival.method, arrival.path, str(end.status)]
    words += [end.outcome] if end.outcome is not Outcome.COMPLETED else []
    words += [", ".join(part for part in (_why(request), _cost(request)) if part), f"({arrival.request_id})"]
    return printable(" ".join(word for word in words if word))


def _why(request: FinishedRequest) -> str:
    end = request.end
    about = f"{end.param}: expected {end.reason}" if end.param and end.reason else end.reason or end.param
    return ": ".join(word for word in (end.error, about, request.detail) if word)


def _cost(request: FinishedRequest) -> str:
    usage, ttft_s, latency_s = request.answered.usage, request.answered.times.ttft_s, request.end.latency_s
    parts = [request.adapter or request.model or ""]
    if usage.completion_tokens is not None:
        parts.append(f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out")
    if ttft_s is not None:
        parts.append(f"first after {ttft_s:.3f} s")
    if latency_s is not None:
        parts.append(f"{latency_s:.3f} s")
    return ", ".join(part for part in parts if part)


class RequestLog:
    """target: "on" (stdout), "stderr", "off", or a file's path (appended to, always JSON). Raises OSError."""

    def __init__(self, target: str, log_format: LogFormat = LogFormat.AUTO, *, worker: int | None = None) -> None:
        self._worker = worker
        self._is_terminal = target in STREAMS and os.isatty(STREAMS[target])
        self._is_text = target in STREAMS and log_format.on(self._is_terminal) is LogFormat.TEXT
        self._lines = None if target == OFF else LineWriter(_open(target), name="request-log", max_queued=MAX_QUEUED)

    @property
    def num_dropped(self) -> int:
        return 0 if self._lines is None else self._lines.num_dropped

    def write(self, request: FinishedRequest) -> None:
        """Never blocks; a full queue drops the line and counts it."""
        if self._lines is None:
            return
        if self._worker is not None:
            request = request._replace(worker=self._worker)
        line = self._line(request)
        if len(line.encode("utf-8", "replace")) > MAX_LINE_BYTES:
            line = self._line(request, is_cut=True)
        self._lines.write(line)

    def _line(self, request: FinishedRequest, *, is_cut: bool = False) -> str:
        if not self._is_text:
            return line_of(request, is_cut=is_cut) + "\n"
        if is_cut:
            request = request._replace(end=request.end._replace(reason=None, detail=None), answered=request.answered._replace(failure=None))
        return text_of(request, is_short=self._is_terminal) + "\n"

    def close(self, timeout_s: float = CLOSE_S) -> None:
        if self._lines is not None:
            self._lines.close(timeout_s)


def _open(target: str) -> FileIO:
    if target in STREAMS:
        return FileIO(STREAMS[target], "w", closefd=False)
    return FileIO(target, "a")
