"""Measures the time from the start of a process to its first token, by stage: fresh processes of the offline API on a warm page cache.

    python -m bench.startup MODEL [MODEL ...] [--quantization int8] [--runs 5] -> bench/results/MACHINE/startup.json

A run is two processes. The plain one measures how long everything took. The staged one shows where the time went: it imports the large
packages by name where the engine would import them, and puts a clock around the functions that `build_runner` calls. Caches are the
benchmark's own: a first process compiles the kernels and packs the weights (`first_ever`), a second one packs them again (`pack`).
Processor seconds stand beside seconds: on a machine with other programs, they say more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 16
WRAPPED = ("describe", "choose_backend", "plan_threads", "load_model", "size_kv")
"""Functions of `loading`, in the order in which they are called."""
DD_BLOCK_BYTES = 4 << 20


class Clock:
    """Seconds and processor seconds by stage, since the process was asked for at `began` (CLOCK_MONOTONIC is the machine's)."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.stages: dict[str, tuple[float, float]] = {}
        self._last = (began, 0.0)

    def stage(self, name: str) -> None:
        """Everything since the stage before."""
        now = (time.monotonic(), time.process_time())
        self.stages[name] = (now[0] - self._last[0], now[1] - self._last[1])
        self._last = now

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with what lies between the stage before and its call as a stage of its own."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self.stage(f"before {name}")
            result = function(*arguments, **named)
            self.stage(name)
            return result

        return timed


def run_once(model: str, quantization: str | None, clock: Clock, *, is_staged: bool) -> None:
    """In the fresh process: load, answer, print what it took."""
    from headrace import LLM, SamplingParams

    if is_staged:
        clock.stage("import headrace")
        _import_in_stages(clock)
    llm = LLM(model, quantization=quantization)
    clock.stage("after warm-up" if is_staged else "LLM")
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    llm.generate([{"prompt_token_ids": list(range(5, 5 + PROMPT_TOKENS))}], params, use_tqdm=False)
    clock.stage("first token")
    print(json.dumps({"total": [time.monotonic() - clock.began, time.process_time()], "stages": clock.stages}))


def _import_in_stages(clock: Clock) -> None:
    """Where the engine begins to read ahead and then imports everything, import the large packages by name."""
    module: Any = import_module("headrace.engine.build")
    begin = module.read_ahead

    def begin_and_import(config: Any, rank: int = 0) -> Any:
        folder = begin(config, rank)
        clock.stage("before torch")
        import torch  # noqa: F401

        clock.stage("import torch")
        import numba  # noqa: F401

        clock.stage("import numba")
        from headrace.engine.runner import build as runner_build
        from headrace.engine.runner import loading

        clock.stage("import the engine")
        for module, name in (*((loading, name) for name in WRAPPED), (runner_build, "warm_up")):
            setattr(module, name, clock.around(name, getattr(module, name)))
        return folder

    module.read_ahead = begin_and_import


def fresh(model: str, quantization: str | None, mode: str, cache: Path) -> dict[str, Any]:
    """A process of its own. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "bench.startup", model, "--mode", mode, "--began", repr(time.monotonic())]
    command += ["--quantization", quantization] if quantization else []
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["HEADRACE_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def raw_read(folder: Path) -> dict[str, float]:
    """GB/s of our reader and of dd over the largest weight file, in the page cache, in turns; the best of three each."""
    from headrace.tensor.host.pages import read_bytes

    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    seconds: dict[str, list[float]] = {"reader": [], "dd": []}
    for _ in range(3):
        began = time.perf_counter()
        read_bytes(file, 0, size)
        seconds["reader"].append(time.perf_counter() - began)
        began = time.perf_counter()
        subprocess.run(["dd", f"if={file}", "of=/dev/null", f"bs={DD_BLOCK_BYTES}"], stderr=subprocess.DEVNULL, check=True)
        seconds["dd"].append(time.perf_counter() - began)
    return {name: size / min(each) / 1e9 for name, each in seconds.items()}


def measure(model: str, quantization: str | None, runs: int, cache: Path) -> dict[str, object]:
    """All figures of one model."""
    folder = Path(model)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    first = fresh(model, quantization, "plain", cache)
    for file in cache.glob("packed/*"):
        file.unlink()
    pack = fresh(model, quantization, "staged", cache)
    plain, staged = [], []
    for _ in range(runs):
        plain.append(fresh(model, quantization, "plain", cache))
        staged.append(fresh(model, quantization, "staged", cache))
    entry: dict[str, Any] = {"model": folder.name, "quantization": quantization, "checkpoint_bytes": size, "first_ever": first}
    entry |= {"pack": pack, "plain": plain, "staged": staged, "raw_read_gb_per_s": raw_read(folder)}
    tell(entry)
    return entry


def tell(entry: dict[str, Any]) -> None:
    """Print an entry as a table."""
    totals, processor = ([run["total"][i] for run in entry["plain"]] for i in (0, 1))
    seconds = entry["pack"]["stages"]["load_model"][0]
    print(f"{entry['model']} {entry['quantization'] or 'as stored'}: {min(totals):.2f} s at best, {statistics.median(totals):.2f} s in the")
    print(f"  middle, {min(processor):.2f} processor s; the first time ever {entry['first_ever']['total'][0]:.1f} s")
    print(f"  packing: {entry['checkpoint_bytes'] / seconds / 1e9:.2f} GB/s of the checkpoint; {entry['raw_read_gb_per_s']} GB/s")
    for name in entry["staged"][0]["stages"]:
        wall, cpu = zip(*(run["stages"][name] for run in entry["staged"]), strict=True)
        print(f"  {name:22} {min(wall):6.3f} s at best {statistics.median(wall):6.3f} s in the middle {min(cpu):6.3f} processor s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="model folders")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mode", choices=("plain", "staged"), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.mode:
        clock = Clock(given.began)
        clock.stage("interpreter")
        run_once(given.models[0], given.quantization, clock, is_staged=given.mode == "staged")
        return
    from bench.harness import write_portable
    from bench.machine import results_file
    from headrace.lab.environment import environment

    with tempfile.TemporaryDirectory() as cache:
        entries = [measure(model, given.quantization, given.runs, Path(cache)) for model in given.models]
    write_portable(results_file("startup"), {"environment": asdict(environment()), "entries": entries})


if __name__ == "__main__":
    main()
