"""Runs ten thousand event streams at once on one machine, at one token per second each; then as many whose clients leave all at once.

    python -m bench.storms.many_streams [--streams 10000] [--workers 4] [--tokens 60] [--clients 4]
        -> bench/results/storms/many-streams-STREAMS.json

`headrace gateway --workers N` before fake engines (`lab.fake_runner`: the real scheduler and loop, no model), whose steps take a second.
Clients are processes of their own (`bench.streams.crowd`), each with its part of the streams. First every stream is read to its end, then
all are opened again and reset in the middle. Needs about as many open files per process as `streams / workers` and `streams / clients`.

dropped              streams without their end and every token, by what their client saw
open_at_once         requests open in all workers once every stream had begun
first_s, gap_s       time to the first event, gaps between events
cpu_us_per_token     of all gateway processes, and of the engines, while all streams ran
kib_per_stream       growth of memory that belongs to the gateways' and to the engines' processes alone, per stream
left                 after the resets, beyond what was there before any stream: requests, sequences, KV blocks, tasks and descriptors
freed_s              from the last reset until nothing was left
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from bench.storms.common import RESULTS, WATCH
from bench.storms.failover import quantiles
from bench.stream_cost import cpu_seconds
from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.lab.environment import environment
from headrace.lab.report import write_json

ROOT = Path(__file__).parents[2]
COUNT = signal.SIGRTMIN + 8
STREAMS_PER_ENGINE = 4000
BLOCKS_PER_STREAM = 8
START_S, STEADY_S, SETTLED_S = 60.0, 5.0, 60.0
FAKE: dict[str, Any] = {"vocab_size": 2560, "produced": [10, 103], "verify": False, "step_seconds": 1.0}
"""Tokens are plain characters of the bundled model, so that each is an event of its own."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a running deployment holds, in all its processes of a kind."""

    requests: int
    sequences: int
    kv_blocks: int
    tasks: int
    descriptors: int
    gateway_bytes: int
    engine_bytes: int


