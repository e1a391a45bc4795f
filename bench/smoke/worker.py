"""Times the rows of one side in a process of its own. It runs on whichever `headrace` its PYTHONPATH names and imports nothing else of
ours.

    python -P worker.py MODEL

Says {"ready": ...} once everything is loaded; then answers each line {"row": NAME, "seed": N} with {"seconds": S}. A row's seed decides
its prompts. Rows: "decode-1 bf16" (and -8, int8, int4): a step; "prefill bf16": of 128 tokens; "scheduler".
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import headrace
from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.lab.datasets import WorkloadShape, make_requests
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.lab.offline import Collector, OfflineRun, run_offline

QUANTIZATIONS = {"bf16": "none", "int8": "int8", "int4": "int4"}
DECODE = {"decode-1": 1, "decode-8": 8}
DECODE_TOKENS, PROMPT_TOKENS, PREFILL_TOKENS = 10, 4, 128
RUNNING, REQUESTS = 64, 320


class Timed:
    """A scheduler whose `plan` and `commit` are timed; everything else is the scheduler's own."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def plan(self, *arguments: Any) -> Any:
        return self._clocked(self._scheduler.plan, *arguments)

    def commit(self, *arguments: Any) -> Any:
        return self._clocked(self._scheduler.commit, *arguments)

    def _clocked(self, call: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.seconds += time.perf_counter() - began


class Workload:
    """Three engines of one model and the policy side alone."""

    def __init__(self, model: Path) -> None:
        self.engines = {precision: self._load(model, quantization) for precision, quantization in QUANTIZATIONS.items()}

    @staticmethod
    def _load(model: Path, quantization: str) -> tuple[Engine, Collector]:
        collector = Collector()
        config = EngineConfig(model=str(model), quantization=quantization, kv_cache_bytes=1 << 26, enable_prefix_caching=False)
        return build_engine(config.checked(), collector), collector

    def seconds(self, row: str, seed: int) -> float:
        if row == "scheduler":
            return self.scheduler(seed)
        kind, _, precision = row.partition(" ")
        if kind == "prefill":
            return self.run(precision, 1, WorkloadShape(input_tokens=PREFILL_TOKENS, output_tokens=1), seed).duration_s
        run = self.run(precision, DECODE[kind], WorkloadShape(input_tokens=PROMPT_TOKENS, output_tokens=DECODE_TOKENS), seed)
        return statistics.median(after - before for before, after in itertools.pairwise(run.records[0].chunk_s))

    def run(self, precision: str, count: int, shape: WorkloadShape, seed: int) -> OfflineRun:
        engine, collector = self.engines[precision]
        run = run_offline(engine, collector, make_requests(count, shape, seed=seed))
        errors = [record.error for record in run.records if record.error]
        if errors:
            raise RuntimeError(f"{len(errors)} of {count} requests failed: {errors[0]}")
        return run

    @staticmethod
    def scheduler(seed: int) -> float:
        """Planning and committing 320 requests, 64 of them at once, over a runner that makes tokens up."""
        collector = Collector()
        engine = fake_engine(collector, FakeOptions(verify=False), EngineConfig(model="fake", max_num_seqs=RUNNING))
        timed = Timed(engine.scheduler)
        engine.scheduler = timed  # type: ignore[assignment]
        run_offline(engine, collector, make_requests(REQUESTS, WorkloadShape(input_tokens=64, output_tokens=16, spread=0.5), seed=seed))
        return timed.seconds


def prepare_openmp() -> None:
    """`prepare_openmp` of whichever tree is timed: it has moved, and a base may be older than that."""
    names = ("headrace.tensor.host.openmp", "headrace.tensor.openmp")
    found = next(name for name in names if _exists(name))
    importlib.import_module(found).prepare_openmp(os.environ)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package is there
        return False


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints goes to the log
    prepare_openmp()  # before torch, which building an engine imports
    workload = Workload(Path(sys.argv[1]))
    print(json.dumps({"ready": {"headrace": headrace.__file__}}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"seconds": workload.seconds(asked["row"], asked["seed"])}), file=answers)


if __name__ == "__main__":
    main()
