"""Runs the processes of one side: a worker that answers rows, and a server of the bundled model. Each ends with its block."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.smoke.trees import Side, SmokeError
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.loadgen import LoadTarget, run_load

WORKER = Path(__file__).with_name("worker.py")
SERVED = "headrace-tiny"
START_TIMEOUT_S, END_TIMEOUT_S, POLL_S = 60.0, 10.0, 0.01
STREAMS = WorkloadShape(input_tokens=32, output_tokens=48)
NUM_STREAMS = 16


class Worker:
    """A process that answers {"row": ..., "seed": ...} with {"seconds": ...}, one at a time."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self._process, self._log = name, process, log

    def hear(self) -> dict[str, Any]:
        """Its next answer. Raises SmokeError with its last words when it ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SmokeError(f"{self.name} ended with {self._process.wait(END_TIMEOUT_S)}: {last_words(self._log)}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def seconds(self, row: str, seed: int) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"row": row, "seed": seed}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: `hear` says why
        return float(self.hear()["seconds"])


@contextmanager
def running(command: Sequence[str], environ: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own; at the end all of it is asked to leave, then killed."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        _end(process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _end(process: subprocess.Popen[str]) -> None:
    """Children of a server follow its supervisor; what has not gone in time is killed with its whole session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            (process.send_signal if number == signal.SIGTERM else lambda sent: os.killpg(process.pid, sent))(number)
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def worker(side: Side, model: Path, log: Path) -> Iterator[Worker]:
    """Started, not yet ready: `hear` it once before the first row."""
    with running([sys.executable, "-P", str(WORKER), str(model)], side.environ(), log) as process:
        yield Worker(side.name, process, log)


class Server:
    """`headrace serve` of the bundled model. start_s: from the start of its process to its first token at a client."""

    def __init__(self, process: subprocess.Popen[str], port: int, start_s: float) -> None:
        self.port, self.start_s = port, start_s
        self._process = process
        self._target = LoadTarget(url=f"http://127.0.0.1:{port}", model=SERVED)

    @property
    def pid(self) -> int:
        """Process id of the supervisor; gateway and engine are its children."""
        return self._process.pid

    def leave(self) -> None:
        """Ask it to; waiting is its block's."""
        self._process.terminate()

    def stream_seconds(self, seed: int, *, count: int = NUM_STREAMS, shape: WorkloadShape = STREAMS) -> float:
        """Seconds until the last of `count` streams begun together has ended."""
        records = asyncio.run(run_load(self._target, make_requests(count, shape, seed=seed), [0.0] * count))
        errors = [record.error for record in records if record.error]
        if errors:
            raise SmokeError(f"{len(errors)} of {count} streams failed: {errors[0]}")
        return max(record.end_s for record in records) - min(record.intended_s for record in records)


@contextmanager
def server(
    side: Side, log: Path, *, model: str = SERVED, flags: Sequence[str] = (), timeout_s: float = START_TIMEOUT_S
) -> Iterator[Server]:
    """`headrace serve` of `model`, which is called SERVED whatever it is."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "headrace", "serve", model, "--served-model-name", SERVED, "--port", str(port), *flags]
    began = time.monotonic()
    with running(command, {**side.environ(), "HEADRACE_STATE": str(log.with_suffix(".state"))}, log) as process:
        while not answers(port):
            if process.poll() is not None or time.monotonic() - began > timeout_s:
                raise SmokeError(f"the server of {side.name} does not answer: {last_words(log)}")
            time.sleep(POLL_S)
        yield Server(process, port, time.monotonic() - began)


def answers(port: int) -> bool:
    """One token was asked for and has come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
    try:
        body = json.dumps({"model": SERVED, "prompt": [300, 301], "max_tokens": 1, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_words(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:]) or "it said nothing"
