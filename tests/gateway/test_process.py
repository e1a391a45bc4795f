"""Tests the gateway as a process, over the real wire: stopped and killed engines, drain, reload, leash, and what a killed one leaves.

One folder with three engines serves all tests of this file. Those with the fixture `shared` use one gateway, which the last of them drains.
What a gateway answers and how it follows a change is shown in one process, in test_reload.py and its neighbours.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import text_kit
import yaml
from gateway_processes import ENGINE, GATEWAY, Child, child
from patience import PATIENCE_S, until
from server_kit import is_alive
from typer.testing import CliRunner
from wire_kit import socket_dir

from headrace.cli.main import app
from headrace.wire.leash import ORPHANED

pytestmark = pytest.mark.process

VOCAB = 345
FAKE = {"vocab_size": VOCAB, "step_seconds": 0.01}
ENDLESS = 4000
KEY, OTHER_KEY = "a-key-of-clients", "another-key"


class Place:
    """The folder with three engines, r0 to r2, and what is said of them in a gateway's file."""

    def __init__(self, folder: Path, text_folder: Path) -> None:
        self.folder = folder
        self.text_folder = text_folder
        self.engines: dict[str, Child] = {}

    def replicas(self, *names: str) -> list[dict[str, str]]:
        return [{"name": name, "address": f"unix:{self.folder}/{name}"} for name in names]

    def write(self, name: str, *replicas: str, **changes: Any) -> Path:
        """A file as the supervisor writes it."""
        models = [{"name": "fox", "folder": str(self.text_folder), "replicas": self.replicas(*replicas)}]
        path = self.folder / name
        path.write_text(json.dumps({"models": models, "port": 0, "request_log": "off", **changes}))
        return path


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with socket_dir() as folder, ExitStack() as stack:
        text_folder = text_kit.save_byte_level(folder / "fox")
        (text_folder / "config.json").write_text("{}")
        made = Place(folder, text_folder)
        for name in ("r0", "r1", "r2"):
            path = folder / f"{name}.json"
            address = f"unix:{folder}/{name}"
            path.write_text(json.dumps({"replica": name, "address": address, "engine": {"model": str(text_folder)}, "fake": FAKE}))
            made.engines[name] = stack.enter_context(child(ENGINE, path))
        for engine in made.engines.values():
            engine.wait_ready()
        yield made
        for engine in made.engines.values():
            if engine.process.poll() is None:
                engine.signal(signal.SIGCONT)


class Gateway:
    """A running gateway under a supervisor's leash."""

    def __init__(self, process: Child, file: Path) -> None:
        self.process = process
        self.file = file
        self.url = f"http://127.0.0.1:{process.wait_ready()['port']}"
        self.until("/ready?strict", 200)

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S)

    def get(self, path: str) -> httpx2.Response:
        with self.client() as client:
            return client.get(path)

    def until(self, path: str, status: int) -> None:
        until(lambda: self.get(path).status_code == status)

    def ask(self, event: str) -> dict[str, Any]:
        """What it answers on its leash, without the id, which is the request's."""
        self.process.leash.sendall(json.dumps({"event": event, "id": 5}).encode() + b"\n")
        said = self.process.hear()
        assert said.pop("id") == 5
        return said

    def states(self) -> dict[str, tuple[bool, str, int]]:
        """Of each replica: whether it is ready, why not, and the number of open requests."""
        replicas = self.ask("status")["models"]["fox"]["replicas"]
        return {name: (said["ready"], said["reason"], said["open"]) for name, said in replicas.items()}


@contextmanager
def gateway(place: Place, name: str, *replicas: str, **changes: Any) -> Iterator[Gateway]:
    file = place.write(name, *replicas, **changes)
    with child(GATEWAY, file) as process:
        yield Gateway(process, file)


@pytest.fixture(scope="module")
def shared(place: Place) -> Iterator[Gateway]:
    with gateway(place, "gateway.json", "r0", "r1", timeouts={"failover_s": 0}) as made:
        yield made


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fox", "messages": [{"role": "user", "content": "Hello"}], **fields}


