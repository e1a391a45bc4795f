"""Measures what a gateway adds to a request, with API key, limits, quota and usage log on, and what LiteLLM's proxy adds in the
same run.

    python -m bench.gateway_overhead [--rounds 3] [--rate 50] [--seconds 10] [--litellm BIN/litellm] [--sustained 500]
        [--sustained-s 60] [--output FILE] -> bench/results/gateway-overhead.json

A server that answers after `--pause-ms` (`bench.overhead.upstream`) is asked directly, through `headrace serve`, and through LiteLLM's
proxy (a master key, no database), in turns; the client (`bench.overhead.client`) is a process of its own. `engine` is the same request to
a headrace whose replica is the fake engine on the real wire, which answers one token after the same pause.

overhead_ms         of each way, p50 and p99: its percentile less that of `direct` in the same round (of `engine`: less the pause)
cpu_ms_per_request  CPU time of all processes of a way, its text workers included, over the requests. Hardly depends on a busy machine;
                    `direct` and `engine` have the server that answers in it
sustained           then, for `--sustained-s`: share answered whole at that rate, and latencies. With 2 cores the client, the upstream and
                    the gateway share them
usage_records       of each headrace: requests that its usage log has, which show that it was on
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from headrace.bundled import DEFAULT_MODEL, FOLDER
from headrace.lab.environment import environment
from headrace.lab.report import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "gateway-overhead.json"
START_S = 120.0
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
MASTER_KEY = "sk-master-0123456789abcdef"
TIER = {
    "requests_per_minute": 10_000_000,
    "input_tokens_per_minute": 1_000_000_000,
    "output_tokens_per_minute": 1_000_000_000,
    "max_concurrent_requests": 10_000,
    "monthly_budget": 1_000_000.0,
}
"""Every kind of limit, none of which is reached: all of them are counted."""

PRICE = {"input": 0.2, "output": 0.6}


@contextmanager
def process(arguments: list[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as output:
        started = subprocess.Popen(
            arguments,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=ENVIRON | environ,
        )
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(20.0)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def found_in(log: Path, pattern: str, of: subprocess.Popen[str]) -> re.Match[str]:
    """What the log says, waited for. Raises RuntimeError when the process ends or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and of.poll() is None:
        if match := re.search(pattern, log.read_text()):
            return match
        time.sleep(0.05)
    raise RuntimeError(f"not there: {pattern!r} in {log.read_text()[-2000:]}")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children so far, those that have ended included."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in family)


