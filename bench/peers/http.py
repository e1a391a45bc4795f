"""Measures the engines' own OpenAI servers under the same open-loop load, one after the other; a cell per rate.

    python -m bench.peers.http --models FOLDER --envs FOLDER --shape llama-1.1b --precision bf16 --rounds 5

The rates are shares of what Headrace finished per second when all requests came at once (`http-capacity`, measured first and then kept). So
every engine and round meets the same absolute rates. The client is that of `headrace bench serve`. Needs a quiet machine.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.machine import this_machine
from bench.peers.cells import Cell
from bench.peers.engines import CannotRun, launch_of
from bench.peers.llama_cpp import llama_cpp
from bench.peers.rows import HIGH_ID, LOW_ID, Figure
from bench.peers.run import Turn, parser_of, take_turns
from bench.peers.servers import MODEL_NAME, ServerLaunch, flags_of, serving
from headrace.lab.datasets import WorkloadShape, make_requests, send_times
from headrace.lab.loadgen import LoadTarget, run_load
from headrace.lab.metrics import LoadReport, Slo, parse_slo, summarize

ENGINES = ("headrace", "llama.cpp", "vllm")
CAPACITY = "http-capacity"
RATES: Mapping[str, float] = {"http-40": 0.4, "http-80": 0.8}
"""Row -> share of the capacity that is offered."""
NUM_REQUESTS = 32
WORKLOAD = WorkloadShape(input_tokens=128, output_tokens=64, spread=0.5, low_id=LOW_ID, high_id=HIGH_ID)
WARM_UP = WorkloadShape(input_tokens=32, output_tokens=4, low_id=LOW_ID, high_id=HIGH_ID)
WARM_UPS = 2
REQUEST_TIMEOUT_S = 240.0
"""From the intended send time: no load lasts longer than its schedule and this."""
SLOS: Mapping[str, tuple[str, ...]] = {
    "llama-1.1b": ("ttft:4000", "tpot:400"),
    "qwen2-0.4b": ("ttft:2000", "tpot:200"),
    "llama-0.5b-hd128": ("ttft:2000", "tpot:200"),
}
"""Limits of one request, in milliseconds: some three times what an idle pair of cores needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """num_requests of WORKLOAD's lengths at `rate` per second, Poisson. Equal seeds are equal requests and moments."""

    rate: float
    seed: int
    slo: Slo
    num_requests: int = NUM_REQUESTS
    shape: WorkloadShape = WORKLOAD
    timeout_s: float = REQUEST_TIMEOUT_S

    def run(self, url: str) -> LoadReport:
        target = LoadTarget(url=url, model=MODEL_NAME, timeout_s=self.timeout_s)
        times = send_times(self.num_requests, rate=self.rate, seed=self.seed)
        requests = make_requests(self.num_requests, self.shape, seed=self.seed)
        return summarize(asyncio.run(run_load(target, requests, times)), self.slo)


def figures_of(report: LoadReport, rate: float) -> dict[str, float | None]:
    """What a cell keeps. Failed requests are infinitely late: a quantile that meets one is null. `rate`: offered per second."""
    found = {
        "rate": rate,
        "offered": report.offered,
        "failed": report.offered - report.finished,
        "goodput": report.goodput,
        "output_tokens_per_s": report.output_throughput,
        "requests_per_s": report.request_throughput,
        "peak_concurrency": report.peak_concurrency,
        "prompt_tokens": report.prompt_tokens,
        "output_tokens": report.output_tokens,
        "num_gaps": report.itl_s.count,
        "client_lag_p99_s": report.client_lag_s.quantiles["p99"],
    }
    for name, measure in (("ttft", report.ttft_s), ("itl", report.itl_s), ("tpot", report.tpot_s)):
        found |= {f"{name}_{quantile}_s": measure.quantiles[quantile] for quantile in ("p50", "p99")}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}


def measured(load: Load, url: str, row: str) -> Figure:
    """The row's figure: requests finished per second, within the SLO for the rows of RATES. Raises CannotRun when none is finished."""
    report = load.run(url)
    if not report.finished:
        raise CannotRun(f"no request was finished: {dict(report.errors)}")
    value = report.request_throughput if row == CAPACITY else report.goodput
    assert value is not None
    return Figure(value, "req/s", (), figures_of(report, load.rate) if row != CAPACITY else {})


def rate_of(turn: Turn, row: str) -> float:
    """Requests per second to offer. Raises CannotRun before the capacity is known."""
    if row == CAPACITY:
        return math.inf
    measured = Cell(this_machine(), turn.shape, turn.precision, "headrace", CAPACITY, 0).outcome
    capacity = measured.value if measured else None
    if capacity is None:
        raise CannotRun(f"there is no {CAPACITY} of headrace for {turn.shape} {turn.precision} yet")
    return RATES[row] * capacity


def take(turn: Turn, model: Path, envs: Path, threads: int) -> None:
    """Start the turn's server, warm it up, load it with every wanted row, end it."""
    if turn.round:
        turn.wanted = [row for row in turn.wanted if row != CAPACITY]  # is measured once
    if CAPACITY not in turn.wanted:
        rate_of(turn, next(iter(RATES)))
    if not turn.wanted:
        return
    launch = server_of(turn.engine, model, turn.precision, envs, threads)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            with serving(launch, log) as server:
                load_server(turn, server.url, {**launch.setting, "slo": SLOS[turn.shape], "workload": str(WORKLOAD)})
        except CannotRun:
            sys.stderr.write(log.read_text(errors="replace")[-3000:])
            raise


def load_server(turn: Turn, url: str, setting: Mapping[str, object]) -> None:
    plan = Load(rate=math.inf, seed=turn.seed, slo=parse_slo(SLOS[turn.shape]))
    measured(replace(plan, shape=WARM_UP, num_requests=WARM_UPS), url, CAPACITY)
    for row in turn.wanted:
        turn.keep(row, setting, lambda row=row: measured(replace(plan, rate=rate_of(turn, row)), url, row))  # type: ignore[misc]


def rows_of(engine: str) -> tuple[str, ...]:
    return (CAPACITY, *RATES) if engine == "headrace" else tuple(RATES)


def server_of(engine: str, model: Path, precision: str, envs: Path, threads: int) -> ServerLaunch:
    """The engine's own server, with the options that its offline rows are measured with. Raises CannotRun when it is not set up."""
    if engine == "llama.cpp":
        return llama_cpp(model, precision, envs, threads).server_launch
    start, ready = {
        "headrace": (("-m", "headrace", "serve", "--model"), "/ready"),
        "vllm": (("-m", "vllm.entrypoints.openai.api_server", "--model"), "/health"),
    }[engine]
    launch = launch_of(engine, model, precision, envs, threads)
    options = launch.settings["options"]
    assert isinstance(options, Mapping)
    command = (str(launch.python), *start, str(launch.settings["model"]), "--served-model-name", MODEL_NAME, *flags_of(options))
    return ServerLaunch(command=command, ready=ready, environment=launch.environment)


def main(arguments: list[str] | None = None) -> None:
    given = parser_of(__doc__, ENGINES, (CAPACITY, *RATES)).parse_args(arguments)
    take_turns(given, rows_of, take)


if __name__ == "__main__":
    main()