def answered(client: httpx2.Client, **fields: Any) -> httpx2.Response:
    return client.post("/v1/chat/completions", json=chat(max_tokens=3, **fields))


@contextmanager
def opened(client: httpx2.Client, **fields: Any) -> Iterator[Iterator[str]]:
    """A stream that has begun: the lines of its data."""
    with client.stream("POST", "/v1/chat/completions", json=chat(stream=True, ignore_eos=True, **fields)) as stream:
        lines = (line for line in stream.iter_lines() if line)
        assert next(lines).startswith("data: ")
        yield lines


def error_of(line: str) -> tuple[str, str]:
    assert "unix:" not in line
    error = json.loads(line.removeprefix("data: "))["error"]
    return error["type"], error["code"]


UNAVAILABLE = ("service_unavailable_error", "unavailable")


# -- one gateway -------------------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_its_blocks(shared: Gateway) -> None:
    idle = [
        line
        for name in ("r0", "r1")
        for line in (
            f'headrace_requests_running{{model="fox",replica="{name}"}} 0.0',
            f'headrace_kv_blocks{{model="fox",replica="{name}",state="used"}} 1.0',
        )
    ]
    with shared.client() as client:
        with opened(client, max_tokens=ENDLESS):
            pass
        until(lambda: all(line in client.get("/metrics").text for line in idle))


def test_replicas_change_through_the_leash_while_a_stream_runs(shared: Gateway, place: Place) -> None:
    """Another replica comes, the stream's own is retired, and its connection is closed once the stream has ended."""
    place.write("gateway.json", "r0", timeouts={"failover_s": 0})
    assert shared.ask("reload") == {"event": "reloaded"}
    until(lambda: set(shared.states()) == {"r0"})
    with shared.client() as client, shared.client() as other:
        with opened(client, max_tokens=ENDLESS) as lines:
            assert shared.states() == {"r0": (True, "", 1)}
            place.write("gateway.json", "r1", timeouts={"failover_s": 0})
            assert shared.ask("reload") == {"event": "reloaded"}
            assert shared.states()["r0"] == (False, "retired", 1)
            shared.until("/ready", 200)
            assert answered(other).status_code == 200
            assert [next(lines).startswith("data: ") for _ in range(5)] == [True] * 5
        idle = {"r1": (True, "", 0)}
        until(lambda: shared.states() == idle)
    place.write("gateway.json", "r1", port=1, timeouts={"failover_s": 0})
    said = shared.ask("reload")
    assert (said["event"], "port" in said["reason"]) == ("refused", True)
    assert shared.states() == idle


def test_a_stopped_engine_is_not_ready_until_it_goes_on(shared: Gateway, place: Place) -> None:
    place.write("gateway.json", "r0", "r1", timeouts={"failover_s": 0})
    assert shared.ask("reload") == {"event": "reloaded"}
    shared.until("/ready?strict", 200)
    with shared.client() as client:
        place.engines["r0"].signal(signal.SIGSTOP)
        shared.until("/ready?strict", 503)
        assert client.get("/ready").status_code == client.get("/health").status_code == 200, "the other one serves on"
        assert [answered(client).status_code for _ in range(3)] == [200] * 3
        place.engines["r1"].signal(signal.SIGSTOP)
        shared.until("/ready", 503)
        assert client.get("/ready").json()["reason"].startswith("fox/r")
        assert client.get("/live").status_code == 200
        refused = answered(client)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        for name in ("r0", "r1"):
            place.engines[name].signal(signal.SIGCONT)
        shared.until("/ready?strict", 200)