class Site:
    """Everything that is started, in one folder. ports, keys, pids: by way"""

    def __init__(self, folder: Path, stack: ExitStack, pause_ms: float) -> None:
        self.folder, self.stack, self.pause_ms = folder, stack, pause_ms
        self.ports: dict[str, int] = {}
        self.keys: dict[str, str] = {}
        self.pids: dict[str, list[int]] = {}

    def spawn(self, arguments: list[str], way: str, log: str, **environ: str) -> subprocess.Popen[str]:
        started = self.stack.enter_context(process(arguments, self.folder / log, **environ))
        self.pids.setdefault(way, []).append(started.pid)
        return started

    def start(self, arguments: list[str], way: str, pattern: str, **environ: str) -> re.Match[str]:
        log = f"{way}.log"
        return found_in(self.folder / log, pattern, self.spawn(arguments, way, log, **environ))

    def add_direct(self) -> None:
        found = self.start([sys.executable, "-m", "bench.overhead.upstream", "--pause-ms", str(self.pause_ms)], "direct", r"^(\d+)\n")
        self.ports["direct"] = int(found[1])

    def add_headrace(self) -> None:
        url = f"http://127.0.0.1:{self.ports['direct']}/v1"
        self._add_headrace("headrace", {"models": [{"name": "paced", "upstreams": [{"url": url, "model": "paced"}]}]})

    def add_engine(self) -> None:
        """A replica on the wire that gives one token per request after the pause."""
        address = f"unix:{self.folder}/e0"
        fake = {"step_seconds": self.pause_ms / 1000, "eos_after": 1, "verify": False}
        file = self.folder / "engine.json"
        engine = {"model": str(FOLDER / DEFAULT_MODEL), "max_num_seqs": 256}
        file.write_text(json.dumps({"replica": "r0", "address": address, "engine": engine, "fake": fake}))
        self.spawn([sys.executable, "-m", "headrace.lab.fake_engine", "--config", str(file)], "engine", "e0.log")
        remote = {"model": DEFAULT_MODEL, "replicas": [{"name": "r0", "address": address}]}
        self._add_headrace("engine", {"models": [{"name": "paced", "remote": remote}]})

    def _add_headrace(self, way: str, content: dict[str, Any]) -> None:
        state = self.folder / f"{way}-state"
        file = self.folder / f"{way}.yaml"
        more = {"state": str(state), "tiers": {"bench": TIER}, "prices": {"paced": PRICE}, "gateway": {"port": 0, "request_log": "off"}}
        file.write_text(yaml.safe_dump({**content, **more}))
        create = [sys.executable, "-m", "headrace", "keys", "create", "--tenant", "acme", "--tier", "bench", "--json"]
        made = subprocess.run(
            [*create, "--config", str(file)],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=ENVIRON,
        )
        self.keys[way] = json.loads(made.stdout)["key"]
        serve = [sys.executable, "-m", "headrace", "serve", "--config", str(file)]
        self.ports[way] = int(self.start(serve, way, r"Serving .* at http://[^\s\"]*:(\d+)")[1])
        self._until_answered(way)

    def add_litellm(self, command: str) -> None:
        port = 18_400 + os.getpid() % 1000
        file = self.folder / "litellm.yaml"
        upstream = {"model": "openai/paced", "api_base": f"http://127.0.0.1:{self.ports['direct']}/v1", "api_key": "none"}
        models = [{"model_name": "paced", "litellm_params": upstream}]
        file.write_text(yaml.safe_dump({"model_list": models, "general_settings": {"master_key": MASTER_KEY}}))
        self.start(
            [command, "--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"],
            "litellm",
            r"Proxy initialized",
            LITELLM_LOG="ERROR",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
        self.ports["litellm"], self.keys["litellm"] = port, MASTER_KEY
        self._until_answered("litellm")

    def _until_answered(self, way: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            found = self.load(way, rate=2.0, seconds=0.5)
            if found["share_whole"] == 1.0:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{way} does not answer: {found}")
            time.sleep(0.5)

    def load(self, way: str, *, rate: float, seconds: float) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.overhead.client", str(self.ports[way]), "--rate", str(rate), "--seconds", str(seconds)]
        before_s = self._cpu_seconds(way)
        done = subprocess.run([*command, "--key", self.keys.get(way, "")], check=True, capture_output=True, text=True, cwd=ROOT)
        found: dict[str, Any] = json.loads(done.stdout)
        found["cpu_ms_per_request"] = round(1000 * (self._cpu_seconds(way) - before_s) / found["sent"], 3)
        return found

    def _cpu_seconds(self, way: str) -> float:
        return sum(map(cpu_seconds, self.pids[way]))

    def usage(self) -> dict[str, dict[str, int]]:
        return {way: self._usage(way) for way in self.ports if way in ("headrace", "engine")}

    def _usage(self, way: str) -> dict[str, int]:
        """Tenant -> requests in the usage log of a headrace."""
        command = [sys.executable, "-m", "headrace", "usage", "--by", "tenant", "--json", "--state", str(self.folder / f"{way}-state")]
        rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=ENVIRON).stdout)
        return {row["tenant"]: row["requests"] for row in rows}


def with_overhead(one: dict[str, Any], pause_ms: float) -> dict[str, Any]:
    """A round's findings by way, each with what the way added to the same percentile of `direct`."""
    for way, found in one.items():
        base = {"p50": pause_ms, "p99": pause_ms} if way == "engine" else one["direct"]["latency_ms"]
        found["overhead_ms"] = {name: round(found["latency_ms"][name] - base[name], 3) for name in ("p50", "p99")}
    return one


def measure(site: Site, given: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    ways = list(site.ports)
    for number in range(given.rounds):
        order = ways if number % 2 == 0 else ways[::-1]
        rounds.append(with_overhead({way: site.load(way, rate=given.rate, seconds=given.seconds) for way in order}, given.pause_ms))
        print(json.dumps({way: (found["overhead_ms"], found["cpu_ms_per_request"]) for way, found in rounds[-1].items()}), flush=True)
    shown = [way for way in ways if way != "direct"]
    overhead = {way: {name: statistics.median(one[way]["overhead_ms"][name] for one in rounds) for name in ("p50", "p99")} for way in shown}
    sustained = {way: site.load(way, rate=given.sustained, seconds=given.sustained_s) for way in ways} if given.sustained else {}
    return {"overhead_ms": overhead, "rounds": rounds, "sustained": sustained, "usage_records": site.usage()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pause-ms", type=float, default=20.0)
    parser.add_argument("--sustained", type=float, default=0.0, help="requests per second; 0: not measured")
    parser.add_argument("--sustained-s", type=float, default=60.0, help="seconds of it")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--litellm", default="", help="LiteLLM's command, in an environment of its own; without it, it is left out")
    parser.add_argument("--ways", nargs="*", default=["headrace", "engine"], choices=["headrace", "engine"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, ExitStack() as stack:
        site = Site(Path(folder), stack, given.pause_ms)
        add: dict[str, Callable[[], None]] = {"headrace": site.add_headrace, "engine": site.add_engine}
        site.add_direct()
        for way in given.ways:
            add[way]()
        if given.litellm:
            site.add_litellm(given.litellm)
        found = measure(site, given)
    print(json.dumps({key: value for key, value in found.items() if key != "rounds"}, indent=1))
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items() if name != "output"}
    write_json(given.output, {"environment": asdict(environment()), "arguments": arguments, **found})


if __name__ == "__main__":
    main()
