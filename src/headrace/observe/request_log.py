"""One JSON line per HTTP request: what happened, never what was said. No prompt, no answer, no key, no raw header enters a record.

Lines are written by a thread of its own behind a bounded queue: a full disk or a stopped reader costs lines (counted), never a request.
"""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass, fields
from io import FileIO

MAX_QUEUED = 10_000
MAX_DETAIL_CHARS = 200


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Filled while a request runs. Fields that stay None are left out of the line.

    request_id         ours; client_request_id is the client's own name for it, if it was short and printable
    outcome            stop | length | cancelled | deadline | error | rejected | ok (not a generating request)
    error              code of the error body, if one was sent
    detail             our own words for the operator (exception type and text of a server fault; of a request whose replica was lost,
                       whether another one could have gone on); at most MAX_DETAIL_CHARS
    ttft_s, latency_s  seconds since arrival at the gateway
    queue_time_s, prefill_s, decode_s, preempted_s, stalled_s
                       where the first sequence's time in its engine went (`core.update.StageSeconds`); together from arrival there to its
                       end. All but the first come with the end, so a stop string, which ends it here, leaves them out
    """

    request_id: str
    method: str
    path: str
    time: float = 0.0
    status: int = 0
    outcome: str = "ok"
    client_request_id: str | None = None
    tenant: str | None = None
    model: str | None = None
    replica: str | None = None
    stream: bool | None = None
    n: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reasons: list[str] | None = None
    seed: int | None = None
    ttft_s: float | None = None
    queue_time_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    preempted_s: float | None = None
    stalled_s: float | None = None
    latency_s: float | None = None
    error: str | None = None
    detail: str | None = None

    def line(self) -> str:
        """One line of ASCII JSON: no control character survives, so nothing a client sends can forge a second line."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        kept = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items() if value is not None}
        return json.dumps(kept, ensure_ascii=True, separators=(",", ":"))


class RequestLog:
    """target: "stdout", "stderr", "none" or a file's path (appended to). Raises OSError when that cannot be opened."""

    def __init__(self, target: str) -> None:
        self.num_dropped = 0
        self._queue: queue.Queue[str | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None
        if target != "none":
            self._thread = threading.Thread(target=self._run, args=(_open(target),), name="request-log", daemon=True)
            self._thread.start()

    def write(self, record: RequestRecord) -> None:
        """Queue one line; never blocks. A full queue drops the line and counts it."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(record.line())
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued, as far as `timeout_s` allows."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self, file: FileIO) -> None:
        with file:
            while (line := self._queue.get()) is not None:
                self._write(file, line)

    def _write(self, file: FileIO, line: str) -> None:
        """Unbuffered: a line that could not be written is gone, and does not fail the ones after it once more."""
        data = memoryview(line.encode("ascii") + b"\n")
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:  # disk full, or the reader is gone
            self.num_dropped += 1


def _open(target: str) -> FileIO:
    if target in ("stdout", "stderr"):
        return FileIO(1 if target == "stdout" else 2, "w", closefd=False)
    return FileIO(target, "a")
