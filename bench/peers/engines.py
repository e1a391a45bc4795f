"""Starts, asks and ends the engines of the comparison. One runs at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from bench.peers.rows import STARTUP_PROMPT, Ids
from headrace.tensor.host.cpu_features import read_cpu_features

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]
LOAD_TIMEOUT_S = 900.0
END_TIMEOUT_S = 20.0


VLLM_DTYPES = {"bf16": "float32", "int8": "float32", "int4": "bfloat16"}
"""On a CPU without bfloat16 products: see "vLLM's settings" in the README."""


class CannotRun(Exception):
    """This engine cannot do this cell here; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start: a worker script under a Python, with its settings and environment."""

    python: Path
    script: str
    settings: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)


class Worker:
    """A running worker. `ask` blocks; the peak memory of its processes is sampled whenever it is asked."""

    def __init__(self, launch: Launch, log: IO[bytes]) -> None:
        command = [str(launch.python), str(WORKERS / launch.script), json.dumps(launch.settings)]
        self.setting = {"worker": launch.script, **launch.settings, "environment": dict(launch.environment)}
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **launch.environment},
            start_new_session=True,
        )
        self._peaks: dict[int, int] = {}

    def first_token_seconds(self) -> float:
        """From the process's start to the first token of a short prompt. Call it first: it was waiting to be asked."""
        self.ask([list(range(100, 100 + STARTUP_PROMPT))], [1])
        return time.perf_counter() - self._began

    def ask(self, prompts: list[Ids], max_tokens: list[int]) -> float:
        """Seconds for these requests. Raises CannotRun with the worker's own words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise CannotRun("the worker has ended; see its log") from error
        line = self._process.stdout.readline()
        self._look_at_memory()
        if not line:
            raise CannotRun("the worker has ended; see its log")
        answer = json.loads(line)
        if "error" in answer:
            raise CannotRun(answer["error"])
        if answer["tokens"] != sum(max_tokens):
            raise CannotRun(f"made {answer['tokens']} tokens where {sum(max_tokens)} were asked for")
        return float(answer["seconds"])

    def peak_memory_bytes(self) -> int:
        """Sum over its processes of each one's peak resident size."""
        self._look_at_memory()
        return sum(self._peaks.values())

    def _look_at_memory(self) -> None:
        with suppress(psutil.Error):
            parent = psutil.Process(self._process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                with suppress(OSError, psutil.Error):
                    self._peaks[process.pid] = peak_of(process.pid)

    def close(self) -> None:
        """End the worker and every process it started."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        end_tree(self._process)


def end_tree(process: subprocess.Popen[Any]) -> None:
    """End a process and all it started, whatever sessions they made for themselves: SIGTERM first, then SIGKILL."""
    family = []
    with suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    process.kill()
    process.wait()
    for left in family:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(family, END_TIMEOUT_S)


def peak_of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def running(launch: Launch, log: Path) -> Iterator[Worker]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        worker = Worker(launch, file)
        try:
            yield worker
        finally:
            worker.close()


def launch_of(engine: str, model: Path, precision: str, envs: Path, threads: int) -> Launch:
    """How `engine` is run at its best setting of `precision`. Raises CannotRun when it is not set up or has no such precision."""
    makers = {"headrace": _headrace, "vllm": _vllm, "openvino": _openvino, "ceiling": _ceiling}
    return makers[engine](model, precision, envs, threads)


def _headrace(model: Path, precision: str, envs: Path, threads: int) -> Launch:
    options: dict[str, object] = {"max_model_len": 4096, "enable_prefix_caching": False, "num_threads": threads}
    options["kv_cache_dtype"] = "bfloat16"  # as wide as the peers' own caches
    if precision != "bf16":
        options["quantization"] = precision
    return Launch(python=Path(sys.executable), script="headrace_worker.py", settings={"model": str(model), "options": options})


def _ceiling(model: Path, precision: str, envs: Path, threads: int) -> Launch:
    return Launch(
        python=Path(sys.executable),
        script="ceiling_worker.py",
        settings={"model": str(model), "precision": precision, "threads": threads},
        environment={"PYTHONPATH": str(ROOT)},
    )


def _vllm(model: Path, precision: str, envs: Path, threads: int) -> Launch:
    home = envs / "vllm"
    weights = model if precision == "bf16" else model.with_name(f"{model.name}.compressed") / precision
    _need(home / "bin" / "python", weights)
    options: dict[str, object] = {"max_model_len": 4096, "max_num_seqs": 64, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    if not read_cpu_features().has_bf16:
        options |= {"dtype": VLLM_DTYPES[precision], "enforce_eager": True}
    preloads = [*Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"), *home.rglob("libiomp5.so")]
    return Launch(
        python=home / "bin" / "python",
        script="vllm_worker.py",
        settings={"model": str(weights), "options": options},
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "LD_PRELOAD": ":".join(map(str, preloads)),
        },
    )


def _openvino(model: Path, precision: str, envs: Path, threads: int) -> Launch:
    home = envs / "openvino"
    weights = model.with_name(f"{model.name}.openvino") / precision
    _need(home / "bin" / "python", weights)
    options = {"cache_size": 4, "enable_prefix_caching": False, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    settings = {"model": str(weights), "options": options, "properties": {"INFERENCE_NUM_THREADS": threads}}
    return Launch(python=home / "bin" / "python", script="openvino_worker.py", settings=settings)


def _need(*paths: Path) -> None:
    for path in paths:
        if not path.exists():
            raise CannotRun(f"{path} does not exist")
