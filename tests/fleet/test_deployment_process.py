"""Tests a deployment of real processes: it serves, restarts what dies, changes while it runs, and leaves nothing behind.

Engines are fake, everything else is not. What the supervisor decides, and when, is in test_supervisor.py and test_control.py, on virtual
time.
"""

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import PATIENCE_S, eventually
from server_kit import is_alive
from wire_kit import read_all, request, socket_dir

import headrace
from headrace.cli.admin.client import AdminClient, find_deployment
from headrace.core.errors import Unavailable
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.wire.client import ReplicaClient

pytestmark = pytest.mark.process

ENDLESS = 4000
MAIN = Path(__file__).resolve().parents[1] / "support" / "fleet_main.py"
SOURCE = Path(headrace.__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join(map(str, (SOURCE, MAIN.parent)))
"""The package that is tested here, whichever one is installed, and what the processes of tests share."""


class Fleet:
    """A supervisor in a process of its own. `hear` reads what it says on stdout, `log` what it and its children printed."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self._path = folder / "fleet.json"
        self._path.write_text(json.dumps({"run_dir": str(folder), "gateway": {"work": "idle", "port": 0}, **config}))
        self._log = open(folder / "log", "wb")  # noqa: SIM115 - closed in close()
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        command = [sys.executable, str(MAIN), str(self._path)]
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

    def write(self, **changes: Any) -> None:
        """The file, to be read at the next reload."""
        self._path.write_text(json.dumps({**json.loads(self._path.read_text()), **changes}))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def run_dir(self) -> Path:
        [found] = self.folder.glob("headrace-*")
        return found

    def processes(self) -> dict[str, int | None]:
        """Gateways and replicas, those that leave too -> process id; None of one that does not serve."""
        status = AdminClient(find_deployment(self.folder)).status()
        found = {gateway["name"]: gateway["pid"] if gateway["serving"] else None for gateway in status["gateways"]}
        for replica in (replica for model in status["models"] for replica in model["replicas"]):
            found[replica["name"]] = replica["pids"][0] if replica["phase"] == "serving" and replica["ready"] else None
        return found

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


@contextmanager
def started(**config: Any) -> Iterator[Fleet]:
    with socket_dir() as folder:
        fleet = Fleet(folder, **config)
        try:
            yield fleet
        finally:
            fleet.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Two engines behind two gateways, for the tests from here on: each leaves it serving, until the last one stops it."""
    with started(models={"tiny": {"replicas": 2}}, gateway={"work": "idle", "port": 0, "workers": 2}, fake={"step_seconds": 0.02}) as made:
        made.hear()
        yield made


async def serving(fleet: Fleet, *names: str) -> dict[str, int]:
    """The process ids, once there are these processes alone, and all of them serve."""
    async with asyncio.timeout(PATIENCE_S):
        while set(found := fleet.processes()) != set(names) or None in found.values():
            await asyncio.sleep(0.02)
    pids = {name: pid for name, pid in found.items() if pid is not None}
    fleet.pids.update(pids)
    return pids


GATEWAYS = ("gateway-0", "gateway-1")


async def test_everything_serves_in_a_private_directory(fleet: Fleet) -> None:
    assert set(fleet.pids) == {*GATEWAYS, "tiny-0", "tiny-1"}
    run_dir = fleet.run_dir
    assert [stat.S_IMODE((run_dir / name).stat().st_mode) for name in (".", "admin.sock", "admin.token")] == [0o700, 0o600, 0o600]
    written = json.loads((run_dir / "gateway.json").read_text())
    assert [len(model["replicas"]) for model in written["models"]] == [2]
    [key] = {json.loads(path.read_text())["block_key"] for path in run_dir.glob("e*.json")}
    for pid in fleet.pids.values():
        told = " ".join((*psutil.Process(pid).cmdline(), *psutil.Process(pid).environ().values()))
        assert not any(secret in told for secret in (key, written["salt_key"]))
    assert {os.getsid(pid) for pid in fleet.pids.values()} == set(fleet.pids.values()), "each child leads its own session"


async def test_a_killed_engine_is_started_again_and_its_requests_are_told(fleet: Fleet) -> None:
    async with ReplicaClient(f"unix:{fleet.run_dir}/e0.sock") as replica:
        first = await replica.wait_connected(PATIENCE_S)
        streams = [replica.submit(request(f"r{i}", max_tokens=ENDLESS)) for i in range(3)]
        await streams[0].__anext__()
        os.kill(fleet.pids["tiny-0"], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(Unavailable):
                await read_all(stream)
        second = await replica.wait_connected(PATIENCE_S)
        assert second.instance_id != first.instance_id
        assert len((await read_all(replica.submit(request("again"))))[0]) == 8
    assert "tiny-0 was killed by SIGKILL; starting it again" in fleet.log
    await serving(fleet, *GATEWAYS, "tiny-0", "tiny-1")


async def test_one_of_several_gateways_that_is_killed_is_started_again_alone_and_the_port_stays_theirs(fleet: Fleet) -> None:
    before = dict(fleet.pids)
    taken = json.loads((fleet.run_dir / "gateway.json").read_text())["port"]
    assert taken != 0
    os.kill(before["gateway-1"], signal.SIGKILL)
    await eventually(lambda: "gateway-1 was killed by SIGKILL" in fleet.log, PATIENCE_S)
    after = await serving(fleet, *GATEWAYS, "tiny-0", "tiny-1")
    assert {name for name in after if after[name] != before[name]} == {"gateway-1"}
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="Address already in use"):  # although no gateway of this test listens at all
            other.bind(("127.0.0.1", taken))


async def test_a_hangup_reads_the_file_again_and_new_options_are_new_processes(fleet: Fleet) -> None:
    before = dict(fleet.pids)
    fleet.write(models={"tiny": {"replicas": 1, "engine": {"max_num_seqs": 3}}})
    fleet.process.send_signal(signal.SIGHUP)
    after = await serving(fleet, *GATEWAYS, "tiny-2")
    assert "models.tiny.replicas" in fleet.log, "the difference is said"
    assert not any(is_alive(before[name]) for name in ("tiny-0", "tiny-1"))
    assert {name: after[name] for name in GATEWAYS} == {name: before[name] for name in GATEWAYS}
    [written] = [json.loads(path.read_text()) for path in fleet.run_dir.glob("e*.json")]
    assert (written["replica"], written["engine"]["max_num_seqs"]) == ("tiny-2", 3)


async def test_a_drain_leaves_nothing(fleet: Fleet) -> None:
    run_dir, pids = fleet.run_dir, await serving(fleet, *GATEWAYS, "tiny-2")
    fleet.process.send_signal(signal.SIGTERM)
    assert await fleet.wait() == 0
    assert not any(is_alive(pid) for pid in {*pids.values(), *fleet.pids.values()})
    assert not run_dir.exists()
    assert "stopping 2 gateways, then 1 engine" in fleet.log
    assert re.search(r"^[0-9: -]+ \[tiny-1\] tiny-1 serves ", fleet.log, re.MULTILINE), "its own event, under its label"


async def test_a_killed_supervisor_takes_its_children_with_it() -> None:
    gateway = {"work": "stream", "num_tokens": ENDLESS, "port": 0, "workers": 2}
    with started(replicas=2, fake={"stall_after_steps": 2}, gateway=gateway) as fleet:
        fleet.hear()
        assert all(is_alive(pid) for pid in fleet.pids.values())
        fleet.process.kill()
        await eventually(lambda: not any(is_alive(pid) for pid in fleet.pids.values()), PATIENCE_S)


async def test_a_terminal_that_is_closed_drains_and_the_running_stream_finishes() -> None:
    ours, theirs = os.openpty()
    gateway = {"work": "stream", "num_tokens": 60, "port": 0}
    with started(fake={"step_seconds": 0.02}, gateway=gateway, drain_timeout_s=PATIENCE_S, terminal=os.ttyname(theirs)) as fleet:
        fleet.hear()
        os.close(theirs)
        os.close(ours)
        assert await fleet.wait() == 0
        got = json.loads((fleet.folder / "gateway.out").read_text())
        assert got == fake_answer(request("r", max_tokens=60), 0, 60, FakeOptions())
