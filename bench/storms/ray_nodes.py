"""Checks that streams go on when a replica on a Ray cluster is killed, and when a whole node is. Needs root, for network namespaces.

    python -m bench.storms.ray_nodes [--rounds 1] [--faults killed agent node cut] [--streams 12]
        -> bench/results/storms/ray-nodes.json

Each node is a network namespace with its own addresses, processes of Ray and `/tmp/ray`. The head has no CPU for replicas; `headrace serve`
and its gateway run there. Each other node has room for one replica, and there are as many more as the storm takes away. Engines compute
nothing (`headrace.lab.fake_engine`); their tokens follow from seed and place, so that each stream is compared with its undisturbed answer.

killed   a replica's engine gets SIGKILL
agent    the actor that holds the engine's leash gets SIGKILL
node     every process in the namespace of a replica's node gets SIGKILL. The node stays away
cut      the link to a replica's node drops every packet, in both directions, from then on

gap_s        longest silence within each stream
again_s      from the fault until both replicas were ready, at other processes
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import aiohttp

from bench.network_faults import CUT
from bench.storms.by_hand import FAKE, MODEL, SOURCE
from bench.storms.common import RESULTS
from bench.storms.failover import SEEDS, Answer, ask, quantiles
from bench.storms.namespaces import Namespaces, ip, namespaces, why_not_usable
from headrace.lab.environment import environment
from headrace.lab.report import write_json

NUM_REPLICAS = 2
KIND = "sampled"
PORT = 8000
HEAD_PORT = 6379
START_S, AGAIN_S, BEGUN_S = 240.0, 180.0, 60.0
PACE_S = 0.05
"""Seconds of a step: a stream of 200 tokens takes ten."""
BEGUN_PIECES = 8
ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--object-store-memory", "80000000", "--disable-usage-stats")
START = 'mkdir -p /tmp/ray && mount -t tmpfs -o size=256m tmpfs /tmp/ray && exec "$@"'
"""A node's own `/tmp/ray`: `ip netns exec` gives the shell mounts of its own."""
HEAD = "mkdir -p /tmp/ray && mount -t tmpfs -o size=256m tmpfs /tmp/ray && {start} && exec {serve}"


@dataclass
class Cluster:
    """nodes: name -> the process that keeps it; away: of those that a fault has taken"""

    places: Namespaces
    log_path: Path
    serving: subprocess.Popen[bytes] | None = None
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    away: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return self.places.gateway.host

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self) -> None:
        for process in (self.serving, *self.nodes.values(), *self.away):
            if process is not None:
                process.wait()

    def start_node(self, name: str) -> None:
        place = self.places.engines[name]
        words = ("--address", f"{self.host}:{HEAD_PORT}", "--node-ip-address", place.host, "--num-cpus", "1", "--block", *SMALL)
        command = [*place.prefix, "sh", "-c", START, "sh", *_ray_start(*words)]
        self.nodes[name] = _popen(command, self.log_path.with_name(f"{name}.log"))

    def has_started(self, name: str) -> bool:
        """Starts a node again that Ray has ended: on a busy machine its processes do not find each other in time."""
        if self.nodes[name].poll() is not None:
            end_namespace(self.places.engines[name].namespace)
            self.start_node(name)
        return "runtime started" in self.log_path.with_name(f"{name}.log").read_text()

    def engines(self) -> dict[str, int]:
        """Node -> the process of its engine."""
        found = {}
        for name in self.nodes:
            for pid in pids_in(self.places.engines[name].namespace):
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if b"--parent-fd" in words and b"engine" in words:
                        found[name] = pid
        return found

    def kill_engine(self, node: str) -> None:
        os.kill(self.engines()[node], signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        for pid in pids_in(self.places.engines[node].namespace):
            with suppress(OSError):
                if b"ray::RayAgent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def cut_node(self, node: str) -> None:
        self.places.links[node].set(CUT)
        self.away.append(self.nodes.pop(node))

    def kill_node(self, node: str) -> None:
        end_namespace(self.places.engines[node].namespace)
        self.away.append(self.nodes.pop(node))


FAULTS: dict[str, Callable[[Cluster, str], None]] = {
    "killed": Cluster.kill_engine,
    "agent": Cluster.kill_agent,
    "node": Cluster.kill_node,
    "cut": Cluster.cut_node,
}
AWAY = ("node", "cut")
"""Faults that take a node away."""


def pids_in(namespace: str) -> list[int]:
    said = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True).stdout
    return [int(pid) for pid in said.split()]


