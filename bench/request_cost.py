"""Measures what a whole request costs a gateway, for several sources whose gateways run side by side and are asked in turn.

    python -m bench.request_cost --source before=/tree --source after=. --source everything=. [--traces everything] [--bursts 100]
        -> bench/results/request-cost.json

Each source has its gateway, with a state folder (usage records are kept), and a fake engine on the real wire that answers 16 tokens; the
source of `--traces` also sends a trace of each request to a receiver here. A burst is 60 unstreamed chat completions, one after another.
CPU time is that of all the gateway's threads. The ratios are of a burst to the first source's beside it: their median, and the quantiles of
the CPU times, because other tenants of a machine only ever add to them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from bench.stream_cost import cpu_seconds
from headrace.bundled import DEFAULT_MODEL, FOLDER
from headrace.lab.environment import commit_of, environment
from headrace.lab.report import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "request-cost.json"
BURST = 60
WARM_BURSTS = 5
START_S = 60.0
BODY = json.dumps({"model": "paced", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16})


class Collector(BaseHTTPRequestHandler):
    """Takes every trace."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        return


class Side:
    """The gateway of one source, with its engine, and a connection to it."""

    def __init__(self, name: str, tree: Path, folder: Path, stack: ExitStack, gateway: Mapping[str, object]) -> None:
        self._tree, self._stack = tree.resolve(), stack
        folder.mkdir(mode=0o700)
        address = f"unix:{folder}/e0"
        fake = {"step_seconds": 0.0, "eos_after": 16, "verify": False}
        engine = {"replica": "r0", "address": address, "engine": {"model": str(FOLDER / DEFAULT_MODEL)}, "fake": fake}
        (folder / "engine.json").write_text(json.dumps(engine))
        remote = {"model": str(FOLDER / DEFAULT_MODEL), "replicas": [{"name": "r0", "address": address}]}
        site = {"models": [{"name": "paced", "remote": remote}], "state": f"{folder}/state"}
        (folder / "gateway.json").write_text(json.dumps({**site, "gateway": {"port": 0, "request_log": "off", **gateway}}))
        self._spawn(folder / "engine.log", "-m", "headrace.lab.fake_engine", "--config", f"{folder}/engine.json")
        self.process = self._spawn(folder / "gateway.log", "-m", "headrace", "gateway", "--config", f"{folder}/gateway.json")
        deadline = time.monotonic() + START_S
        while "is connected" not in (text := (folder / "gateway.log").read_text()) or "listening on" not in text:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit(f"{name} does not serve: {text[-2000:]}")
            time.sleep(0.1)
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", text)
        assert found is not None
        self.client = http.client.HTTPConnection("127.0.0.1", int(found[1]))
        self.cpu_us: list[float] = []
        stack.callback(self.client.close)

    def _spawn(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "PYTHONPATH": str(self._tree / "src")}
        output = self._stack.enter_context(log.open("wb"))
        process = subprocess.Popen([sys.executable, *arguments], env=environ, cwd=self._tree, stdout=output, stderr=output)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return process

    def burst(self) -> float:
        """CPU microseconds of the gateway per request."""
        used = cpu_seconds(self.process.pid)
        for _ in range(BURST):
            self.client.request("POST", "/v1/chat/completions", BODY, {"content-type": "application/json"})
            response = self.client.getresponse()
            answer = response.read()
            assert response.status == 200, answer
        time.sleep(0.05)  # what comes after the answer
        return 1e6 * (cpu_seconds(self.process.pid) - used) / BURST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", required=True, metavar="NAME=TREE")
    parser.add_argument("--traces", default="", metavar="NAME")
    parser.add_argument("--bursts", type=int, default=100)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    sources = {name: Path(tree) for name, _, tree in (source.partition("=") for source in given.source)}
    with ExitStack() as stack:
        collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        Thread(target=collector.serve_forever, daemon=True).start()
        stack.callback(collector.shutdown)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-")))
        traces = {"otlp_traces_endpoint": f"http://127.0.0.1:{collector.server_port}"}
        sides = {name: Side(name, tree, folder / name, stack, traces if name == given.traces else {}) for name, tree in sources.items()}
        for _ in range(WARM_BURSTS):
            for side in sides.values():
                side.burst()
        names = list(sides)
        for number in range(given.bursts):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                sides[name].cpu_us.append(round(sides[name].burst(), 1))
    first = sides[names[0]].cpu_us
    rows = {
        name: {
            "commit": commit_of(sources[name]),
            "cpu_us_per_request": dict(zip(("p10", "p25", "p50"), quantiles(side.cpu_us), strict=True)),
            "ratio": round(statistics.median([one / other for one, other in zip(side.cpu_us, first, strict=True)]), 3),
            "bursts": side.cpu_us,
        }
        for name, side in sides.items()
    }
    for name, row in rows.items():
        print(name, row["commit"], row["cpu_us_per_request"], "ratio", row["ratio"])
    write_json(given.output, {"environment": environment(), "sources": rows})


def quantiles(values: list[float]) -> list[float]:
    ranked = sorted(values)
    return [ranked[int(share * len(ranked))] for share in (0.1, 0.25, 0.5)]


if __name__ == "__main__":
    main()
