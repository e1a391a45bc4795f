"""Plays an OpenAI-compatible API from a script: a tiny HTTP server in a thread, on loopback and an ephemeral port."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Delta = dict[str, object]
Answer = Sequence[str | Delta] | int


class ScriptedServer(ThreadingHTTPServer):
    """answers: one list of text pieces, or whole deltas, per chat request, in order; an int instead answers with that status.

    seen  decoded bodies of chat requests
    """

    daemon_threads = True

    def __init__(self, answers: list[Answer], models: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.models = answers, models
        self.seen: list[dict[str, object]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        self.server.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers.get("Authorization"))
        answer = self.server.answers.pop(0)
        if isinstance(answer, int):
            self._json(answer, {"error": {"message": "the queue is full"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for piece in [None, *answer]:
            if piece == "<break>":
                return
            if piece == "<wait>":
                select.select([self.connection], [], [], 60.0)  # until the client leaves
                return
            if piece == "<error>":
                self._event({"error": {"message": "replica lost"}})
                return
            delta = {"role": "assistant", "content": ""} if piece is None else piece if isinstance(piece, dict) else {"content": piece}
            said: dict[str, object] = {"delta": delta} if "/chat/" in self.path else {"text": piece or ""}
            self._event({"choices": [{"index": 0, **said}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _json(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def scripted_server(*answers: Answer, models: tuple[str, ...] = ("tiny", "other")) -> Iterator[ScriptedServer]:
    server = ScriptedServer(list(answers), list(models))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
