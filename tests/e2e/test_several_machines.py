"""Tests engines and a gateway on addresses of their own, started one by one as an operator would, over TLS.

Addresses 127.0.0.2 and so on stand for machines; with certificates the wire treats them as any other address. Each fault between two
machines by its name: tests/engine/server/test_listener.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from clickhouse_kit import free_port
from helm_kit import NAMESPACE, RELEASE, pod_of, rendered, started_with
from server_kit import PATIENCE_S, SOURCE, START_S, STOP_S
from wire_kit import socket_dir, until

from headrace.cli.admin.tls import init

pytestmark = pytest.mark.process

HEADRACE = str(Path(sys.executable).with_name("headrace"))
QUESTION = "What is the capital of France?"
CLOSED = "The capital of France is Paris."


class Process:
    def __init__(self, folder: Path, *command: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_") or name == "HEADRACE_CACHE_DIR"}
        self._path = folder / f"log-{len(list(folder.glob('log-*')))}"
        with open(self._path, "wb") as log:
            environment = {**kept, "PYTHONPATH": str(SOURCE), "TMPDIR": str(folder)}
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)

    @property
    def log(self) -> str:
        return self._path.read_text(errors="replace")

    async def said(self, *words: str, timeout_s: float = START_S) -> None:
        """Wait until all words are in the log. Raises AssertionError with the log when the process ends first, or time is over."""
        with suppress(TimeoutError):
            await until(lambda: all(word in self.log for word in words) or self.process.poll() is not None, timeout_s)
        missing = [word for word in words if word not in self.log]
        assert not missing, f"{missing} not in (status {self.process.poll()}):\n{self.log}"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


Start = Callable[..., Process]


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_dir() as path:
        yield path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start_one(*command: str) -> Process:
        started.append(Process(folder, *command))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


def ask(port: int, model: str = "headrace-tiny", **body: Any) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    content = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 30, **body}
    connection.request("POST", "/v1/chat/completions", json.dumps(content), {"content-type": "application/json"})
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, {"events": data.decode()} if body.get("stream") else json.loads(data)


def ready(port: int) -> dict[str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/ready")
    replicas = json.loads(connection.getresponse().read())["replicas"]
    connection.close()
    return {replica["replica"]: replica["reason"] for replica in replicas}


def port_of(process: Process) -> int:
    return int(process.log.partition("listening on http://127.0.0.1:")[2].partition(";")[0])


def address_of(engine: Process) -> str:
    return engine.log.rpartition(" at ")[2].split('"')[0].split()[0]


async def test_two_engines_and_a_gateway_are_set_up_by_hand_and_answer_over_tls(folder: Path, start: Start) -> None:
    site = folder / "site"
    init(site, host=["127.0.0.2", "127.0.0.3"])
    hosts = ("127.0.0.2", "127.0.0.3")
    engines = [start(HEADRACE, "engine", "--listen", f"{host}:0", "--tls-dir", f"{site}/engine-{host}") for host in hosts]
    for engine in engines:
        await engine.said("headrace-tiny serves")
    replicas = [word for host, engine in zip(hosts, engines, strict=True) for word in ("--replica", f"{host}={address_of(engine)}")]
    gateway = start(HEADRACE, "gateway", *replicas, "--tls-dir", f"{site}/gateway", "--port", "0")
    await gateway.said("replica 127.0.0.2 is connected", "replica 127.0.0.3 is connected", "listening on ")
    port = port_of(gateway)
    await until(lambda: ready(port) == {"127.0.0.2": "", "127.0.0.3": ""}, PATIENCE_S)
    answers = [ask(port) for _ in range(4)]
    assert [(status, answer["choices"][0]["message"]["content"]) for status, answer in answers] == [(200, CLOSED)] * 4
    status, streamed = ask(port, stream=True)
    events = [json.loads(line[6:]) for line in streamed["events"].splitlines() if line.startswith("data: {")]
    assert (status, "".join(event["choices"][0]["delta"].get("content") or "" for event in events)) == (200, CLOSED)
    assert streamed["events"].endswith("data: [DONE]\n\n")

    engines[1].stop(signal.SIGKILL)
    await until(lambda: ready(port) == {"127.0.0.2": "", "127.0.0.3": "not connected"}, PATIENCE_S)
    assert ask(port)[0] == 200, "the other engine answers"
    assert (gateway.stop(), engines[0].stop()) == (0, 0)
    assert len(list(folder.glob("headrace-wire-*"))) == 1, "what the killed engine left, which the next one there removes"


async def test_the_pods_of_a_charts_group_answer_as_one_engine(folder: Path, start: Start) -> None:
    """With the variables that a LeaderWorkerSet's controller sets; the gateway dials the leader by address, as in no cluster."""
    service, leader, ports = f"{RELEASE}-engines", "127.0.0.2", {":7001": f":{free_port()}", ":7100": f":{free_port()}"}
    init(folder / "site", rank=[f"{service}.{NAMESPACE}.svc,{leader}"])
    model = {"remote": {"model": "headrace-tiny", "kubernetes": {"service": service}, "tls_dir": "/run/secrets/headrace-engines"}}
    args = ["--device=cpu", "--kernels=reference", "--num-threads=1", "--num-kv-blocks=64"]
    engines = {"enabled": True, "stages": 2, "args": args, "tls": {"gateway": "g", "engine": "e"}}
    objects = rendered({"engines": engines, "config": {"models": [model]}})
    ranks = []
    for rank, template in enumerate(("leaderTemplate", "workerTemplate")):
        name = f"{service}-0" + f"-{rank}" * rank
        variables = {"POD_NAME": name, "POD_IP": f"127.0.0.{2 + rank}", "LWS_LEADER_ADDRESS": leader, "LWS_WORKER_INDEX": str(rank)}
        words = started_with(pod_of(objects, "LeaderWorkerSet engines", template), variables)
        for given, here in {**ports, "/run/secrets/headrace-engines": f"{folder}/site/rank-{service}.{NAMESPACE}.svc"}.items():
            words = [word.replace(given, here) for word in words]
        ranks.append(start(HEADRACE, *words))
    await ranks[0].said(f"{service}-0 serves")
    replica = f"{service}-0={leader}{ports[':7001']}"
    gateway = start(HEADRACE, "gateway", "--replica", replica, "--tls-dir", f"{folder}/site/gateway", "--port", "0")
    await gateway.said("is connected", "listening on ")
    await until(lambda: set(ready(port_of(gateway)).values()) == {""}, PATIENCE_S)
    status, answer = ask(port_of(gateway))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, CLOSED)
    assert (gateway.stop(), ranks[0].stop()) == (0, 0)
    assert ranks[1].process.wait(STOP_S) == 0, "its leader has drained"
