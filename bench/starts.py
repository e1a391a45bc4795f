"""Measures what a user waits for: seconds from `headrace serve` of a model in a registry, or from `headrace wake`, to its first token.

    python -m bench.starts MODEL [--runs 3] [--quantization int8] -> bench/results/MACHINE/starts.json

new machine     nothing is cached: the model is pulled, kernels are compiled, weights are packed
new model       kernels are compiled: the model is pulled, weights are packed
again           the model is here, and its weights are packed
asleep, disk    the server runs, its engine has given weights and KV cache back; the command's own process is not counted
asleep, ram     the same, and the engine has kept the weights

A run is one of each, in this order; the median and all values are printed. MODEL's folder is pushed to a registry in a folder first. Its
files, and those that are written, stay in the page cache, so that disks count for little.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.harness import ROOT, write_portable
from bench.machine import results_file
from bench.smoke.children import SERVED, Server, answers, server
from bench.smoke.trees import Side, SmokeError
from headrace.cli.admin.client import AdminClient, find_deployment
from headrace.core.sleep import SleepLevel
from headrace.lab.environment import environment
from headrace.registry.remote import Registry

START_TIMEOUT_S, PACK_TIMEOUT_S, POLL_S = 600.0, 300.0, 0.02


def start_new(side: Side, model: str, flags: Sequence[str]) -> float:
    """The packed weights are on disk afterwards."""
    with server(side, side.cache / "log", model=model, flags=flags, timeout_s=START_TIMEOUT_S) as started:
        until = time.monotonic() + PACK_TIMEOUT_S
        while not list(side.cache.glob("packed/*.safetensors")):
            if time.monotonic() > until:
                raise SmokeError(f"the weights of {model} are not packed on disk: it is smaller than 4 MiB, or not idle")
            time.sleep(POLL_S)
        return started.start_s


def wake(started: Server, client: AdminClient, level: SleepLevel) -> float:
    _command(client, "sleep", {"model": SERVED, "level": level.value})
    began = time.monotonic()
    _command(client, "wake", {"model": SERVED})
    while not answers(started.port):
        if time.monotonic() - began > START_TIMEOUT_S:
            raise SmokeError("the engine does not answer once it is awake")
        time.sleep(POLL_S)
    return time.monotonic() - began


def _command(client: AdminClient, name: str, body: dict[str, object]) -> None:
    *_, last = client.command(name, body)
    if last["event"] != "done":
        raise SmokeError(f"{name}: {last.get('reason')}")


def one_run(model: str, flags: Sequence[str]) -> dict[str, float]:
    """Seconds of each, in a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="starts-") as folder:
        side = Side("headrace", ROOT / "src", Path(folder, "cache"))
        side.cache.mkdir(mode=0o700)
        found = {"new machine": start_new(side, model, flags)}
        for part in ("registry", "packed"):
            shutil.rmtree(side.cache / part)
        found["new model"] = start_new(side, model, flags)
        with server(side, side.cache / "log", model=model, flags=flags, timeout_s=START_TIMEOUT_S) as started:
            found["again"] = started.start_s
            client = AdminClient(find_deployment(None))
            found["asleep, disk"] = wake(started, client, SleepLevel.DISK)
            found["asleep, ram"] = wake(started, client, SleepLevel.RAM)
        return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model's folder")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    given = parser.parse_args(arguments)
    flags = [] if given.quantization is None else ["--quantization", given.quantization]
    with tempfile.TemporaryDirectory(prefix="registry-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # no other deployment of this user runs there
        manifest, _ = Registry(f"file://{folder}", may_make=True).push(given.model, "served", "1")
        runs = []
        for number in range(given.runs):
            runs.append(one_run(f"file://{folder}/served:1", flags))
            print(f"run {number + 1}: {json.dumps({name: round(seconds, 2) for name, seconds in runs[-1].items()})}", flush=True)
    facts = {"model": given.model.resolve().name, "bytes": manifest.num_bytes, "quantization": given.quantization}
    print(f"{facts['model']}, {manifest.num_bytes / 1e9:.2f} GB, {given.quantization or 'as stored'}: seconds to the first token")
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        print(f"  {name:14} {statistics.median(values):7.2f}   {', '.join(f'{value:.2f}' for value in values)}")
    file = results_file("starts")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_portable(file, {**facts, "environment": asdict(environment()), "runs": runs})


if __name__ == "__main__":
    main()
