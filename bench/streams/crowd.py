"""Reads very many event streams in one process: per stream a few numbers, no bytes are kept.

    python crowd.py FILE     {"port", "requests": [text of one POST each], "ramp_s", "leave_after_s", "deadline_s", "report": path}

Connects evenly over `ramp_s`. Prints "begun" when every stream has had its first event. `leave_after_s` later every client resets its
connection; null: they read to the end. At `deadline_s` after its start the process ends whatever is open.

report  per stream: status, events, whether [DONE] came, completion_tokens of its usage, seconds to the first event; and all gaps between
        events, in seconds
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset: the client is gone at once."""

TAIL_BYTES = 600
"""Last bytes of a stream that are kept, with usage and [DONE] in them."""


@dataclass(slots=True)
class Stream:
    status: int = 0
    num_events: int = 0
    is_done: bool = False
    completion_tokens: int = 0
    first_s: float = 0.0
    error: str = ""


class Crowd:
    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._selector = selectors.EpollSelector()
        self._open: dict[socket.socket, Stream] = {}
        self._sent_at: dict[socket.socket, float] = {}
        self._last: dict[socket.socket, float] = {}
        self._tails: dict[socket.socket, bytes] = {}
        self.streams: list[Stream] = []
        self.gaps: list[float] = []

    def run(self) -> None:
        began = time.monotonic()
        requests = self._given["requests"]
        num_connected, begun_at = 0, None
        while time.monotonic() - began < self._given["deadline_s"]:
            due = len(requests) * min(1.0, (time.monotonic() - began) / max(self._given["ramp_s"], 1e-3))
            while num_connected < int(due):
                self._connect(requests[num_connected])
                num_connected += 1
            self._read(0.01 if num_connected < len(requests) else 0.2)
            if begun_at is None and num_connected == len(requests) and all(stream.num_events or stream.error for stream in self.streams):
                begun_at = time.monotonic()
                print("begun", flush=True)
            leave_after_s = self._given["leave_after_s"]
            if begun_at is not None and leave_after_s is not None and time.monotonic() - begun_at >= leave_after_s:
                self._leave()
            if num_connected == len(requests) and not self._open:
                return
        for stream in self._open.values():
            stream.error = "still open at the deadline"

    def _connect(self, request: str) -> None:
        stream = Stream()
        self.streams.append(stream)
        try:
            client = socket.create_connection(("127.0.0.1", self._given["port"]), timeout=10)
            client.sendall(request.encode())
        except OSError as error:
            stream.error = repr(error)
            return
        client.setblocking(False)
        self._selector.register(client, selectors.EVENT_READ)
        self._open[client], self._sent_at[client], self._tails[client] = stream, time.monotonic(), b""

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            client: Any = key.fileobj
            stream = self._open[client]
            try:
                data = client.recv(1 << 16)
            except OSError as error:
                stream.error, data = repr(error), b""
            if data:
                self._take(client, stream, data)
            else:
                self._end(client, stream)

    def _take(self, client: socket.socket, stream: Stream, data: bytes) -> None:
        if not stream.status:
            stream.status = int(data[9:12])
        num_events = data.count(b"data: {")
        if num_events:
            now = time.monotonic()
            if stream.num_events:
                self.gaps.append(now - self._last[client])
            else:
                stream.first_s = now - self._sent_at[client]
            self._last[client] = now
            stream.num_events += num_events
        self._tails[client] = (self._tails[client] + data)[-TAIL_BYTES:]

    def _end(self, client: socket.socket, stream: Stream) -> None:
        tail = self._tails.pop(client).decode("utf-8", "replace")
        stream.is_done = "data: [DONE]" in tail
        if found := re.search(r'"completion_tokens":(\d+)', tail):
            stream.completion_tokens = int(found.group(1))
        if not stream.is_done and not stream.error:
            stream.error = f"ended early: ...{tail[-200:]}"
        self._selector.unregister(client)
        client.close()
        del self._open[client]

    def _leave(self) -> None:
        for client in list(self._open):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
        self._open.clear()


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    crowd = Crowd(given)
    crowd.run()
    report = {"streams": [asdict(stream) for stream in crowd.streams], "gaps": [round(gap, 4) for gap in crowd.gaps]}
    Path(given["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
