"""Checks that a replica of two ranks ends as a whole and comes back, and that its streams go on, when its member is killed, stops or lies.

    python -m bench.storms.ranks [--fault killed|stopped|lying] [--rounds 20] [--streams 12]
        -> bench/results/storms/ranks-FAULT.json

`headrace serve` with two replicas of TP 2, deterministic, and greedy streams, whose answers were first given alone. In each round
`--streams` of them run, and the member of the replica that computes most of them

killed   gets SIGKILL
stopped  gets SIGSTOP
lying    sends rank 0 a frame that only rank 0 may send. The storm writes it into the member's own end of their link, of which it takes a
         copy from outside (pidfd_getfd(2)): the process is the product's, and does not know

Without `--fault` one after the other, each with a server of its own. Ends with status 1 where a stream is not the undisturbed answer, or
a round resumed none; a process of the old group that is left for PATIENCE_S ends the storm.

leader_ended_s  from the fault until rank 0 was gone, which serves the group: from then on nothing of the group can reach a client
group_ended_s   from the fault until no process of the old group was left
ready_again_s   from the fault until both replicas were ready, with new processes
resumed         sequences that the gateway submitted again
gap_s           longest silence within each stream
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.storms.common import RESULTS, Served, served
from bench.storms.failover import MODEL, SEEDS, Answer, body_of, quantiles, streamed
from headrace.engine.ranks.frames import FrameKind, frame
from headrace.lab.environment import environment
from headrace.lab.report import write_json

NUM_REPLICAS, TP_SIZE = 2, 2
MAX_TOKENS = 300
BEGUN_PIECES = 8
"""Pieces that each stream has brought before the fault."""
PATIENCE_S = 60.0
LIMIT_S = 570.0
"""Of the rounds of one kind of fault."""
PIDFD_GETFD = 438
"""The system call's number, the same on every architecture; Python has no function for it."""


@dataclass(frozen=True, slots=True)
class Group:
    """ranks: the processes of one replica, rank 0 first"""

    name: str
    ranks: tuple[psutil.Process, ...]


def groups(server: Served) -> dict[str, Group]:
    """By the replica's name; a group that starts may lack ranks."""
    supervisor = psutil.Process(server.gateway_pid).parent()
    assert supervisor is not None
    found: dict[str, dict[int, psutil.Process]] = {}
    for child in supervisor.children():
        with suppress(psutil.NoSuchProcess, ValueError):
            command = child.cmdline()
            if "engine" in command:
                config = json.loads(Path(command[command.index("--config") + 1]).read_bytes())
                found.setdefault(config["replica"], {})[config["rank"]] = child
    return {name: Group(name, tuple(process for _, process in sorted(ranks.items()))) for name, ranks in found.items()}


def kill(member: psutil.Process) -> None:
    member.send_signal(signal.SIGKILL)


def stop(member: psutil.Process) -> None:
    member.send_signal(signal.SIGSTOP)


