"""Starts real processes as the supervisor does: fake engines on the real wire, and a gateway in front of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from patience import PATIENCE_S as PATIENCE_S
from patience import until

ENGINE = (sys.executable, "-m", "headrace.lab.fake_engine")
GATEWAY = (sys.executable, "-m", "headrace", "gateway")


@dataclass
class Child:
    """A started process and the supervisor's end of its leash."""

    process: subprocess.Popen[bytes]
    leash: socket.socket
    facts: dict[str, Any] = field(default_factory=dict)

    def wait_ready(self) -> dict[str, Any]:
        """What it said when it was ready. Fails with what it said instead."""
        self.leash.settimeout(PATIENCE_S)
        said = self.hear()
        assert said["event"] == "ready", said
        self.facts = said
        return said

    def hear(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            data = self.leash.recv(4096)
            assert data, f"the process ended with {self.process.wait(PATIENCE_S)}"
            line += data
        said: dict[str, Any] = json.loads(line)
        return said

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def child(command: tuple[str, ...], config: Path) -> Iterator[Child]:
    """`command --config FILE --parent-fd N`, killed at the end if it still runs."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            arguments = [*command, "--config", str(config), "--parent-fd", str(theirs.fileno())]
            process = subprocess.Popen(
                arguments,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            yield Child(process, ours)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(PATIENCE_S)


@dataclass
class Site:
    gateway: Child
    engines: list[Child]
    url: str

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def wait_until(self, path: str, status: int) -> None:
        with self.client() as client:
            until(lambda: client.get(path).status_code == status, said=lambda: f"{path} did not become {status}")


@contextmanager
def site(
    folder: Path,
    text_folder: Path,
    fake: Mapping[str, Any],
    *,
    num_engines: int = 1,
    engine: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Iterator[Site]:
    """folder  private, with a short path: sockets and files are made in it"""
    options = {"model": str(text_folder), **(engine or {})}
    with ExitStack() as stack:
        engines = []
        for number in range(num_engines):
            config = {
                "replica": f"r{number}",
                "address": f"unix:{folder}/e{number}",
                "engine": options,
                "fake": dict(fake),
            }
            path = folder / f"engine{number}.json"
            path.write_text(json.dumps(config))
            engines.append(stack.enter_context(child(ENGINE, path)))
        gateway = stack.enter_context(child(GATEWAY, write_gateway_file(folder, text_folder, num_engines, changes)))
        for started in engines:
            started.wait_ready()
        port = gateway.wait_ready()["port"]
        found = Site(gateway, engines, f"http://127.0.0.1:{port}")
        found.wait_until("/ready?strict", 200)
        yield found


def write_gateway_file(folder: Path, text_folder: Path, num_engines: int, changes: Mapping[str, Any]) -> Path:
    replicas = [{"name": f"r{number}", "address": f"unix:{folder}/e{number}"} for number in range(num_engines)]
    models = [{"name": "fox", "folder": str(text_folder), "replicas": replicas}]
    path = folder / "gateway.json"
    path.write_text(json.dumps({"models": models, "port": 0, "request_log": "off", **changes}))
    return path
