"""Runs the HTTP servers of the comparison: each is started on a free loopback port, waited for, and always ended by its own process ids."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.engines import LOAD_TIMEOUT_S, CannotRun, end_tree

MODEL_NAME = "peer"
"""What every server calls its model."""
POLL_S = 0.005
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaunch:
    """command: without host and port, which every server takes as --host and --port. ready: the path that answers 200 once it serves."""

    command: tuple[str, ...]
    ready: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def setting(self) -> dict[str, object]:
        return {"command": self.command, "environment": dict(self.environment)}


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(launch: ServerLaunch, log: Path | None = None) -> Iterator[Server]:
    """Raises CannotRun when the server ends, or is not ready in LOAD_TIMEOUT_S; what it printed is in `log`."""
    port = free_port()
    command = [*launch.command, "--host", "127.0.0.1", "--port", str(port)]
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **launch.environment}, start_new_session=True
        )  # fmt: skip
    try:
        _wait_until_ready(process, port, launch.ready)
        yield Server(process.pid, port)
    finally:
        end_tree(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, path: str) -> None:
    until = time.perf_counter() + LOAD_TIMEOUT_S
    while time.perf_counter() < until:
        if process.poll() is not None:
            raise CannotRun(f"the server ended with {process.returncode}")
        with suppress(OSError, http.client.HTTPException):
            if _status(port, path) == 200:
                return
        time.sleep(POLL_S)
    raise CannotRun(f"the server was not ready in {LOAD_TIMEOUT_S:g} s")


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def flags_of(options: Mapping[str, object]) -> list[str]:
    """{"max_len": 8, "caching": False} -> --max-len 8 --no-caching"""
    flags = []
    for name, value in options.items():
        word = name.replace("_", "-")
        flags += [f"--{word}" if value else f"--no-{word}"] if isinstance(value, bool) else [f"--{word}", str(value)]
    return flags