def end_namespace(namespace: str) -> None:
    """Kills what runs in it, which nothing else than this storm has started."""
    while found := pids_in(namespace):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@contextmanager
def cluster(num_nodes: int, num_replicas: int = NUM_REPLICAS) -> Iterator[Cluster]:
    """A head that serves, and nodes with room for a replica each; whatever runs in their namespaces ends with the block."""
    names = [f"node{number}" for number in range(num_nodes)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-ray-")))
        places = stack.enter_context(namespaces(names))
        made = Cluster(places, folder / "serve.log")
        stack.callback(made.wait)
        for place in (*places.engines.values(), places.gateway):
            stack.callback(end_namespace, place.namespace)
        subprocess.run([*places.gateway.prefix, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        for number, name in enumerate(names, 1):
            ip("-n", places.engines[name].namespace, "route", "add", "default", "via", f"10.251.{number}.1")
        made.serving = _start_head(made, folder, num_replicas)
        _until(made, lambda: "a model answers" in made.log, "the head does not serve")
        for name in names:
            made.start_node(name)
            _until(made, partial(made.has_started, name), f"{name} has not joined")
        yield made


def _ray_start(*words: str) -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *words]


def _start_head(made: Cluster, folder: Path, num_replicas: int) -> subprocess.Popen[bytes]:
    content = {
        "models": [{"name": MODEL, "replicas": num_replicas, "engine": {"model": MODEL, "max_num_seqs": 64}}],
        "ray": {"address": f"{made.host}:{HEAD_PORT}"},
        "gateway": {"host": made.host, "port": PORT, "request_log": "off"},
        "allow_open": True,
        "state": str(folder / "state"),
        "run_dir": str(folder),
    }
    (folder / "state").mkdir(mode=0o700)
    (folder / "site.yaml").write_text(json.dumps(content), encoding="utf-8")
    words = ("--node-ip-address", made.host, "--port", str(HEAD_PORT), "--num-cpus", "0", "--include-dashboard=false", *SMALL)
    start = " ".join(_ray_start("--head", *words))
    serve = f"{sys.executable} -m bench.storms.ray_nodes serve {folder / 'site.yaml'}"
    return _popen([*made.places.gateway.prefix, "sh", "-c", HEAD.format(start=start, serve=serve)], made.log_path)


def _popen(command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_") or name == "HEADRACE_CACHE_DIR"}
    path = os.pathsep.join((str(SOURCE), str(ROOT)))
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**kept, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": path}
        )


def _until(made: Cluster, condition: Callable[[], bool], what: str, within_s: float = START_S) -> None:
    """Raises AssertionError with the end of the log."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert made.serving is not None
        assert made.serving.poll() is None, f"serve ended with {made.serving.returncode}:\n{made.log[-3000:]}"
        assert time.monotonic() < deadline, f"{what}:\n{made.log[-3000:]}"
        time.sleep(0.05)


async def num_ready(session: aiohttp.ClientSession, made: Cluster) -> int:
    try:
        async with session.get(f"http://{made.host}:{PORT}/ready") as response:
            return sum(row["ok"] for row in (await response.json()).get("replicas", ()))
    except (aiohttp.ClientError, TimeoutError):
        return 0


async def until_ready(session: aiohttp.ClientSession, made: Cluster, not_these: set[int], within_s: float) -> None:
    """not_these: engines that are gone. Raises AssertionError"""
    deadline = time.monotonic() + within_s
    while await num_ready(session, made) < NUM_REPLICAS or len(set(made.engines().values()) - not_these) < NUM_REPLICAS:
        all(map(made.has_started, [*made.nodes]))
        assert time.monotonic() < deadline, f"{NUM_REPLICAS} replicas are not ready:\n{made.log[-3000:]}"
        await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Round:
    fault: str
    again_s: float
    gaps_s: list[float]
    failed: list[str]
    different: int


async def play(made: Cluster, session: aiohttp.ClientSession, fault: str, unbroken: list[Answer], num_streams: int) -> Round:
    asked = [asyncio.create_task(ask(session, PORT, KIND, number % SEEDS, host=made.host)) for number in range(num_streams)]
    await asyncio.sleep(2.0)  # all of them run, and none can have ended
    engines = made.engines()
    node = next(iter(engines))
    began = time.monotonic()
    FAULTS[fault](made, node)
    await until_ready(session, made, {engines[node]}, AGAIN_S)
    again_s = time.monotonic() - began
    answers = await asyncio.gather(*asked)
    different = sum(answer.parts != unbroken[number % SEEDS].parts for number, answer in enumerate(answers) if not answer.error)
    failed = [answer.error for answer in answers if answer.error]
    return Round(fault, round(again_s, 1), [round(answer.gap_s, 2) for answer in answers], failed, different)


async def storm(made: Cluster, faults: list[str], num_streams: int) -> list[Round]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await until_ready(session, made, set(), START_S)
        unbroken = await asyncio.gather(*(ask(session, PORT, KIND, seed, host=made.host) for seed in range(SEEDS)))
        broken = {answer.error for answer in unbroken if answer.error}
        assert not broken, f"without any fault: {broken}"
        rounds = []
        for fault in faults:
            rounds.append(await play(made, session, fault, list(unbroken), num_streams))
            print(json.dumps(asdict(rounds[-1])), flush=True)
        return rounds


def serve(path: str) -> None:
    """`headrace serve --config`, with engines that compute nothing."""
    from headrace.cli.config.load import load
    from headrace.fleet.supervisor import run_fleet
    from headrace.fleet.weights import resolve_model
    from headrace.observe.logs import LogFormat, set_up_logging

    set_up_logging(LogFormat.TEXT)
    config = load(Path(path), {})
    command = (sys.executable, "-m", "bench.storms.ray_nodes", "engine")
    sys.exit(run_fleet(replace(config.fleet(resolve_model), engine_command=command)))


def engine(arguments: list[str]) -> None:
    from headrace.lab.fake_engine import main as run

    path = Path(arguments[arguments.index("--config") + 1])
    path.write_text(json.dumps({**json.loads(path.read_text()), "fake": {**FAKE, "step_seconds": PACE_S}}))
    run(arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--streams", type=int, default=12)
    given = parser.parse_args()
    if reason := why_not_usable():
        raise SystemExit(reason)
    faults = given.faults * given.rounds
    with cluster(NUM_REPLICAS + sum(fault in AWAY for fault in faults)) as made:
        rounds = asyncio.run(storm(made, faults, given.streams))
    result = {
        name: {
            "rounds": len(of_fault := [each for each in rounds if each.fault == name]),
            "again_s": [each.again_s for each in of_fault],
            "gap_s": quantiles([gap for each in of_fault for gap in each.gaps_s]),
            "failed": [error for each in of_fault for error in each.failed],
            "different": sum(each.different for each in of_fault),
        }
        for name in given.faults
    }
    write_json(RESULTS / "ray-nodes.json", {"environment": asdict(environment()), "arguments": vars(given), **result})
    raise SystemExit(int(any(each.failed or each.different for each in rounds)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    elif sys.argv[1:2] == ["engine"]:
        engine(sys.argv[2:])
    else:
        main()
