"""Starts engines and gateways one by one, as on several machines, for storms that need more than `headrace serve`.

Engines listen over TCP with TLS and a token, on loopback or in a network namespace; gateways dial them at addresses that the storm chooses:
the engine's own, or a link in between (`bench.network_faults`). A fake engine computes nothing and is paced; its tokens follow from seed
and position, so that answers can be compared as those of a real one with `--deterministic`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import headrace
from headrace.bundled import bundled_path

MODEL = "headrace-tiny"
VOCAB_SIZE = 2560
START_S = 120.0
STOP_S = 60.0
SOURCE = Path(headrace.__file__).parents[1]
FAKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_model_len": 2048,
    "verify": False,
    "num_blocks": 20_000,
    "numerics": {"weights": "fake"},
}


@dataclass(frozen=True, slots=True)
class Place:
    """An address to listen at, and the network namespace that has it; "": this process's own."""

    host: str = "127.0.0.1"
    namespace: str = ""

    @property
    def prefix(self) -> list[str]:
        """What runs a command here."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


HERE = Place()


@dataclass(eq=False)
class HandStarted:
    """A process, its address and its log. `start` again after its end takes the same port."""

    command: Sequence[str]
    place: Place
    port: int
    log_path: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_") or name == "HEADRACE_CACHE_DIR"
        }
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**environment, "PYTHONPATH": str(SOURCE)}
            )

    @property
    def address(self) -> str:
        return f"{self.place.host}:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait()

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a gateway's GET; 0 where it does not answer."""
        connection = HTTPConnection(self.place.host, self.port, timeout=5)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (OSError, HTTPException, ValueError):
            return 0, {}
        finally:
            connection.close()

    def until(self, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Wait for something this process does. Raises AssertionError with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.02)

    def wait_listening(self) -> None:
        self.until(lambda: _is_listening(self.place.host, self.port))

    def wait_serving(self) -> None:
        """Until an engine's log says so."""
        self.until(lambda: " serves " in self.log)

    def wait_ready(self) -> None:
        """Until every replica of a gateway is ready."""
        self.until(lambda: self.get("/ready?strict")[0] == 200)


@dataclass
class HandStartedSite:
    """Certificates in a folder of its own, and the processes that were started with them; all end with the site."""

    folder: Path
    stack: ExitStack = field(default_factory=ExitStack)

    def engine(
        self, name: str, *, at: Place = HERE, fake: dict[str, Any] | None = None, engine: dict[str, Any] | None = None
    ) -> HandStarted:
        """An engine over TLS on a free port, as `headrace engine --config`. fake: it computes nothing (`lab.fake_engine`)."""
        port = free_port()
        content: dict[str, Any] = {
            "replica": name,
            "address": f"{at.host}:{port}",
            "engine": {"model": str(bundled_path(MODEL)) if fake is None else "fake", **(engine or {})},
            "tls_dir": str(self.folder / "site" / f"engine-{at.host}"),
        }
        module = "headrace" if fake is None else "headrace.lab.fake_engine"
        words = ["engine"] if fake is None else []
        if fake is not None:
            content["fake"] = {**FAKE, **fake}
        return self._started([module, *words, "--config", self._file(f"{name}.json", content)], name, at, port)

    def gateway(
        self,
        name: str,
        addresses: dict[str, str],
        *,
        at: Place = HERE,
        aliases: tuple[str, ...] = (),
        further: dict[str, dict[str, str]] | None = None,
        tiers: dict[str, Any] | None = None,
        **section: Any,
    ) -> HandStarted:
        """A gateway by hand.

        addresses  of its replicas, by name
        aliases    of the model
        further    further models with the same files: name -> addresses of their replicas
        section    of the file's `gateway`
        """
        port = free_port()
        models = [{"name": model, "remote": self._remote(replicas)} for model, replicas in (further or {}).items()]
        content = {
            "models": [{"name": MODEL, "aliases": aliases, "remote": self._remote(addresses)}, *models],
            "gateway": {"host": at.host, "port": port, "request_log": "off", **section},
            "allow_open": True,
            "state": str(self.folder / "state"),  # of all gateways of the site; by default it would be the user's own
            "tiers": tiers or {},
        }
        return self._started(["headrace", "gateway", "--config", self._file(f"{name}.yaml", content)], name, at, port)

    def _remote(self, addresses: dict[str, str]) -> dict[str, Any]:
        replicas = [{"name": replica, "address": address} for replica, address in addresses.items()]
        return {"model": MODEL, "replicas": replicas, "tls_dir": str(self.folder / "site" / "gateway")}

    def _file(self, name: str, content: dict[str, Any]) -> str:
        path = self.folder / name
        path.write_text(json.dumps(content), encoding="utf-8")
        return str(path)

    def _started(self, words: Sequence[str], name: str, place: Place, port: int) -> HandStarted:
        command = [*place.prefix, sys.executable, "-P", "-m", *words]
        made = HandStarted(command, place, port, self.folder / f"{name}.log")
        self.stack.callback(made.close)
        made.start()
        return made


@contextmanager
def site_by_hand(*hosts: str) -> Iterator[HandStartedSite]:
    """A folder with certificates for engines at these hosts, or at loopback; at the end its processes are killed and it is removed."""
    with tempfile.TemporaryDirectory(prefix="hr-") as name, ExitStack() as stack:
        names = [word for host in hosts or (HERE.host,) for word in ("--host", host)]
        command = [sys.executable, "-P", "-m", "headrace", "tls", "init", f"{name}/site", *names]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(SOURCE)})
        yield HandStartedSite(Path(name), stack)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _is_listening(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0
