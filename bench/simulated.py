"""Compares a simulation with a live run of the same requests: `headrace simulate` beside `headrace serve` under load.

    python -m bench.simulated [--seconds 40] [--no-file] -> bench/results/simulated.json

Two models run on this machine: the bundled one, and one of the shape of TinyLlama (1.1 billion random weights, int8). Each has three loads,
shares of what the simulation can serve. For each model the steps are measured first; then every load is run live and simulated in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness import RESULTS, write_portable
from bench.tinyllama import write_tinyllama
from headrace.bundled import bundled_path
from headrace.cli.planner.model import find_model
from headrace.cli.planner.simulate import GATEWAY_S
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import LoadRequest, WorkloadShape, make_requests, send_times
from headrace.lab.environment import environment
from headrace.lab.loadgen import LoadTarget, run_load
from headrace.lab.metrics import LoadReport, summarize
from headrace.lab.simulate.build import SimulatedModel, measured_model
from headrace.lab.simulate.load import Arrival
from headrace.lab.simulate.site import SimulatedSite
from headrace.lab.simulate.step_times import read_steps

HEADRACE = [sys.executable, "-m", "headrace"]
LOADS = (0.3, 0.6, 0.9)
"""Shares of the requests per second that the simulation finishes when all arrive at once."""


@dataclass(frozen=True, slots=True)
class Subject:
    """flags: of the engine, for measuring and serving alike"""

    name: str
    folder: Path
    flags: tuple[str, ...]
    shape: WorkloadShape


def subjects(scratch: Path) -> list[Subject]:
    bundled = bundled_path("headrace-tiny")
    assert bundled is not None, "this installation has the bundled model"
    large = scratch / "tinyllama"
    write_tinyllama(large)
    return [
        Subject("headrace-tiny", bundled, (), WorkloadShape(input_tokens=256, output_tokens=128, spread=0.5)),
        Subject(
            "1.1b shape, int8",
            large,
            ("--load-format", "dummy", "--quantization", "int8", "--kv-cache-memory-bytes", str(256 << 20)),
            WorkloadShape(input_tokens=128, output_tokens=64, spread=0.5),
        ),
    ]


def simulated(model: SimulatedModel, requests: list[LoadRequest], times: list[float]) -> LoadReport:
    arrivals = [Arrival(at, each.prompt_ids, each.output_tokens) for at, each in zip(times, requests, strict=True)]
    return summarize(SimulatedSite([model], gateway_s=GATEWAY_S).run(arrivals))


@contextmanager
def served(subject: Subject) -> Iterator[str]:
    """A server on loopback until the block ends: its URL."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = [*HEADRACE, "serve", str(subject.folder), "--served-model-name", "subject", "--port", str(port), *subject.flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{url}/ready", timeout=1):
                    break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}") from None
                time.sleep(0.25)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def figures(report: LoadReport) -> dict[str, float]:
    return {
        "finished": report.finished,
        "output_tokens_per_s": report.output_throughput,
        "tpot_p50_s": report.tpot_s.quantiles["p50"],
        "ttft_p50_s": report.ttft_s.quantiles["p50"],
        "ttft_p99_s": report.ttft_s.quantiles["p99"],
    }


def measure(subject: Subject, scratch: Path, seconds: float) -> list[dict[str, object]]:
    steps = scratch / "steps.json"
    subprocess.run([*HEADRACE, "bench", "steps", str(subject.folder), "--output", str(steps), *subject.flags], check=True)
    shape = find_model(str(subject.folder), {}).shape
    fitted = read_steps(steps)
    model = measured_model(EngineConfig(model="subject").checked(), fitted.latency, shape, fitted.num_blocks)
    most = simulated(model, make_requests(200, subject.shape), [0.0] * 200).request_throughput
    rows: list[dict[str, object]] = []
    with served(subject) as url:
        target = LoadTarget(url=url, model="subject")
        asyncio.run(run_load(target, make_requests(8, subject.shape, seed=99), [0.0] * 8))
        for load in LOADS:
            rate = load * most
            requests = make_requests(max(20, round(rate * seconds)), subject.shape, seed=round(1000 * load))
            times = send_times(len(requests), rate=rate, seed=1)
            live = figures(summarize(asyncio.run(run_load(target, requests, times))))
            began = time.perf_counter()
            planned = figures(simulated(model, requests, times))
            ratio = {name: planned[name] / live[name] for name in live}
            row = {"model": subject.name, "load": load, "requests_per_s": rate, "live": live, "simulated": planned, "ratio": ratio}
            row["times_real_time"] = times[-1] / (time.perf_counter() - began)
            rows.append(row)
            shown = ", ".join(f"{name} {live[name]:.4g} / {planned[name]:.4g} = {ratio[name]:.2f}" for name in live)
            print(f"{subject.name}, load {load}, {rate:.2f}/s, {row['times_real_time']:.0f} x real time: {shown}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each live run")
    parser.add_argument("--no-file", action="store_true", help="leave bench/results/simulated.json as it is")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        rows = [row for subject in subjects(scratch) for row in measure(subject, scratch, given.seconds)]
    if not given.no_file:
        write_portable(RESULTS / "simulated.json", {"environment": environment(), "seconds": given.seconds, "runs": rows})


if __name__ == "__main__":
    main()
