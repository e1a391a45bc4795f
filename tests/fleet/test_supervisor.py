"""A whole deployment of real processes: started, killed in every part, drained. Engines are fake, everything else is not."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from wire_kit import PATIENCE_S, read_all, request, signal_until_gone, socket_dir, until

import headrace
from headrace.core.errors import Unavailable
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.wire.client import ConnectionState, ReplicaClient

ENDLESS = 4000
MAIN = Path(__file__).resolve().parents[1] / "support" / "fleet_main.py"
SOURCE = Path(headrace.__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join(map(str, (SOURCE, MAIN.parent)))
"""The package that is tested here, whichever one is installed, and what the processes of tests share."""
SECRETS = {
    "HEADRACE_API_KEY": "a-secret-key",
    "HEADRACE_GATEWAY__API_KEYS": "[{key: a-secret-key}]",
    "HEADRACE_GATEWAY__API_KEYS__0__KEY": "a-secret-key",
    "HEADRACE_GATEWAY__SALT_KEY": "ab" * 16,
    "HEADRACE_BLOCK_KEY": "cd" * 16,
}
"""In the environment of every supervisor here, as somebody's shell may have them."""


FAR_KEY = "A_FOREIGN_SERVERS_KEY"


class Fleet:
    """A supervisor in a process of its own. `hear` reads what it says on stdout, `log` what it and its children printed."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        path = folder / "fleet.json"
        path.write_text(json.dumps({"run_dir": str(folder), "gateway": {"work": "idle"}, **config}))
        self._log = open(folder / "log", "wb")  # noqa: SIM115 - closed in close()
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **SECRETS, FAR_KEY: "a-far-key"}
        command = [sys.executable, str(MAIN), str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)
        self.pids: dict[str, int] = {}

    def hear(self) -> dict[str, Any]:
        """The next event. Raises AssertionError with the log when the process ended without one, or says nothing for long."""
        assert self.process.stdout is not None
        killer = threading.Timer(PATIENCE_S, self.process.kill)
        killer.start()
        line = self.process.stdout.readline()
        killer.cancel()
        assert line, f"the supervisor ended with {self.process.wait()}:\n{self.log}"
        said: dict[str, Any] = json.loads(line)
        self.pids.update(said.get("pids", {}))
        return said

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def run_dir(self) -> Path:
        [found] = self.folder.glob("headrace-*")
        return found

    def address(self, replica: int = 0) -> str:
        return f"unix:{self.run_dir}/e{replica}.sock"

    async def wait(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        for pid in self.pids.values():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """A zombie of somebody else's is as good as gone."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start() -> Iterator[Callable[..., Fleet]]:
    started: list[Fleet] = []
    with socket_dir() as folder:

        def start_one(**config: Any) -> Fleet:
            started.append(Fleet(folder, **config))
            return started[-1]

        yield start_one
        for fleet in started:
            fleet.close()


Start = Callable[..., Fleet]


async def test_everything_serves_in_a_private_directory_and_a_drain_leaves_nothing(start: Start) -> None:
    fleet = start(replicas=2, gateway={"work": "idle", "port": 0})
    ready = fleet.hear()
    assert set(ready["replicas"]) == {"org-fake-0", "org-fake-1"}
    assert ready["gateway"]["port"] != 0
    run_dir = fleet.run_dir
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    written = json.loads((run_dir / "gateway.json").read_text())
    assert [model["name"] for model in written["models"]] == ["org/fake"]
    assert len(written["models"][0]["replicas"]) == 2
    [key] = {json.loads(path.read_text())["block_key"] for path in run_dir.glob("e*.json")}
    secrets = {key, written["salt_key"]}
    assert all(secrets), "one of each, the same for all"
    for pid in fleet.pids.values():
        told = " ".join((*psutil.Process(pid).cmdline(), *psutil.Process(pid).environ().values()))
        assert not any(secret in told for secret in secrets)
        environment = psutil.Process(pid).environ()
        assert not set(environment) & set(SECRETS)
        assert environment["PYTHONPATH"] == PYTHONPATH
    assert (written["port"], written["timeouts"]["drain_s"]) == (ready["gateway"]["port"], 10)
    sessions = {os.getsid(pid) for pid in fleet.pids.values()}
    assert sessions == set(fleet.pids.values()), "each child leads its own session"
    fleet.process.send_signal(signal.SIGTERM)
    assert await fleet.wait() == 0
    assert not any(is_alive(pid) for pid in fleet.pids.values())
    assert not run_dir.exists()
    assert re.search(r"^[0-9: -]+ \[org-fake-1\] org-fake-1 serves ", fleet.log, re.MULTILINE), "its own event, under its label"


async def test_the_key_of_a_foreign_server_is_in_the_gateways_environment_alone(start: Start) -> None:
    fleet = start(upstreams=[{"url": "http://127.0.0.1:9/v1", "api_key_env": FAR_KEY}])
    fleet.hear()
    having = {name for name, pid in fleet.pids.items() if FAR_KEY in psutil.Process(pid).environ()}
    assert (having, set(fleet.pids)) == ({"gateway"}, {"gateway", "org-fake-0"})