class Deployment:
    """A gateway with workers, and engines, in a folder of their own."""

    def __init__(self, folder: Path, given: argparse.Namespace, stack: ExitStack, **fake: Any) -> None:
        """
        given  streams, workers, and for a crowd of clients its number and rate
        fake   changes of FAKE
        """
        self._folder, self._given, self._stack, self._fake = folder, given, stack, {**FAKE, **fake}
        num_engines = -(-given.streams // STREAMS_PER_ENGINE)
        self._engines = [self._start_engine(f"e{number}", -(-given.streams // num_engines)) for number in range(num_engines)]
        self._supervisor = self._start_gateway([f"e{number}" for number in range(num_engines)])
        self.port = self._wait_ready()

    def _start_engine(self, name: str, num_streams: int) -> subprocess.Popen[bytes]:
        # Routing draws: an engine may get more than its part, and a few prompts at a time.
        num_seqs = min(4096, 2 * num_streams)
        engine = {"model": "fake", "max_num_seqs": num_seqs, "max_num_batched_tokens": 16 * num_seqs, "max_waiting": 2 * num_streams}
        fake = {**self._fake, "num_blocks": BLOCKS_PER_STREAM * num_seqs + 1}
        content = {"replica": name, "address": f"unix:{self._folder}/{name}", "engine": engine, "fake": fake}
        return self._spawn(name, "headrace.lab.fake_engine", "--config", self._write(f"{name}.json", content))

    def _start_gateway(self, names: list[str]) -> subprocess.Popen[bytes]:
        replicas = [{"name": name, "address": f"unix:{self._folder}/{name}"} for name in names]
        limits = {"max_requests": 2 * self._given.streams}
        gateway = {"port": 0, "workers": self._given.workers, "request_log": "off", "limits": limits}
        model = {"name": "fake", "remote": {"model": str(bundled_path(DEFAULT_MODEL)), "replicas": replicas}}
        content = {"models": [model], "gateway": gateway, "run_dir": str(self._folder)}
        return self._spawn("gateway", "headrace", "gateway", "--config", self._write("gateway.yaml", content))

    def _write(self, name: str, content: Mapping[str, Any]) -> str:
        path = self._folder / name
        path.write_text(json.dumps(content))
        return str(path)

    def _spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join((str(WATCH), str(ROOT / "src")))
        with open(self._folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "HEADRACE_STREAM_WATCH": str(self._folder / "tasks")},
            )
        self._stack.callback(_end, process)
        return process

    def _wait_ready(self) -> int:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for line in self.log.splitlines():
                if '"url":"' in line:
                    port = int(line.partition('"url":"')[2].partition('"')[0].rpartition(":")[2])
                    if get(port, "/ready?strict")[0] == 200:
                        return port
            time.sleep(0.1)
        raise RuntimeError(f"the deployment does not serve: {self.log[-2000:]}")

    @property
    def gateways(self) -> list[psutil.Process]:
        """The workers and their text workers."""
        return psutil.Process(self._supervisor.pid).children(recursive=True)

    @property
    def workers(self) -> dict[int, int]:
        """Worker -> process id."""
        commands = {process.pid: process.cmdline() for process in psutil.Process(self._supervisor.pid).children()}
        return {int(command[command.index("--worker") + 1]): pid for pid, command in commands.items() if "--worker" in command}

    @property
    def log(self) -> str:
        """Of the supervisor and the workers."""
        return (self._folder / "gateway.log").read_text()

    @property
    def engines(self) -> list[psutil.Process]:
        return [psutil.Process(engine.pid) for engine in self._engines]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels, of all workers."""
        _, page = get(self.port, "/metrics")
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and all(word in line for word in wanted)]
        return float(sum(float(line.rpartition(" ")[2]) for line in lines))

    def held(self) -> Held:
        return Held(
            requests=int(self.metric("headrace_gateway_requests_open")),
            sequences=int(self.metric("headrace_requests_running") + self.metric("headrace_requests_waiting")),
            kv_blocks=int(self.metric("headrace_kv_blocks", state="used")),
            tasks=sum(map(self._num_tasks, self.workers.values())),
            descriptors=sum(process.num_fds() for process in [*self.gateways, *self.engines]),
            gateway_bytes=sum(process.memory_full_info().uss for process in self.gateways),
            engine_bytes=sum(process.memory_full_info().uss for process in self.engines),
        )

    def _num_tasks(self, pid: int) -> int:
        path = self._folder / f"tasks.{pid}"
        path.unlink(missing_ok=True)
        os.kill(pid, COUNT)
        while not path.exists():
            time.sleep(0.01)
        return int(path.read_text())

    def cpu_s(self) -> tuple[float, float]:
        """Of the gateways, of the engines, so far."""
        return _cpu_s(self.gateways), _cpu_s(self.engines)

    # -- clients -------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def crowd(self, *, num_tokens: int, leave_after_s: float | None) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Client processes, all of whose streams have begun; they are ended with the block."""
        num_clients, num_streams = self._given.clients, self._given.streams
        with ExitStack() as stack:
            clients = []
            for number in range(num_clients):
                requests = [request(seed, num_tokens) for seed in range(number, num_streams, num_clients)]
                content = {
                    "port": self.port,
                    "requests": requests,
                    "ramp_s": num_streams / self._given.rate,
                    "leave_after_s": leave_after_s,
                    "deadline_s": self._patience_s(num_tokens),
                    "report": str(self._folder / f"report{number}.json"),
                }
                command = [sys.executable, "-P", str(ROOT / "bench/streams/crowd.py"), self._write(f"crowd{number}.json", content)]
                client = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
                stack.callback(_end, client)
                clients.append(client)
            for client in clients:
                assert client.stdout is not None
                client.stdout.readline()  # "begun", or nothing where the client has ended
            yield clients

    def _patience_s(self, num_tokens: int) -> float:
        return float(self._given.streams / self._given.rate) + 2 * num_tokens + START_S

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads((self._folder / f"report{number}.json").read_text()) for number in range(self._given.clients)]


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    return sum((cpu_seconds(process.pid) for process in processes), 0.0)


def request(seed: int, num_tokens: int) -> str:
    body = json.dumps({
        "model": "fake", "messages": [{"role": "user", "content": "Hello"}], "seed": seed, "max_tokens": num_tokens, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    })  # fmt: skip
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\nconnection: close\r\n\r\n{body}"


def get(port: int, path: str) -> tuple[int, str]:
    """Status 0 where nothing listens yet."""
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def read_to_the_end(deployment: Deployment, given: argparse.Namespace) -> dict[str, Any]:
    idle = deployment.held()
    with deployment.crowd(num_tokens=given.tokens, leave_after_s=None) as clients:
        open_at_once, sequences = int(deployment.metric("headrace_gateway_requests_open")), deployment.held().sequences
        before, tokens = deployment.cpu_s(), deployment.metric("headrace_generation_tokens_total")
        time.sleep(STEADY_S)
        spent = [after - so_far for after, so_far in zip(deployment.cpu_s(), before, strict=True)]
        tokens = deployment.metric("headrace_generation_tokens_total") - tokens
        full = deployment.held()
        for client in clients:
            client.wait()
    reports = deployment.reports()
    streams = [stream for report in reports for stream in report["streams"]]
    whole = [stream for stream in streams if stream["is_done"] and stream["completion_tokens"] == given.tokens]
    errors = [f"{stream['status']} {stream['error'] or 'tokens are missing'}"[:120] for stream in streams if stream not in whole]
    return {
        "whole": len(whole),
        "dropped": dict(Counter(errors).most_common(10)),
        "open_at_once": open_at_once,
        "sequences_at_once": sequences,
        "first_s": quantiles([stream["first_s"] for stream in whole]),
        "gap_s": quantiles([gap for report in reports for gap in report["gaps"]]),
        "cpu_us_per_token": {name: round(1e6 * s / max(tokens, 1), 1) for name, s in zip(("gateways", "engines"), spent, strict=True)},
        "kib_per_stream": {
            "gateways": round((full.gateway_bytes - idle.gateway_bytes) / given.streams / 1024, 2),
            "engines": round((full.engine_bytes - idle.engine_bytes) / given.streams / 1024, 2),
        },
        "descriptors_at_once": full.descriptors,
    }


def reset_all(deployment: Deployment, given: argparse.Namespace, before: Held) -> dict[str, Any]:
    with deployment.crowd(num_tokens=4 * given.tokens, leave_after_s=3.0) as clients:
        open_at_once = int(deployment.metric("headrace_gateway_requests_open"))
        for client in clients:
            client.wait()
    began, left = time.monotonic(), {"requests": -1}
    while any(left.values()) and time.monotonic() - began < SETTLED_S:
        time.sleep(0.5)
        now = deployment.held()
        left = {name: getattr(now, name) - getattr(before, name) for name in ("requests", "sequences", "kv_blocks", "tasks", "descriptors")}
    return {"open_at_once": open_at_once, "left": left, "freed_s": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rate", type=float, default=500.0, help="streams opened per second")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, ExitStack() as stack:
        deployment = Deployment(Path(folder), given, stack)
        before = deployment.held()
        found = {"read": read_to_the_end(deployment, given), "reset": reset_all(deployment, given, before)}
    print(json.dumps(found, indent=1))
    facts = {"environment": asdict(environment()), "arguments": vars(given), "descriptors_per_process": hard}
    write_json(RESULTS / f"many-streams-{given.streams}.json", facts | found)


if __name__ == "__main__":
    main()
