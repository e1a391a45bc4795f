"""Engines and a gateway on addresses of their own, started one by one as an operator would, over TLS: answers, and each fault by its name.

Addresses 127.0.0.2 and so on stand for machines; with certificates the wire treats them as any other address.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from server_kit import LIVELY_S, SOURCE, START_S, STOP_S
from tls_kit import LONG_AGO, TOKEN, authority, write_certificates, write_whole
from wire_kit import socket_dir, until

from headrace.fleet.authority import pem_of_certificate
from headrace.wire.tls.files import TlsRole

HEADRACE = str(Path(sys.executable).with_name("headrace"))
QUESTION = "What is the capital of France?"
CLOSED = "The capital of France is Paris."


class Process:
    """One command. `log` is what it printed so far."""

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
    connection = HTTPConnection("127.0.0.1", port, timeout=LIVELY_S)
    content = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 30, **body}
    connection.request("POST", "/v1/chat/completions", json.dumps(content), {"content-type": "application/json"})
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, {"events": data.decode()} if body.get("stream") else json.loads(data)


def ready(port: int) -> dict[str, str]:
    """Replica -> why it is not ready."""
    connection = HTTPConnection("127.0.0.1", port, timeout=LIVELY_S)
    connection.request("GET", "/ready")
    replicas = json.loads(connection.getresponse().read())["replicas"]
    connection.close()
    return {replica["replica"]: replica["reason"] for replica in replicas}


def port_of(process: Process) -> int:
    return int(process.log.partition("listening on http://127.0.0.1:")[2].partition(";")[0])


def address_of(engine: Process) -> str:
    """Where an engine with port 0 listens."""
    return engine.log.rpartition(" at ")[2].split('"')[0].split()[0]


async def test_two_engines_and_a_gateway_are_set_up_by_hand_and_answer_over_tls(folder: Path, start: Start) -> None:
    site = folder / "site"
    init = start(HEADRACE, "tls", "init", str(site), "--host", "127.0.0.2", "--host", "127.0.0.3")
    assert init.process.wait(START_S) == 0, init.log
    hosts = ("127.0.0.2", "127.0.0.3")
    engines = [start(HEADRACE, "engine", "--listen", f"{host}:0", "--tls-dir", f"{site}/engine-{host}") for host in hosts]
    for engine in engines:
        await engine.said("headrace-tiny serves")
    replicas = [word for host, engine in zip(hosts, engines, strict=True) for word in ("--replica", f"{host}={address_of(engine)}")]
    gateway = start(HEADRACE, "gateway", *replicas, "--tls-dir", f"{site}/gateway", "--port", "0")
    await gateway.said("replica 127.0.0.2 is connected", "replica 127.0.0.3 is connected", "listening on ")
    port = port_of(gateway)
    await until(lambda: ready(port) == {"127.0.0.2": "", "127.0.0.3": ""})
    answers = [ask(port) for _ in range(4)]
    assert [(status, answer["choices"][0]["message"]["content"]) for status, answer in answers] == [(200, CLOSED)] * 4
    status, streamed = ask(port, stream=True)
    events = [json.loads(line[6:]) for line in streamed["events"].splitlines() if line.startswith("data: {")]
    assert (status, "".join(event["choices"][0]["delta"].get("content") or "" for event in events)) == (200, CLOSED)
    assert streamed["events"].endswith("data: [DONE]\n\n")

    engines[1].stop(signal.SIGKILL)
    await until(lambda: ready(port) == {"127.0.0.2": "", "127.0.0.3": "not connected"})
    assert ask(port)[0] == 200, "the other engine answers"
    address = address_of(engines[1])
    again = start(HEADRACE, "engine", "--listen", address, "--tls-dir", f"{site}/engine-127.0.0.3")
    await again.said("headrace-tiny serves")
    await until(lambda: ready(port)["127.0.0.3"] == "")
    assert (gateway.stop(), engines[0].stop(), again.stop()) == (0, 0, 0)
    assert list(folder.glob("headrace-wire-*")) == []


def fake_engine(folder: Path, start: Start, name: str, host: str, tls: dict[str, str] | None) -> Process:
    """A fake model behind the real wire: it starts faster."""
    path = folder / f"{name}.json"
    content = {"replica": name, "address": f"{host}:0", "token": TOKEN, "engine": {"model": "fake"}}
    write_whole(path, json.dumps({**content, **({"tls": tls} if tls else {})}).encode())
    return start(sys.executable, "-m", "headrace.lab.fake_engine", "--config", str(path))


async def test_each_fault_between_machines_is_named_in_both_logs(folder: Path, start: Start, trained_folder: Path) -> None:
    """One gateway with a model for each fault: its other models are not touched by them."""
    from dataclasses import asdict

    ours, strange = authority(), authority()

    def files(name: str, role: TlsRole, *names: str, **changes: Any) -> dict[str, str]:
        return asdict(write_certificates(folder / name, changes.pop("signer", ours), role, *names, **changes))

    engines = {
        "good": fake_engine(folder, start, "good", "127.0.0.2", files("e-good", TlsRole.ENGINE, "127.0.0.2")),
        "expired": fake_engine(folder, start, "expired", "127.0.0.3", files("e-old", TlsRole.ENGINE, "127.0.0.3", now=LONG_AGO)),
        "strange": fake_engine(folder, start, "strange", "127.0.0.3", files("e-strange", TlsRole.ENGINE, "127.0.0.3", signer=strange)),
        "misnamed": fake_engine(folder, start, "misnamed", "127.0.0.3", files("e-name", TlsRole.ENGINE, "gpu9")),
        "plain": fake_engine(folder, start, "plain", "127.0.0.4", None),
    }
    for engine in engines.values():
        await engine.said(" serves ")
    gateway = files("gateway", TlsRole.GATEWAY)
    old = files("g-old", TlsRole.GATEWAY, now=LONG_AGO)
    unknown = files("g-unknown", TlsRole.GATEWAY, signer=strange)
    write_whole(Path(unknown["ca"]), pem_of_certificate(strange.certificate) + pem_of_certificate(ours.certificate))
    write_whole(folder / "token", TOKEN.encode())
    write_whole(folder / "wrong-token", b"0" * 32)
    faults = {
        "engine-expired": ("expired", gateway, "the engine's certificate has expired", "refused this engine's certificate: it has expired"),
        "engine-strange": ("strange", gateway, "the engine's certificate was not signed", "refused this engine's certificate: it was not"),
        "engine-misnamed": ("misnamed", gateway, "not valid for '127.0.0.3'", "not for the name or address that was dialled"),
        "gateway-expired": ("good", old, "refused this gateway's certificate: it has expired", "the gateway's certificate has expired"),
        "gateway-unknown": ("good", unknown, "refused this gateway's certificate: it was not", "the gateway's certificate was not signed"),
        "tls-at-plain": ("plain", gateway, "the engine does not speak TLS", "it speaks TLS, and no certificates"),
        "plain-at-tls": ("good", None, "the engine speaks TLS, and no certificates", "it sent plain text, and this engine speaks TLS"),
    }

    def section(name: str, engine: str, tls: dict[str, str] | None, token: str = "token") -> dict[str, Any]:
        remote = {"model": str(trained_folder), "token_file": str(folder / token), "tls": tls}
        return {"name": name, "remote": {**remote, "replicas": [{"name": name, "address": address_of(engines[engine])}]}}

    models = [section(name, engine, tls) for name, (engine, tls, *_) in faults.items()]
    models += [section("well", "good", gateway), section("wrong-token", "good", gateway, "wrong-token")]
    config = folder / "headrace.yaml"
    config.write_text(json.dumps({"models": models, "gateway": {"port": 0}}))
    running = start(HEADRACE, "gateway", "--config", str(config))
    for name, (at, _, gateway_says, engine_says) in faults.items():
        await running.said(f"replica {name} is down", gateway_says)
        await engines[at].said("refused a connection from 127.0.0.1", engine_says, timeout_s=LIVELY_S)
    await running.said("unauthenticated: the engine's token is missing or wrong")
    await engines["good"].said("refused a call: the engine's token is missing or wrong")
    await running.said("replica well is connected")
    await running.said("listening on ")
    await until(lambda: [name for name, reason in ready(port_of(running)).items() if not reason] == ["well"])
    assert ask(port_of(running), "engine-expired")[0] == 503

    for name in ("ca", "certificate", "key"):  # renewed in place: nothing is restarted
        shutil.copy2(gateway[name], old[name] + ".new")
        os.replace(old[name] + ".new", old[name])
    await running.said("replica gateway-expired is connected")
    assert running.stop() == 0


@pytest.mark.parametrize("role", list(TlsRole))
async def test_an_end_with_the_other_ends_certificate_does_not_start(folder: Path, start: Start, role: TlsRole) -> None:
    site = folder / "site"
    init = start(HEADRACE, "tls", "init", str(site), "--host", "127.0.0.2")
    assert init.process.wait(START_S) == 0, init.log
    if role is TlsRole.ENGINE:
        ended = start(HEADRACE, "engine", "--listen", "127.0.0.2:0", "--tls-dir", str(site / "gateway"))
    else:
        ended = start(HEADRACE, "gateway", "--replica", "one=127.0.0.2:7001", "--tls-dir", str(site / "engine-127.0.0.2"), "--port", "0")
    assert ended.process.wait(START_S) == (78 if role is TlsRole.ENGINE else 2)
    assert f"tls.crt is for another role (its extended key usage). It must be a certificate for the {role}." in ended.log
