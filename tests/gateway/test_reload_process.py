"""A gateway that was started by hand with a file, and SIGHUP while its streams run: none is cut, and each says what it says undisturbed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import text_kit
import yaml
from gateway_processes import ENGINE, GATEWAY, PATIENCE_S, child
from wire_kit import socket_dir

FAKE = {"vocab_size": 345, "step_seconds": 0.01}
KEY = "a-key-of-clients"


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_dir() as path:
        yield path


class Gateway:
    """`headrace gateway --config FILE`, its file and its log."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], port: int) -> None:
        self.file, self.log_file, self.process = folder / "headrace.yaml", folder / "log", process
        self.url = f"http://127.0.0.1:{port}"
        self.port = port

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def reload(self, content: dict[str, Any] | str, outcome: str) -> None:
        """Write the file, send SIGHUP, and wait for a line of the log that says `outcome`."""
        num_before = self.log.count(outcome)
        self.file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        self.process.send_signal(signal.SIGHUP)
        eventually(lambda: self.log.count(outcome) > num_before)

    def client(self, key: str = KEY) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S, headers={"authorization": f"Bearer {key}"})


def eventually(condition: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_S
        time.sleep(0.02)


@contextmanager
def by_hand(folder: Path, content: dict[str, Any]) -> Iterator[Gateway]:
    """content: the file, without the port, which is a free one"""
    with socket.socket() as held, open(folder / "log", "wb") as log:
        # Bound and not listening, it keeps the port from other programs; the gateway listens there all the same, as both reuse addresses.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        content["gateway"]["port"] = port = held.getsockname()[1]
        (folder / "headrace.yaml").write_text(yaml.safe_dump(content))
        command = [*GATEWAY, "--config", str(folder / "headrace.yaml")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=environment)
        gateway = Gateway(folder, process, port)
        try:
            yield gateway
        except BaseException:
            print(gateway.log)
            raise
        finally:
            process.kill()
            process.wait(PATIENCE_S)


@contextmanager
def engines(folder: Path, texts: dict[str, Path], **step_seconds: float) -> Iterator[None]:
    """A fake engine per replica, which listens at a socket of its name.

    texts         replica -> the folder that it serves
    step_seconds  replica -> those of its steps, where they are not FAKE's
    """
    with ExitStack() as stack:
        started = []
        for name, text in texts.items():
            config = folder / f"{name}.json"
            fake = FAKE | {"step_seconds": step_seconds.get(name, FAKE["step_seconds"])}
            config.write_text(
                json.dumps({"replica": name, "address": f"unix:{folder}/{name}", "engine": {"model": str(text)}, "fake": fake})
            )
            started.append(stack.enter_context(child(ENGINE, config)))
        for engine in started:
            engine.wait_ready()
        yield


def model(name: str, folder: Path, text: Path, *replicas: str) -> dict[str, Any]:
    listed = [{"name": replica, "address": f"unix:{folder}/{replica}"} for replica in replicas]
    return {"name": name, "remote": {"model": str(text), "replicas": listed}}


def stream(gateway: Gateway, seed: int, name: str = "fox", num_tokens: int = 1200) -> str:
    """The text of a whole stream. Fails where it does not end as it should."""
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "stream": True, "seed": seed, "ignore_eos": True}
    with gateway.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "max_tokens": num_tokens})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-500:]
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def model_folder(path: Path) -> Path:
    """A tokenizer and what else a model's folder must have."""
    text_kit.save_byte_level(path)
    (path / "config.json").write_text("{}")
    return path


def test_streams_run_over_every_reload(folder: Path) -> None:
    text, other = model_folder(folder / "fox"), model_folder(folder / "owl")
    seeds = range(4)
    with (
        engines(folder, {"quick": text, "r0": text, "r1": text, "o0": other}, quick=0.001),
        by_hand(folder, {"models": [model("fox", folder, text, "quick")], "gateway": {"api_keys": [{"key": KEY}]}}) as gateway,
        concurrent.futures.ThreadPoolExecutor(8) as threads,
        gateway.client() as client,
    ):
        server: dict[str, Any] = {"port": gateway.port, "api_keys": [{"key": KEY}]}

        def is_ready(path: str) -> bool:
            try:
                return client.get(path).status_code == 200
            except httpx2.TransportError:
                return False

        def open_requests() -> int:
            return int(client.get("/load").json()["server_load"])

        eventually(lambda: is_ready("/ready"))
        alone = list(threads.map(lambda seed: stream(gateway, seed), seeds))
        assert len(set(alone)) == len(alone)
        gateway.reload({"models": [model("fox", folder, text, "r0")], "gateway": server}, "was read again")
        eventually(lambda: is_ready("/ready"))
        running = [threads.submit(stream, gateway, seed) for seed in seeds]
        eventually(lambda: open_requests() == len(seeds))

        # another replica, and another model with a tokenizer of its own
        fox = model("fox", folder, text, "r0", "r1")
        gateway.reload({"models": [fox, model("owl", folder, other, "o0")], "gateway": server}, "was read again")
        eventually(lambda: is_ready("/ready?strict"))
        assert stream(gateway, 9, "owl", 5)
        # a file with a fault, and one that takes a restart: both change nothing
        gateway.reload("models: [", "stays as it is")
        gateway.reload({"models": [fox], "gateway": {**server, "port": gateway.port + 1}}, "stays as it is")
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["fox", "owl"]
        # the replica of the streams is retired, the other model leaves, a key comes and the streams' own key goes
        keys = {**server, "api_keys": [{"key": "another-key"}], "limits": {"max_requests": 50}}
        gateway.reload({"models": [model("fox", folder, text, "r1")], "gateway": keys}, "was read again")
        assert client.get("/v1/models").status_code == 401
        with gateway.client("another-key") as newer:
            assert [card["id"] for card in newer.get("/v1/models").json()["data"]] == ["fox"]
            assert newer.get("/load").json()["server_load"] == len(seeds), "all streams still run"
        assert [future.result(PATIENCE_S) for future in running] == alone
        assert KEY not in gateway.log
        assert "another-key" not in gateway.log
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(PATIENCE_S) == 0
