"""Runs servers as people start them: `headrace serve` in processes of its own, asked over sockets, counted from outside, stopped by
SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import psutil
from patience import PATIENCE_S as PATIENCE_S
from patience import until

import headrace
from headrace.cli.chat.child import URL_LINE
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import decode_load
from headrace.wire.service import CHANNEL_OPTIONS, SNAPSHOT

SUPPORT = Path(__file__).resolve().parent
SOURCE = Path(headrace.__file__).resolve().parents[1]
"""Of the package that is tested here, whichever one is installed: a planted bug is in a copy."""
COMMAND = (str(Path(sys.executable).with_name("headrace")), "serve")
FAKE_COMMAND = (sys.executable, str(SUPPORT / "serve_fake.py"))
START_S = 240.0
STOP_S = 60.0
CROWD: dict[str, Any] = {"vocab_size": 345, "num_blocks": 20_000, "verify": False}
CROWD_ENGINE: dict[str, Any] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_waiting": 2048}
"""A fake engine with room for a thousand sequences of `plain_loop`'s vocabulary."""
STEP_S = 0.02
"""What such an engine takes for a step: a stream of 150 tokens has a middle in which something can happen, also where a test is late."""
REPORT = signal.SIGRTMIN + 3
MEASURE = signal.SIGRTMIN + 4
KEY = "sk-end-to-end-0123456789"
GREEDY = tuple(f"greedy-{number}" for number in range(3))
TENANTS = ("neighbour", "garbage", "slow", *GREEDY)
"""Tenants of the shared server beside that of KEY, each with a key (`key_of`)."""