def test_a_killed_engine_ends_its_streams_with_an_error_that_can_be_retried(shared: Gateway, place: Place) -> None:
    place.write("gateway.json", "r0", timeouts={"failover_s": 0})
    assert shared.ask("reload") == {"event": "reloaded"}
    until(lambda: set(shared.states()) == {"r0"})
    with shared.client() as client:
        with opened(client, max_tokens=ENDLESS) as lines:
            place.engines["r0"].signal(signal.SIGKILL)
            assert error_of(list(lines)[-1]) == UNAVAILABLE
        shared.until("/ready", 503)
        shared.until("/health", 503)
        refused = answered(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")


def test_sigterm_lets_a_running_stream_finish_and_refuses_later_requests(shared: Gateway, place: Place) -> None:
    place.write("gateway.json", "r1", timeouts={"failover_s": 0, "drain_s": PATIENCE_S})
    assert shared.ask("reload") == {"event": "reloaded"}
    shared.until("/ready", 200)
    with shared.client() as client, shared.client() as other, opened(client, max_tokens=60) as lines:
        shared.process.signal(signal.SIGTERM)
        while (refused := answered(other)).status_code == 200:
            pass
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert list(lines)[-1] == "data: [DONE]"
    assert shared.process.wait() == 0


# -- other gateways ----------------------------------------------------------------------------------------------------------------


def test_an_insistent_signal_ends_streams_with_an_error_event(place: Place) -> None:
    with gateway(place, "insisted.json", "r1", timeouts={"drain_s": 600}) as made, made.client() as client:
        with opened(client, max_tokens=ENDLESS) as lines:
            made.process.signal(signal.SIGTERM)
            until(lambda: made.get("/ready").status_code == 503)
            made.process.signal(signal.SIGTERM)
            assert error_of(list(lines)[-1]) == UNAVAILABLE
        assert made.process.wait() == 75


def test_a_gateway_that_is_killed_loses_no_usage_and_no_child_of_it_stays(place: Place) -> None:
    """The command reads with the gateway running, after its death, and with another one, which leaves when its supervisor is gone."""
    state = place.folder / "state"
    state.mkdir(mode=0o700)

    def usage(*words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(CliRunner().invoke(app, ["usage", "--json", "--state", str(state), *words]).stdout)
        return found

    with gateway(place, "killed.json", "r1", state=str(state), prices={"fox": {"output": 1.0}}) as made, made.client() as client:
        for _ in range(20):
            assert answered(client).status_code == 200
        # What was answered is written ten milliseconds later, if nothing keeps the thread from it.
        until(lambda: re.findall(r"^headrace_usage_records_total (\S+)$", client.get("/metrics").text, re.MULTILINE) == ["20.0"])
        until(lambda: sum(row["requests"] for row in usage()) == 20)
        children = psutil.Process(made.process.process.pid).children(recursive=True)
        assert len(children) > 1, "the host of the text workers, and those"
        children[-1].suspend()  # as one in the midst of a job
        made.process.signal(signal.SIGKILL)
        made.process.wait()
        [row] = usage("--by", "model")
        assert (row["model"], row["requests"], row["completion_tokens"], row["cost_nanos"]) == ("fox", 20, 60, 60_000)
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert not [process for process in alive if is_alive(process.pid)]
    with child(GATEWAY, place.folder / "killed.json") as second:
        second.wait_ready()
        assert usage()[0]["requests"] == 20
        second.leash.close()
        assert second.wait() == ORPHANED


class ByHand:
    """`headrace gateway --config FILE`, its file and its log."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], port: int) -> None:
        self.file, self.log_file, self.process = folder / "headrace.yaml", folder / "log", process
        self.url = f"http://127.0.0.1:{port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def reload(self, content: Mapping[str, Any] | str, outcome: str) -> None:
        """Write the file, send SIGHUP, and wait for a line of the log that says `outcome`."""
        num_before = self.log.count(outcome)
        self.file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.log.count(outcome) > num_before, said=lambda: self.log)

    def client(self, key: str = KEY) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S, headers={"authorization": f"Bearer {key}"})


@contextmanager
def by_hand(folder: Path, model: Mapping[str, Any], server: Mapping[str, Any]) -> Iterator[ByHand]:
    """server: the file's section, without the port, which is a free one"""
    with socket.socket() as held, open(folder / "log", "wb") as log:
        # Bound and not listening, it keeps the port from other programs; the gateway listens there all the same, as both reuse addresses.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        (folder / "headrace.yaml").write_text(yaml.safe_dump({"models": [model], "gateway": {**server, "port": port}}))
        command = [*GATEWAY, "--config", str(folder / "headrace.yaml")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=environment)
        try:
            yield ByHand(folder, process, port)
        finally:
            process.kill()
            process.wait()


def contents(lines: Iterator[str], num: int) -> str:
    """The text of the next `num` events of a stream. Fails where it ends."""
    events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(num)]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def test_a_hangup_reloads_a_gateway_that_was_started_by_hand_and_cuts_no_stream(place: Place) -> None:
    """Every stream says what it says undisturbed, whose replica is retired and whose key is taken away meanwhile, too."""

    def model(*replicas: str) -> dict[str, Any]:
        return {"name": "fox", "remote": {"model": str(place.text_folder), "replicas": place.replicas(*replicas)}}

    keys = {"api_keys": [{"key": KEY}]}
    with by_hand(place.folder, model("r1"), keys) as made, made.client() as client, ExitStack() as stack:

        def is_ready(path: str) -> bool:
            assert made.process.poll() is None, made.log
            try:
                return client.get(path).status_code == 200
            except httpx2.TransportError:
                return False

        until(lambda: is_ready("/ready"))
        seeds = range(3)
        server: dict[str, Any] = {**keys, "port": int(made.url.rpartition(":")[2])}

        def stream(seed: int) -> Iterator[str]:
            return stack.enter_context(opened(stack.enter_context(made.client()), max_tokens=ENDLESS, seed=seed))

        with ExitStack() as alone:
            lines = [alone.enter_context(opened(alone.enter_context(made.client()), max_tokens=ENDLESS, seed=seed)) for seed in seeds]
            expected = [contents(each, 90) for each in lines]
        assert len(set(expected)) == len(seeds)
        running = [stream(seed) for seed in seeds]
        got = [contents(each, 30) for each in running]

        made.reload({"models": [model("r1", "r2")], "gateway": server}, "was read again")
        until(lambda: is_ready("/ready?strict"))
        # a file with a fault, and one that takes a restart: both change nothing
        made.reload("models: [", "stays as it is")
        made.reload({"models": [model("r1")], "gateway": {**server, "port": server["port"] + 1}}, "stays as it is")
        assert is_ready("/ready?strict")
        got = [text + contents(each, 30) for text, each in zip(got, running, strict=True)]
        # the replica of the streams is retired, a key comes and the streams' own key goes
        later = {**server, "api_keys": [{"key": OTHER_KEY}], "limits": {"max_requests": 50}}
        made.reload({"models": [model("r2")], "gateway": later}, "was read again")
        assert client.get("/v1/models").status_code == 401
        with made.client(OTHER_KEY) as newer:
            assert newer.get("/load").json()["server_load"] == len(seeds), "all streams still run"
            got = [text + contents(each, 30) for text, each in zip(got, running, strict=True)]
            # An event may have several tokens, where the gateway was late.
            assert all(text.startswith(alone) or alone.startswith(text) for text, alone in zip(got, expected, strict=True))
            assert answered(newer).status_code == 200
        assert not any(key in made.log for key in (KEY, OTHER_KEY))
        stack.close()
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(PATIENCE_S) == 0


def test_what_it_refuses_goes_to_the_supervisor_who_does_not_try_again(place: Place) -> None:
    with child(GATEWAY, place.write("wrong.json", "r1", prot=1)) as refused:
        said = refused.hear()
        assert (said["event"], said["can_retry"], "Did you mean port?" in said["reason"]) == ("failed", False, True)
        assert refused.wait() == 2
