"""Kills a supervisor under load, and starts it again as a unit would: does everything leave, and does the next one serve?

    python -m bench.storms.supervisor_kill [--kills 10] [--every 8] [--parallel 8]
        -> bench/results/storms/supervisor-kill.json

`headrace serve` runs on one port, in one run directory and one state folder, under a loop that does what deploy/systemd does: whenever the
process has ended it is started again, 2 s later. `--parallel` clients stream one answer after the other and send one again that failed,
until it is whole. Every `--every` seconds, once all is ready, the supervisor is killed (SIGKILL).

all_left_s     from each kill until no process of that deployment ran
ready_again_s  from each kill until every replica of the next deployment was ready
orphans        processes of a killed deployment that still ran when the next one was ready, by command; stale run directories beside its own
refusals       last line of each process that ended although it was not killed
streams        whole answers; those that needed another try; those whose text was not that of an unbroken one
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.storms.common import RESULTS
from bench.storms.failover import SEEDS, ask, quantiles
from headrace.fleet.files import running_deployments
from headrace.lab.environment import environment
from headrace.lab.report import write_json

RESTART_S = 2.0
"""Pause before the next start: RestartSec of the shipped unit."""

READY_S = 120.0
LEFT_S = 30.0
POLL_S = 0.05
RETRY_S = 0.2
KIND = "greedy"


@dataclass(slots=True)
class Found:
    all_left_s: list[float] = field(default_factory=list)
    ready_again_s: list[float] = field(default_factory=list)
    orphans: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    whole: int = 0
    retried: int = 0
    different: int = 0


class Unit:
    """`headrace serve`, started again whenever it has ended. refusals: its last line each time that was no kill"""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.refusals: list[str] = []
        self._is_killed = False
        self._run_dir = folder / "run"
        self._run_dir.mkdir()
        self._log = folder / "log"
        self._environment = {**os.environ, "HEADRACE_STATE": str(folder / "state"), "HEADRACE_RUN_DIR": str(self._run_dir)}
        self._process = self._start()

    def _start(self) -> psutil.Popen:
        command = [sys.executable, "-P", "-m", "headrace", "serve", "--port", str(self.port), "--request-log", "off", "--deterministic"]
        with self._log.open("ab") as log:
            return psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment)

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            while self._process.poll() is None:
                await asyncio.sleep(POLL_S)
            if not self._is_killed:
                self.refusals.append(self.last_lines.rstrip().rpartition("\n")[2])
            await asyncio.sleep(RESTART_S)
            self._process, self._is_killed = self._start(), False

    def processes(self) -> list[psutil.Process]:
        """The supervisor and all below it."""
        with suppress(psutil.NoSuchProcess):
            return [psutil.Process(self._process.pid), *self._process.children(recursive=True)]
        return []

    def kill(self) -> None:
        self._is_killed = True
        self._process.kill()

    async def wait_ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while not await asyncio.to_thread(self._is_ready):
                await asyncio.sleep(POLL_S)

    def _is_ready(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/ready?strict")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def num_stale_directories(self) -> int:
        """Run directories beside those of deployments that run."""
        return len(list(self._run_dir.glob("headrace-*"))) - len(running_deployments(self._run_dir))

    def end(self) -> None:
        """Kill what is left, at the end of the storm."""
        everything = self.processes()
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everything, timeout=10)

    @property
    def last_lines(self) -> str:
        return self._log.read_text()[-2000:]


@contextmanager
def unit(folder: Path) -> Iterator[Unit]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = Unit(folder, port)
    try:
        yield made
    except TimeoutError:
        print(made.last_lines, file=sys.stderr)
        raise
    finally:
        made.end()


async def client(
    session: aiohttp.ClientSession, port: int, number: int, expected: dict[int, Any], found: Found, stop: asyncio.Event
) -> None:
    while not stop.is_set():
        number, tries = number + 1, 1
        while (answer := await ask(session, port, KIND, number % SEEDS)).error and not stop.is_set():
            tries += 1
            await asyncio.sleep(RETRY_S)
        if not answer.error:
            found.whole += 1
            found.retried += tries > 1
            found.different += answer.parts != expected[number % SEEDS]


async def kill_once(running: Unit, found: Found) -> None:
    processes = running.processes()
    killed_at = time.monotonic()
    running.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, LEFT_S)
    found.all_left_s.append(round(time.monotonic() - killed_at, 2))
    await running.wait_ready()
    found.ready_again_s.append(round(time.monotonic() - killed_at, 2))
    found.orphans.update(" ".join(process.cmdline()[-4:]) for process in alive if process.is_running())
    if num_stale := running.num_stale_directories():
        found.orphans["run directory"] += num_stale


async def storm(running: Unit, given: argparse.Namespace) -> Found:
    found, stop = Found(), asyncio.Event()
    keeping = asyncio.create_task(running.keep())
    try:
        await running.wait_ready()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            expected = {seed: (await ask(session, running.port, KIND, seed)).parts for seed in range(SEEDS)}
            clients = [
                asyncio.create_task(client(session, running.port, 7 * each, expected, found, stop)) for each in range(given.parallel)
            ]
            for _ in range(given.kills):
                await asyncio.sleep(given.every)
                await kill_once(running, found)
            await asyncio.sleep(given.every)
            stop.set()
            await asyncio.gather(*clients)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    found.refusals = running.refusals
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", type=float, default=8.0)
    parser.add_argument("--parallel", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, unit(Path(folder)) as running:
        found = asyncio.run(storm(running, given))
    result = asdict(found) | {"all_left": quantiles(found.all_left_s), "ready_again": quantiles(found.ready_again_s)}
    print(json.dumps(result, indent=1))
    write_json(RESULTS / "supervisor-kill.json", {"environment": asdict(environment()), "arguments": vars(given), **result})


if __name__ == "__main__":
    main()
