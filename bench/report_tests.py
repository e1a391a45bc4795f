"""The part of docs/benchmarks.md that is no comparison in rounds: many streams, a storm of leaving clients, bfloat16, precisions.

The files are written by `make test-slow` (`make test` for bfloat16) and by `python -m bench.quality` into bench/results/.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Lines = Iterator[str]


def test_sections(folder: Path) -> Lines:
    """Markdown lines for every result that is there."""
    for name, section in _SECTIONS.items():
        file = folder / f"{name}.json"
        if file.is_file():
            data = json.loads(file.read_bytes())
            yield from section(data)
            yield _origin(data["environment"], file)


def _streams(data: dict[str, Any]) -> Lines:
    yield "## Many streams\n"
    yield (
        f"{data['num_streams']} concurrent event streams of {data['tokens_per_stream']} tokens through the gateway, from an engine that "
        f"computes nothing and takes {data['step_seconds']} s a step, speaking the real wire; the clients run on the same cores.\n"
    )
    yield "| dropped | chunks | gateway CPU per chunk | memory per stream | event loop late: p50 | p99 | at most |"
    yield "|---|---|---|---|---|---|---|"
    lag = data["lag_ms"]
    yield (
        f"| {data['num_dropped']} | {data['num_chunks']:,} | {data['cpu_us_per_chunk']:.0f} us | {data['kib_per_stream']:.1f} KiB "
        f"| {lag['p50']:.2g} ms | {lag['p99']:.0f} ms | {lag['max']:.0f} ms |\n"
    )
    yield "All streams get their tokens in the same instant, once per step: the lateness is the time to write a thousand chunks.\n"


def _storm(data: dict[str, Any]) -> Lines:
    storm, after = data["storm"], data["engine_after"]
    yield "## Clients that leave\n"
    yield (
        f"{storm['num_requests']:,} requests, of which {storm['num_left']} disconnected at random moments, in {storm['seconds']:.0f} s; "
        f"{storm['num_wrong']} of the {storm['num_whole']:,} others were answered wrongly. Afterwards {after['num_running']} ran, "
        f"{after['num_waiting']} waited, and {after['kv_blocks_used']} KV block was used (the pad block).\n"
    )
    yield "| | descriptors before | after | threads before | after | kinds of tasks before | after |"
    yield "|---|---|---|---|---|---|---|"
    for process, before in data["before"].items():
        now = data["after"][process]
        counts = [(part[name] if isinstance(part[name], int) else len(part[name])) for name in _HELD for part in (before, now)]
        yield f"| {'gateway' if process == 'gateway' else 'engine'} | " + " | ".join(map(str, counts)) + " |"
    yield ""


_HELD = ("num_fds", "num_threads", "tasks")


def _bfloat16(data: dict[str, Any]) -> Lines:
    yield "## bfloat16 beside float32\n"
    yield (
        "Greedy tokens in bfloat16, batched, chunked and cached, against the plain loop's. They may differ only where the reference's two "
        "best logits are closer than epsilon; a difference anywhere else fails the test.\n"
    )
    yield "| model | depth | tokens | different | rate | widest gap where different | epsilon |"
    yield "|---|---|---|---|---|---|---|"
    for run in data["runs"]:
        yield (
            f"| {run['model']} | {run['depth']} | {run['num_tokens']} | {run['num_different']} | {run['rate']:.1%} "
            f"| {run['widest_gap']:.3f} | {run['epsilon']} |"
        )
    yield ""


def _quality(data: dict[str, Any]) -> Lines:
    yield "## What a precision costs in answers\n"
    yield (
        "Exact match per task of the bundled model on its held-out prompts, decoded greedily by the engine; at most "
        f"{max(data['n'].values())} prompts per task. Differences of a few answers are within chance: two standard errors are "
        f"{2 * (0.25 / max(data['n'].values())) ** 0.5:.1%} at most.\n"
    )
    names = list(data["exact_match"])
    yield "| task | prompts | " + " | ".join(names) + " |"
    yield "|---|---|" + "---|" * len(names)
    for task, count in data["n"].items():
        yield f"| {task} | {count} | " + " | ".join(f"{data['exact_match'][name][task]:.1%}" for name in names) + " |"
    means = [sum(of.values()) / len(of) for of in data["exact_match"].values()]
    yield "| mean | | " + " | ".join(f"{mean:.1%}" for mean in means) + " |"
    yield ""


_SECTIONS: dict[str, Callable[[dict[str, Any]], Lines]] = {
    "streams-1000": _streams,
    "storm-2000": _storm,
    "bfloat16-divergence": _bfloat16,
    "quality": _quality,
}


def _origin(environment: dict[str, Any], file: Path) -> str:
    loads = ", ".join(f"{load:.2f}" for load in environment["load_average"])
    where = f"{environment['time']}, commit {environment['commit']}, {environment['cpu']}, load average {loads}"
    return f"{where}: [{file.name}](../bench/results/{file.name}).\n"
