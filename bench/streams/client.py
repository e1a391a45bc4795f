"""Reads many event streams in one process, as cheaply as Python can: bytes and moments are kept, and parsed after the last one came.

    python client.py FILE     {"port", "request": text of one POST, "num_streams", "received": path}

Prints "begun" when every stream has had its first event, and exits when all have ended. `received` holds for every stream its
x-request-id and [moment in seconds of CLOCK_MONOTONIC, text that came] pairs.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any

Reads = list[tuple[float, bytes]]


def read_all(port: int, request: bytes, num_streams: int) -> list[Reads]:
    selector = selectors.EpollSelector()
    streams: list[Reads] = [[] for _ in range(num_streams)]
    for reads in streams:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, (sock, reads))
    num_open, num_silent = num_streams, num_streams
    while num_open:
        for key, _ in selector.select():
            sock, reads = key.data
            data = sock.recv(1 << 16)
            reads.append((time.monotonic(), data))
            if len(reads) == 3 and num_silent:  # head, the first event, one more
                num_silent -= 1
                if not num_silent:
                    print("begun", flush=True)
            if not data:
                selector.unregister(sock)
                sock.close()
                num_open -= 1
    return streams


def understood(reads: Reads) -> tuple[str, list[tuple[float, str]], bool]:
    """(x-request-id, texts with their moments, whether [DONE] came) of one stream. Chunked framing is undone by lines."""
    request_id, rest, texts, is_done = "", b"", [], False
    for moment, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"x-request-id: "):
                request_id = line[14:].strip().decode()
            elif line.startswith(b"data: {"):
                text = "".join(_text(choice) for choice in json.loads(line[6:])["choices"])
                if text:
                    texts.append((moment, text))
            is_done = is_done or line.startswith(b"data: [DONE]")
    return request_id, texts, is_done


def _text(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    streams = read_all(given["port"], given["request"].encode(), given["num_streams"])
    found = [understood(reads) for reads in streams]
    Path(given["received"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
