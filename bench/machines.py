"""Measures how soon a replica whose stages are on two machines ends when a rank, or the network between them, is lost.

    python -m bench.machines -> bench/results/MACHINE/machines.json

The machines are two network namespaces of this one, joined by a pair of virtual interfaces; making them needs root and `ip`. Each fault
meets engines of its own, which have answered a request before: a member killed, a member stopped, the network down, rank 0 killed. What is
noted is the seconds until each process had ended by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.harness import write_portable
from bench.machine import results_file
from headrace.fleet.authority import init_site
from headrace.lab.environment import environment

MODEL = "headrace-tiny"
SPACES = ("headrace-a", "headrace-b")
HOSTS = ("10.77.0.1", "10.77.0.2")
START_S, END_S, PAUSE_S = 180.0, 20.0, 0.01
LAYOUTS = ((1, 2), (2, 2))
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 20}

Processes = list[subprocess.Popen[bytes]]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_machines() -> Iterator[None]:
    with ExitStack() as ending:
        for space in SPACES:
            ip("netns", "add", space)
            ending.callback(ip, "netns", "del", space)
        ip("link", "add", "eth0", "netns", SPACES[0], "type", "veth", "peer", "name", "eth0", "netns", SPACES[1])
        for space, host in zip(SPACES, HOSTS, strict=True):
            ip("-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")
        yield


def start(folder: Path, space: str, *words: str) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", space, sys.executable, "-P", "-m", "headrace", *words]
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def start_ranks(folder: Path, tp: int, pp: int) -> Processes:
    started = []
    for rank in range(tp * pp):
        number = rank // tp
        words = ["engine", MODEL, "-tp", str(tp), "-pp", str(pp), "--rank", str(rank), "--rendezvous", f"{HOSTS[0]}:7100"]
        words += ["--listen", f"{HOSTS[number]}:{7001 + rank}", "--tls-dir", str(folder / f"rank-{HOSTS[number]}")]
        words += ["--device", "cpu", "--num-threads", "1", "--gpu-memory-utilization", "0.1"]
        started.append(start(folder, SPACES[number], *words))
    return started


def ask(path: str, *words: str) -> str:
    command = ["ip", "netns", "exec", SPACES[0], "curl", "-sf", "-m", "60", f"http://127.0.0.1:8000{path}", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def answer(processes: Processes) -> str:
    """Once the gateway has one."""
    deadline = time.monotonic() + START_S
    while not ask("/ready"):
        assert time.monotonic() < deadline, "the replica does not start"
        assert all(each.poll() is None for each in processes), "a rank has ended"
        time.sleep(0.2)
    answered = json.loads(ask("/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(QUESTION)))
    return str(answered["choices"][0]["message"]["content"])


def cut(processes: Processes) -> None:
    ip("-n", SPACES[1], "link", "set", "eth0", "down")


FAULTS: dict[str, Callable[[Processes], None]] = {
    "a member is killed": lambda processes: processes[-1].kill(),
    "a member is stopped": lambda processes: processes[-1].send_signal(signal.SIGSTOP),
    "the network is down": cut,
    "rank 0 is killed": lambda processes: processes[0].kill(),
}


def ended_s(processes: Sequence[subprocess.Popen[bytes]]) -> list[float | None]:
    """By rank, the seconds until it had ended; None: it had not."""
    began, found = time.monotonic(), dict[int, float]()
    while len(found) < len(processes) and time.monotonic() - began < END_S:
        for rank, each in enumerate(processes):
            if rank not in found and each.poll() is not None:
                found[rank] = round(time.monotonic() - began, 2)
        if len(found) == len(processes) - 1 and time.monotonic() - began > END_S / 2:
            break  # the one that is stopped
        time.sleep(PAUSE_S)
    return [found.get(rank) for rank in range(len(processes))]


def run(fault: str, tp: int, pp: int) -> dict[str, object]:
    with two_machines(), tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "site"
        init_site(folder, ranks=[[host] for host in HOSTS])
        processes = start_ranks(folder, tp, pp)
        gateway = start(folder, SPACES[0], "gateway", MODEL, "--replica", f"one={HOSTS[0]}:7001", "--tls-dir", str(folder / "gateway"))
        try:
            said = answer(processes)
            FAULTS[fault](processes)
            return {"fault": fault, "tp": tp, "pp": pp, "answer": said, "ended_s": ended_s(processes)}
        finally:
            for each in (*processes, gateway):
                each.kill()
                each.wait()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    rows = []
    for tp, pp in LAYOUTS:
        for fault in FAULTS:
            rows.append(run(fault, tp, pp))
            print(rows[-1], flush=True)
    write_portable(results_file("machines"), {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