async def test_a_killed_engine_is_started_again_and_its_requests_are_told(start: Start) -> None:
    fleet = start(fake={"step_seconds": 0.02})
    fleet.hear()
    async with ReplicaClient(fleet.address()) as replica:
        first = await replica.wait_connected(PATIENCE_S)
        streams = [replica.submit(request(f"r{i}", max_tokens=ENDLESS)) for i in range(3)]
        await streams[0].__anext__()
        os.kill(fleet.pids["org-fake-0"], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(Unavailable):
                await read_all(stream)
        second = await replica.wait_connected(PATIENCE_S)
        assert second.instance_id != first.instance_id
        assert len((await read_all(replica.submit(request("again"))))[0]) == 8
    fleet.process.send_signal(signal.SIGTERM)
    assert await fleet.wait() == 0
    assert "org-fake-0 was killed by SIGKILL; starting it again" in fleet.log


async def test_a_killed_gateway_is_started_again_where_it_was_and_engines_stay(start: Start) -> None:
    fleet = start(gateway={"work": "idle", "port": 0})
    taken = fleet.hear()["gateway"]["port"]
    assert taken != 0
    assert json.loads((fleet.run_dir / "gateway.json").read_text())["port"] == taken
    os.kill(fleet.pids["gateway"], signal.SIGKILL)
    await until(lambda: "gateway was killed by SIGKILL" in fleet.log)
    supervisor = psutil.Process(fleet.process.pid)
    await until(lambda: len(supervisor.children()) == 2 and not is_alive(fleet.pids["gateway"]))
    assert is_alive(fleet.pids["org-fake-0"])
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="Address already in use"):  # although no gateway of this test listens at all
            other.bind(("127.0.0.1", taken))
    fleet.process.send_signal(signal.SIGTERM)
    await fleet.wait()


async def test_several_gateways_share_a_port_and_one_that_is_killed_is_started_again_alone(start: Start) -> None:
    fleet = start(gateway={"work": "idle", "port": 0, "workers": 3})
    fleet.hear()
    gateways = {name: pid for name, pid in fleet.pids.items() if name.startswith("gateway")}
    assert set(gateways) == {"gateway-0", "gateway-1", "gateway-2"}
    assert [psutil.Process(gateways[f"gateway-{index}"]).cmdline()[-4:-2] for index in range(3)] == [["--worker", str(i)] for i in range(3)]
    os.kill(gateways["gateway-1"], signal.SIGKILL)
    await until(lambda: "gateway-1 was killed by SIGKILL" in fleet.log)
    supervisor = psutil.Process(fleet.process.pid)
    await until(lambda: len(supervisor.children()) == 4 and not is_alive(gateways["gateway-1"]))
    assert is_alive(gateways["gateway-0"])
    assert is_alive(gateways["gateway-2"])
    fleet.process.send_signal(signal.SIGTERM)
    assert await fleet.wait() == 0
    assert "stopping 3 gateways, then 1 engine" in fleet.log
    assert not any(is_alive(pid) for pid in fleet.pids.values())


async def test_a_killed_supervisor_takes_its_children_with_it(start: Start) -> None:
    fleet = start(replicas=2, fake={"stall_after_steps": 2}, gateway={"work": "stream", "num_tokens": ENDLESS, "workers": 2})
    fleet.hear()
    assert all(is_alive(pid) for pid in fleet.pids.values())
    fleet.process.kill()
    await until(lambda: not any(is_alive(pid) for pid in fleet.pids.values()))


async def test_a_drain_lets_the_running_stream_finish(start: Start) -> None:
    fleet = start(fake={"step_seconds": 0.02}, gateway={"work": "stream", "num_tokens": 60})
    fleet.hear()
    # Twice: a terminal and a wrapper both deliver one Ctrl-C.
    fleet.process.send_signal(signal.SIGTERM)
    fleet.process.send_signal(signal.SIGINT)
    assert await fleet.wait() == 0
    got = json.loads((fleet.folder / "gateway.out").read_text())
    assert got == fake_answer(request("r", max_tokens=60), 0, 60, FakeOptions())


async def test_an_insistent_signal_ends_everything_at_once(start: Start) -> None:
    fleet = start(fake={"step_seconds": 0.05}, gateway={"work": "stream", "num_tokens": ENDLESS}, drain_timeout_s=600)
    fleet.hear()
    await signal_until_gone(fleet.process, signal.SIGINT)
    assert "stopping the gateway, then 1 engine" in fleet.log
    assert await fleet.wait() == 75
    assert not any(is_alive(pid) for pid in fleet.pids.values())


async def test_a_broken_checkpoint_ends_the_fleet_with_the_engines_reason(start: Start) -> None:
    fleet = start(replicas=2, fake={"refuse": "model.safetensors is truncated"})
    said = fleet.hear()
    assert said["event"] == "failed"
    assert said["kind"] == "ConfigError"
    assert "model.safetensors is truncated" in said["message"]
    assert await fleet.wait() == 3
    assert not list(fleet.folder.glob("headrace-*"))


async def test_a_process_that_never_serves_is_given_up_after_a_few_tries(start: Start) -> None:
    fleet = start(gateway={"work": "die"})
    said = fleet.hear()
    assert (said["event"], said["kind"]) == ("failed", "FleetFailed")
    assert "gateway ended with status 9; it was started 3 times" in said["message"]
    assert "the gateway's last words" in fleet.log
    assert await fleet.wait() == 3


@pytest.mark.slow
async def test_an_engine_that_dies_in_service_again_and_again_is_started_again_and_again(start: Start) -> None:
    fleet = start(fake={"die_after_steps": 4})
    fleet.hear()
    instances = set()
    async with ReplicaClient(fleet.address()) as replica:
        for i in range(3):
            instances.add((await replica.wait_connected(PATIENCE_S)).instance_id)
            with pytest.raises(Unavailable):
                await read_all(replica.submit(request(f"r{i}", max_tokens=50)))
            await until(lambda: replica.state is ConnectionState.DOWN)
    assert len(instances) == 3
    assert "the fake device is gone" in fleet.log
    fleet.process.send_signal(signal.SIGTERM)
    assert await fleet.wait() == 0