def key_of(tenant: str) -> str:
    return f"{KEY}-{tenant}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds.

    tasks    names of the event loop's tasks
    threads  names of Python's threads; num_threads are the operating system's, with those of libraries
    """

    num_fds: int
    num_threads: int
    tasks: tuple[str, ...]
    threads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says of itself over its own socket. num_open: requests its wire service knows of."""

    instance_id: str
    num_running: int
    num_waiting: int
    num_open: int
    kv_blocks_used: int
    preemptions: int

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or holds blocks; the pad block of the one KV group is always used."""
        return (self.num_running, self.num_waiting, self.num_open, self.kv_blocks_used) == (0, 0, 0, 1)


class Server:
    """A running deployment. `folder` is its own: run directory, configuration, logs."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.folder = folder
        (folder / "probe").mkdir()
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_") or name == "HEADRACE_CACHE_DIR"
        }
        environment |= {
            "XDG_RUNTIME_DIR": str(folder),
            "HEADRACE_STATE": str(folder / "state"),
            "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, SUPPORT, SUPPORT / "probe"))),
            "HEADRACE_TEST_PROBE": str(folder / "probe"),
        }
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
        self.port = 0
        self.metrics_key = KEY

    @property
    def log(self) -> str:
        return "".join((self.folder / name).read_text(errors="replace") for name in ("out", "err"))

    def wait_ready(self) -> None:
        """Until the command says where it serves and every replica is ready. Raises AssertionError with the log."""

        def announced() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log[-4000:]}"
            found = URL_LINE.search((self.folder / "err").read_text(errors="replace"))
            if found is None:
                return False
            self.port = int(found.group(1).rsplit(":", 1)[1])
            return True

        self.until(announced, START_S)
        self.until(lambda: self.get("/ready?strict")[0] == 200)

    def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        until(condition, timeout_s, said=lambda: self.log[-4000:])

    async def eventually(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        await asyncio.to_thread(self.until, condition, timeout_s)

    def get(self, path: str, *, key: str | None = KEY) -> tuple[int, Any]:
        """Status and JSON of a GET; text where it is no JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
            reply = connection.getresponse()
            body = reply.read()
            is_json = reply.getheader("content-type", "").startswith("application/json")
            return reply.status, json.loads(body) if is_json else body.decode()
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0 when there is none."""
        status, text = self.get("/metrics", key=self.metrics_key)
        assert status == 200
        pattern = re.compile(rf"^{re.escape(name)}(?:\{{(?P<labels>[^}}]*)\}})? (?P<value>\S+)", re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [match for match in pattern.finditer(text) if all(item in (match["labels"] or "") for item in wanted)]
        return sum(float(match["value"]) for match in found)

    # its processes

    @property
    def run_dir(self) -> Path:
        [found] = self.folder.glob("headrace-*")
        return found

    def pids(self) -> dict[str, int]:
        """ "gateway" (of several: "gateway-0", ...), "e0", "e1", ... -> process id, of those that run now."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                command = child.cmdline()
            except psutil.Error:
                continue
            if "--config" in command and child.status() != psutil.STATUS_ZOMBIE:
                worker = f"-{command[command.index('--worker') + 1]}" if "--worker" in command else ""
                found[Path(command[command.index("--config") + 1]).stem + worker] = child.pid
        return found

    def load(self, engine: str = "e0") -> EngineLoad:
        """Asked of the engine itself. Raises grpc.RpcError when it does not answer."""
        with grpc.insecure_channel(f"unix:{self.run_dir}/{engine}.sock", options=CHANNEL_OPTIONS) as channel:
            data = channel.unary_unary(SNAPSHOT)(pb.SnapshotRequest().SerializeToString(), timeout=PATIENCE_S)
        reply = pb.SnapshotReply.FromString(data)
        load = decode_load(reply.load)
        return EngineLoad(
            reply.hello.instance_id,
            load.num_running,
            load.num_waiting,
            reply.num_open,
            load.kv_blocks_used,
            load.counters.preemptions,
        )

    def probe(self, pid: int) -> dict[str, Any]:
        path = self.folder / "probe" / f"{pid}.json"
        path.unlink(missing_ok=True)
        os.kill(pid, REPORT)
        self.until(path.exists)
        said: dict[str, Any] = json.loads(path.read_text())
        return said

    def footprint(self) -> dict[str, Footprint]:
        made = {}
        for name, pid in self.pids().items():
            process, said = psutil.Process(pid), self.probe(pid)
            made[name] = Footprint(process.num_fds(), process.num_threads(), tuple(said["tasks"]), tuple(said["threads"]))
        return made

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """One process stands still while inside: SIGSTOP, and SIGCONT at the end, also of a process that was killed meanwhile."""
        pid = self.pids()[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # its end

    def stop(self) -> None:
        """SIGTERM, and nothing but a clean exit that leaves no process and no run directory behind."""
        pids = self.pids()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_S) == 0, self.log[-4000:]
        assert not [name for name, pid in pids.items() if is_alive(pid)]
        assert not list(self.folder.glob("headrace-*"))

    def kill(self) -> None:
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            for child in children:
                if child.is_running():
                    child.kill()


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def started(command: Sequence[str], files: Mapping[str, object]) -> Iterator[Server]:
    """A deployment until the block ends, stopped by SIGTERM unless it has ended before.

    command  "{folder}" stands for the deployment's own folder
    files    name -> JSON content, written into that folder first
    """
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content).replace("{folder}", str(folder)))
    server = Server([part.replace("{folder}", str(folder)) for part in command], folder)
    try:
        server.wait_ready()
        yield server
        if server.process.poll() is None:
            server.stop()
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serving(config: Mapping[str, object], *arguments: str) -> Iterator[Server]:
    """`headrace serve --config FILE` on a free port. JSON is YAML."""
    with started([*COMMAND, "--config", "{folder}/config.yaml", "--port", "0", *arguments], {"config.yaml": config}) as server:
        yield server


@contextmanager
def serving_fake(folder: Path, **config: Any) -> Iterator[Server]:
    given = {"folder": str(folder), "run_dir": "{folder}", **config}
    with started([*FAKE_COMMAND, "{folder}/serve.json"], {"serve.json": given}) as server:
        yield server
