"""Runs a deployment through a spike of its load: one replica, as many as the load wants, and one again. Nothing may be lost.

    python -m bench.storms.scaling [--spike-s 60] [--load-s 20] [--standby 0] [--compress 10]  ->  bench/results/storms/scaling.json

Supervisor, gateway, wire and schedulers are real; the engines compute nothing (`lab.fake_engine`), take `--load-s` to start, and end about
3 requests a second each. The load is a request every two seconds, then 6.5 a second for `--spike-s`, then as before. The rules' times
(`policy.scaling`) are divided by `--compress`, so that the replicas leave within the minute.

replicas       (seconds, listed, that serve, that stand by), at each change
lost           requests that were refused, timed out or ended short
ttft_s         of all requests, and of those of the spike
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.storms.common import write_result
from bench.storms.paced import quantiles
from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.fleet.config import FleetConfig, ModelSpec, ReplicaRange
from headrace.fleet.supervisor import FleetReady, Supervisor
from headrace.lab.datasets import WorkloadShape, make_requests, send_times
from headrace.lab.environment import environment
from headrace.lab.loadgen import LoadTarget, run_load
from headrace.lab.metrics import LoadRecord
from headrace.machine.signals import first_of
from headrace.observe.logs import LogFormat, set_up_logging
from headrace.policy.deployment import ReplicaPhase
from headrace.policy.scaling import autoscaler

NUM_TOKENS = 50
FAKE = {"step_seconds": 0.05, "verify": False}
ENGINE = {"max_num_seqs": 8}
CALM_RATE, SPIKE_RATE = 0.5, 6.5
BEFORE_S = 10.0
MOST = 3
TIMES = ("MIN_DRAIN_S", "FAST_S", "SLOW_S", "LEARN_S", "OUTPUT_LEARN_S", "MIN_SETTLE_S", "IDLE_S", "FULL_S")
PATIENCE_S = 60.0


def run_engine(load_s: float, arguments: list[str]) -> None:
    """As a process of the deployment. The supervisor's file gets the options of the fake."""
    from headrace.lab.fake_engine import main as run_fake

    time.sleep(load_s)
    path = Path(arguments[arguments.index("--config") + 1])
    path.write_text(json.dumps({**json.loads(path.read_text()), "fake": FAKE}))
    run_fake(arguments)


def compress(factor: float) -> None:
    for name in TIMES:
        setattr(autoscaler, name, getattr(autoscaler, name) / factor)


def loads(spike_s: float, after_s: float) -> list[float]:
    """Seconds at which requests are sent."""
    spans = ((CALM_RATE, BEFORE_S), (SPIKE_RATE, spike_s), (CALM_RATE, after_s))
    at, begin = list[float](), 0.0
    for seed, (rate, seconds) in enumerate(spans):
        at += [begin + later for later in send_times(int(rate * seconds), rate=rate, seed=seed)]
        begin += seconds
    return at


class Watch:
    def __init__(self, supervisor: Supervisor) -> None:
        self.changes: list[tuple[float, int, int, int]] = []
        self._supervisor = supervisor
        self._since = time.monotonic()

    async def run(self) -> None:
        while True:
            reconciler = self._supervisor._reconciler
            assert reconciler is not None, "it serves"
            phases = Counter(replica.phase for replica in reconciler.deployment.of(DEFAULT_MODEL))
            counts = len(reconciler.deployment.listed(DEFAULT_MODEL)), phases[ReplicaPhase.SERVING], phases[ReplicaPhase.STANDBY]
            if not self.changes or self.changes[-1][1:] != counts:
                self.changes.append((round(time.monotonic() - self._since, 1), *counts))
                print(*self.changes[-1], flush=True)
            await asyncio.sleep(0.1)


async def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = bundled_path(DEFAULT_MODEL)
    assert model is not None
    autoscale = ReplicaRange(min=1, max=MOST)
    spec = ModelSpec(name=DEFAULT_MODEL, folder=model, engine=ENGINE, autoscale=autoscale, standby=given.standby)
    config = FleetConfig(
        models=(spec,),
        gateway={"port": 0, "request_log": "off", "state": str(folder)},
        run_dir=str(folder),
        engine_command=(sys.executable, "-m", "bench.storms.scaling", "engine", str(given.load_s)),
    )
    ready: asyncio.Future[FleetReady] = asyncio.get_running_loop().create_future()
    supervisor = Supervisor(config, on_ready=ready.set_result)
    running = asyncio.create_task(supervisor.run())
    await first_of(running, ready)
    target = LoadTarget(url=f"http://127.0.0.1:{ready.result().gateway['port']}", model=DEFAULT_MODEL, timeout_s=PATIENCE_S)
    watch = Watch(supervisor)
    watching = asyncio.create_task(watch.run())
    settle_s = max(autoscaler.MIN_SETTLE_S, 2 * given.load_s)
    at = loads(given.spike_s, 4 * settle_s + 20.0)
    shape = WorkloadShape(input_tokens=20, output_tokens=NUM_TOKENS, spread=0.0)
    records = await run_load(target, make_requests(len(at), shape, seed=1), at)
    watching.cancel()
    signal.raise_signal(signal.SIGTERM)
    exit_status = await running
    return {**found(records, given.spike_s), "replicas": watch.changes, "exit": int(exit_status)}


def found(records: Sequence[LoadRecord], spike_s: float) -> dict[str, Any]:
    lost = [record for record in records if not record.is_finished or record.output_tokens != NUM_TOKENS]
    begin = records[0].intended_s + BEFORE_S
    spike = [record for record in records if begin <= record.intended_s < begin + spike_s]
    return {
        "requests": len(records),
        "lost": len(lost),
        "lost_as": dict(Counter(record.error or "short" for record in lost)),
        "ttft_s": {
            name: quantiles((each.ttft_s for each in part if math.isfinite(each.ttft_s)), 3)
            for name, part in (("all", records), ("spike", spike))
        },
    }


def main() -> None:
    if sys.argv[1:2] == ["engine"]:
        run_engine(float(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spike-s", type=float, default=60.0)
    parser.add_argument("--load-s", type=float, default=20.0)
    parser.add_argument("--standby", type=int, default=0)
    parser.add_argument("--compress", type=float, default=10.0)
    parser.add_argument("--no-file", action="store_true")
    given = parser.parse_args()
    before = environment()
    set_up_logging(LogFormat.TEXT)
    compress(given.compress)
    with TemporaryDirectory(prefix="headrace-scaling-") as folder:
        result = asyncio.run(run(given, Path(folder)))
    print(json.dumps({name: value for name, value in result.items() if name != "replicas"}), flush=True)
    most = max(serving for _, _, serving, _ in result["replicas"])
    assert (result["lost"], most, result["replicas"][-1][2]) == (0, MOST, 1), "see above"
    if not given.no_file:
        write_result("scaling", {"environment": before, "settings": vars(given), **result})


if __name__ == "__main__":
    main()