def lie(member: psutil.Process) -> None:
    """Raises OSError where this process may not take a descriptor of another one."""
    pidfd = os.pidfd_open(member.pid)
    try:
        for name in os.listdir(folder := f"/proc/{member.pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"{folder}/{name}").startswith("socket:") and _says(pidfd, int(name), frame(FrameKind.STEP)):
                    return
    finally:
        os.close(pidfd)
    raise OSError("the member has no link to rank 0")


def _says(pidfd: int, number: int, data: bytes) -> bool:
    """Whether that descriptor of the process is its link to rank 0, over which `data` is sent then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (fd := libc.syscall(PIDFD_GETFD, pidfd, number, 0)) < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
    with closing(socket.socket(fileno=fd)) as link:
        is_link = link.family == socket.AF_UNIX and str(_peer_of(link)).endswith(".ranks")
        if is_link:
            link.sendall(data)
        return is_link


def _peer_of(connected: socket.socket) -> object:
    try:
        return connected.getpeername()
    except OSError:
        return ""


FAULTS: dict[str, Callable[[psutil.Process], None]] = {"killed": kill, "stopped": stop, "lying": lie}


@dataclass(frozen=True, slots=True)
class Round:
    leader_ended_s: float
    group_ended_s: float
    ready_again_s: float
    resumed: int


async def until(is_true: Callable[[], bool], what: str) -> None:
    """Raises SystemExit after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        if time.monotonic() > deadline:
            raise SystemExit(f"after {PATIENCE_S:g} s {what}")
        await asyncio.sleep(0.005)


def request(seed: int) -> dict[str, Any]:
    return {**body_of("greedy", seed), "max_tokens": MAX_TOKENS}


class Storm:
    """Rounds of one kind of fault. done: the seed and the answer of every stream"""

    def __init__(self, server: Served, session: aiohttp.ClientSession, fault: str, draw: random.Random) -> None:
        self._server, self._session, self._fault, self._draw = server, session, FAULTS[fault], draw
        self.unbroken: list[Answer] = []
        self.done: list[tuple[int, Answer]] = []
        self.rounds: list[Round] = []

    async def ask_alone(self) -> None:
        self.unbroken = [await streamed(self._session, self._server.port, request(seed)) for seed in range(SEEDS)]
        if broken := {answer.error for answer in self.unbroken if answer.error}:
            raise SystemExit(f"without any fault: {broken}")

    async def round(self, num_streams: int) -> None:
        resumed_before = await self._num_resumed()
        asked = [(self._draw.randrange(SEEDS), Answer()) for _ in range(num_streams)]
        async with asyncio.TaskGroup() as running:
            for seed, answer in asked:
                running.create_task(streamed(self._session, self._server.port, request(seed), answer=answer))
            await until(lambda: all(len(answer.pieces_at) >= BEGUN_PIECES for _, answer in asked), "not every stream has begun")
            num_running = {labels["replica"]: value for labels, value in await self._metric("headrace_requests_running")}
            group = groups(self._server)[max(num_running, key=lambda name: num_running[name])]
            began = time.monotonic()
            self._fault(group.ranks[1])
            leader_s, group_s = await self._ended(group, began)
        self.done += asked
        ready_s = await self._ready_again(group, began)
        self.rounds.append(Round(round(leader_s, 3), round(group_s, 3), round(ready_s, 2), await self._num_resumed() - resumed_before))

    async def _ended(self, group: Group, began: float) -> tuple[float, float]:
        try:
            await until(lambda: not group.ranks[0].is_running(), f"rank 0 of {group.name} has not ended")
            leader_s = time.monotonic() - began
            await until(lambda: not any(rank.is_running() for rank in group.ranks), f"ranks of {group.name} are left")
        finally:
            for rank in group.ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
        return leader_s, time.monotonic() - began

    async def _ready_again(self, old: Group, began: float) -> float:
        def is_new() -> bool:
            found = groups(self._server)
            whole = len(found) == NUM_REPLICAS and all(len(group.ranks) == TP_SIZE for group in found.values())
            return whole and not {rank.pid for rank in found[old.name].ranks} & {rank.pid for rank in old.ranks}

        await until(is_new, f"{old.name} has not been started again")
        url, deadline = f"http://127.0.0.1:{self._server.port}/ready?strict", time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            async with self._session.get(url) as response:
                if response.status == 200:
                    return time.monotonic() - began
            await asyncio.sleep(0.05)
        raise SystemExit(f"after {PATIENCE_S:g} s {old.name} is not ready again")

    async def _num_resumed(self) -> int:
        return int(sum(value for _, value in await self._metric("headrace_sequences_resumed_total")))

    async def _metric(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        """The labels and the value of each sample."""
        async with self._session.get(f"http://127.0.0.1:{self._server.port}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]

    def summary(self) -> dict[str, Any]:
        different = sum(not answer.error and answer.parts != self.unbroken[seed].parts for seed, answer in self.done)
        return {
            "rounds": len(self.rounds),
            "streams": len(self.done),
            "resumed": sum(each.resumed for each in self.rounds),
            "rounds_without_resumed": sum(not each.resumed for each in self.rounds),
            "failed": dict(Counter(answer.error for _, answer in self.done if answer.error)),
            "different": different,
            "leader_ended_s": quantiles([each.leader_ended_s for each in self.rounds]),
            "group_ended_s": quantiles([each.group_ended_s for each in self.rounds]),
            "ready_again_s": quantiles([each.ready_again_s for each in self.rounds]),
            "gap_s": quantiles([answer.gap_s for _, answer in self.done]),
            "gap_alone_s": quantiles([answer.gap_s for answer in self.unbroken]),
            "each_round": [asdict(each) for each in self.rounds],
        }


async def run(server: Served, fault: str, given: argparse.Namespace) -> dict[str, Any]:
    async with (
        asyncio.timeout(LIMIT_S),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as session,
    ):
        storm = Storm(server, session, fault, random.Random(given.seed))
        await storm.ask_alone()
        for _ in range(given.rounds):
            await storm.round(given.streams)
        return storm.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    is_broken = False
    for fault in [given.fault] if given.fault else FAULTS:
        began = time.monotonic()
        flags = ("--replicas", str(NUM_REPLICAS), "--tensor-parallel-size", str(TP_SIZE), "--max-num-seqs", "32", "--deterministic")
        with served(MODEL, *flags) as server:
            found = asyncio.run(run(server, fault, given))
        print(json.dumps({"fault": fault, "seconds": round(time.monotonic() - began, 1), **found}, indent=1))
        arguments = {**vars(given), "fault": fault}
        write_json(RESULTS / f"ranks-{fault}.json", {"environment": asdict(environment()), "arguments": arguments, **found})
        is_broken |= bool(found["failed"] or found["different"] or found["rounds_without_resumed"])
    if is_broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
