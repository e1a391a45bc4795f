"""Simulates how much continuous batching gains over static batching, for several distributions of lengths and costs of a step.

    python -m bench.static_batching -> bench/results/static-batching.json

The scheduler is the product's own, on virtual time. Two ratios of continuous to static batching are computed. One is of tokens per second
when all requests are there at once. The other is of the highest request rate at which the median answer takes no longer than twice a mean
answer in a full batch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.continuous_batching import BATCH, SHAPE, highest_rate, skewed
from bench.harness import RESULTS, write_portable
from bench.tinyllama import write_tinyllama
from headrace.bundled import bundled_path
from headrace.engine.config import EngineConfig
from headrace.lab.datasets import LoadRequest, WorkloadShape, make_requests, send_times
from headrace.lab.environment import environment
from headrace.lab.metrics import LoadReport, summarize
from headrace.lab.plan.catalogue import read_catalogue
from headrace.lab.plan.shapes import find_entry
from headrace.lab.simulate.build import SimulatedModel
from headrace.lab.simulate.load import Arrival
from headrace.lab.simulate.site import SimulatedSite
from headrace.lab.simulate.step_times import FittedLatency, read_steps
from headrace.policy.placement.roofline import Layout, Roofline, StepLatency

FILE = RESULTS / "static-batching.json"
NUM_REQUESTS = 400
CONTEXT = SHAPE.input_tokens + SHAPE.output_tokens // 2
ROUNDS = 8
"""Halvings of the interval in which the highest rate is sought."""

INT8 = ("--load-format", "dummy", "--quantization", "int8", "--kv-cache-memory-bytes", str(256 << 20))


def spreads() -> dict[str, list[LoadRequest]]:
    """Requests by how their lengths are spread; the mean is the same."""
    even = WorkloadShape(input_tokens=SHAPE.input_tokens, output_tokens=SHAPE.output_tokens)
    drawn = make_requests(NUM_REQUESTS, SHAPE, seed=1)
    return {"equal": make_requests(NUM_REQUESTS, even, seed=1), "even, 6 to 121": drawn, "exponential": skewed(drawn, seed=1)}


def made_up(fixed: float) -> FittedLatency:
    """A full step of 16 ms, of which the share `fixed` is the same for any number of sequences; 64 prompt tokens take a fifth of a step."""
    return FittedLatency(step_s=0.016 * fixed, row_s=0.016 * (1 - fixed) / BATCH, context_s=0.0, prompt_s=5e-5, attention_s=0.0)


def measured(folder: Path, scratch: Path, *flags: str) -> FittedLatency:
    """Of this machine, now."""
    file = scratch / "steps.json"
    subprocess.run([sys.executable, "-m", "headrace", "bench", "steps", str(folder), "--output", str(file), *flags], check=True)
    return read_steps(file).latency


def latencies(scratch: Path) -> Iterator[tuple[str, StepLatency]]:
    """What a step may cost, by name."""
    yield "the same for any number of sequences", made_up(1.0)
    yield "half of it by the sequence", made_up(0.5)
    yield "all of it by the sequence", made_up(0.0)
    known = read_catalogue()
    llama, dtype = find_entry("llama-3-8b", known.models)
    yield "8B on an H100, from its roofline", Roofline(llama, known.device("h100"), Layout(1, 1), dtype, "bf16")
    folder = scratch / "tinyllama"
    write_tinyllama(folder)
    yield "1.1B in int8 on this machine", measured(folder, scratch, *INT8)
    bundled = bundled_path("headrace-tiny")
    assert bundled is not None, "this installation has the bundled model"
    yield "headrace-tiny on this machine", measured(bundled, scratch)


@dataclass(frozen=True, slots=True)
class Cell:
    """One spread of lengths under one cost of steps."""

    latency: StepLatency
    requests: list[LoadRequest]

    def run(self, batching: str, times: list[float]) -> LoadReport:
        config = EngineConfig(model="simulated", max_num_seqs=BATCH, max_waiting=2 * NUM_REQUESTS).checked()
        model = SimulatedModel(config, self.latency, num_blocks=4097, max_model_len=2048)
        arrivals = [Arrival(at, each.prompt_ids, each.output_tokens) for at, each in zip(times, self.requests, strict=True)]
        site = SimulatedSite([model])
        if batching == "static":
            site.replicas[0].engine.scheduler.batch_statically()
        report = summarize(site.run(arrivals))
        if report.finished < NUM_REQUESTS:
            raise RuntimeError(f"{NUM_REQUESTS - report.finished} of {NUM_REQUESTS} requests were not answered")
        return report

    def at_once(self, batching: str) -> LoadReport:
        return self.run(batching, [0.0] * NUM_REQUESTS)

    def highest_rate(self, batching: str, at_most: float) -> float:
        """Requests per second, `at_most` at most."""

        def run_at(rate: float) -> LoadReport:
            return self.run(batching, send_times(NUM_REQUESTS, rate=rate, seed=1))

        goal_s = 2 * SHAPE.output_tokens * self.latency.decode_s(BATCH, CONTEXT)
        return highest_rate(run_at, goal_s=goal_s, at_most=at_most, halvings=ROUNDS)[0]


def measure(say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cost, latency in latencies(Path(folder)):
            alone = latency.decode_s(1, CONTEXT) / latency.decode_s(BATCH, CONTEXT)
            for spread, requests in spreads().items():
                cell = Cell(latency, requests)
                reports = {batching: cell.at_once(batching) for batching in ("static", "continuous")}
                most = 1.5 * reports["continuous"].request_throughput
                rates = {batching: cell.highest_rate(batching, most) for batching in reports}
                row = {
                    "cost": cost,
                    "one_to_full": alone,
                    "spread": spread,
                    "at_once": reports["continuous"].output_throughput / reports["static"].output_throughput,
                    "at_equal_latency": rates["continuous"] / rates["static"] if rates["static"] else None,
                }
                say(str(row))
                rows.append(row)
    return rows


def section(data: dict[str, Any]) -> Iterator[str]:
    """The part of docs/benchmarks.md."""
    yield "## Continuous to static batching, by lengths and by what a step costs\n"
    yield (
        f"Simulated: {NUM_REQUESTS} requests, {BATCH} in a batch, prompts and outputs of {SHAPE.input_tokens} tokens in the mean. The "
        "first number is the ratio of tokens per second when all are there at once; the second that of the highest request rates at which "
        "the median answer takes no longer than twice a mean answer in a full batch. The tables above have 64 requests: while the last of "
        "them run, no batch is full, and a part of the gain is lost.\n"
    )
    spreads = list(dict.fromkeys(row["spread"] for row in data["rows"]))
    yield "| a step costs | one sequence's step, of a full batch's | " + " | ".join(f"{name} lengths" for name in spreads) + " |"
    yield "|---|---|" + "---|" * len(spreads)
    for cost in dict.fromkeys(row["cost"] for row in data["rows"]):
        rows = {row["spread"]: row for row in data["rows"] if row["cost"] == cost}
        cells = [f"{rows[name]['at_once']:.2f}, {_ratio(rows[name]['at_equal_latency'])}" for name in spreads]
        yield f"| {cost} | {rows[spreads[0]]['one_to_full']:.0%} | " + " | ".join(cells) + " |"
    environment = data["environment"]
    yield f"\n{environment['time']}, commit {environment['commit']}, {environment['cpu']}: [{FILE.name}](../bench/results/{FILE.name}).\n"


def _ratio(value: float | None) -> str:
    return "static never does" if value is None else f"{value:.2f}"


def run() -> None:
    """Write the file."""
    write_portable(FILE, {"environment": environment(), "rows": measure()})


if __name__ == "__main__":
    run()
