"""Writes docs/benchmarks.md from the newest result file of each table. Every number comes from the JSON; nothing is typed by hand."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import static_batching
from bench.harness import RESULTS
from bench.pairs import Ratio, paired_ratio

QUALITY = RESULTS / "quality.json"
"""Written by `bench.quality`; the page has its table where the file is there."""

PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
HEADER = """# Benchmarks

Written by `make bench` from the JSON in `bench/results/`, which has every round, its load and its read bandwidth. Each table compares two
configurations that differ by one switch, run in turn in one process. A cell is the median over the rounds, with the smallest and largest in
brackets; the last row is the geometric mean of the rounds' ratios with its 95 % interval, in bold where the interval excludes 1. Arrows say
which way is better. Prompts are random token ids, answers greedy with end tokens ignored; tokenizing, text and HTTP are not part of it.
"""


def newest_results(folder: Path = RESULTS) -> list[Path]:
    """One file per table, the newest, in the order of their names."""
    newest: dict[str, Path] = {}
    for file in sorted(folder.glob("*-????????T??????Z.json")):
        newest[file.stem.rpartition("-")[0]] = file
    return [newest[name] for name in sorted(newest)]


def write_page(files: list[Path], page: Path = PAGE) -> None:
    tables = {file: json.loads(file.read_bytes()) for file in files}
    sections = ["\n".join(section(data, file)) for file, data in tables.items()]
    machines: dict[str, list[str]] = {}
    for data in tables.values():
        machines.setdefault(_machine(data), []).append(_title(data))
    where = [f"{', '.join(titles)}: {machine}\n" for machine, titles in machines.items()]
    simulated = static_batching.section(json.loads(static_batching.FILE.read_bytes()))
    measured = list(quality(json.loads(QUALITY.read_bytes()))) if QUALITY.is_file() else []
    page.write_text("\n".join([HEADER, *where, *sections, *measured, *simulated]), encoding="utf-8")


def quality(data: dict[str, Any]) -> Iterator[str]:
    """The section of exact answers per task and precision."""
    shares, counts, environment = data["exact_match"], data["n"], data["environment"]
    yield "## What a precision costs in answers\n"
    yield (
        "Exact match per task of the bundled model on its held-out prompts, decoded greedily by the engine. Differences of a few answers "
        f"are within chance: two standard errors are {1 / math.sqrt(min(counts.values())):.1%} at most.\n"
    )
    yield "| task | prompts | " + " | ".join(shares) + " |"
    yield "|---" * (len(shares) + 2) + "|"
    for task, count in counts.items():
        yield f"| {task} | {count} | " + " | ".join(f"{found[task]:.1%}" for found in shares.values()) + " |"
    means = " | ".join(f"{statistics.mean(found.values()):.1%}" for found in shares.values())
    yield f"| mean | {sum(counts.values())} | {means} |\n"
    where = f"[{QUALITY.name}](../bench/results/{QUALITY.name})"
    yield f"{environment['time']}, commit {environment['commit']}, {environment['cpu']}: {where}.\n"


def section(data: dict[str, Any], file: Path) -> Iterator[str]:
    """One table as Markdown lines."""
    rounds, measures, variants = data["rounds"], data["measures"], list(data["variants"])
    yield f"## {_title(data)}\n"
    yield f"{data['question']}\n"
    yield f"{data['workload']}\n"
    yield "| | " + " | ".join(f"{m['name']}{', ' + m['unit'] if m['unit'] else ''}{_wish(m['better'])}" for m in measures) + " |"
    yield "|---" * (len(measures) + 1) + "|"
    columns = {name: {m["name"]: [entry["values"][name][m["name"]] for entry in rounds] for m in measures} for name in variants}
    for name in variants:
        yield f"| {name} | " + " | ".join(_cell(columns[name][m["name"]]) for m in measures) + " |"
    base, other = variants
    yield f"| {other} / {base} | " + " | ".join(_ratio(columns[base][m["name"]], columns[other][m["name"]]) for m in measures) + " |\n"
    yield from _circumstances(data, file)


def _title(data: dict[str, Any]) -> str:
    return str(data["table"]).replace("-", " ").capitalize()


def _machine(data: dict[str, Any]) -> str:
    """What the rounds of a table have in common: the page says it once for all tables that share it."""
    environments = [entry["environment"] for entry in data["rounds"]]
    first = environments[0]
    commits = ", ".join(sorted({environment["commit"] or "unknown" for environment in environments}))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return f"{first['cpu']}, {first['num_cpus']} CPUs; commit {commits}; {versions}; `{' '.join(first['command'])}`."


def _circumstances(data: dict[str, Any], file: Path) -> Iterator[str]:
    environments = [entry["environment"] for entry in data["rounds"]]
    model = f"`{Path(next(iter(data['variants'].values()))['model']).name}`" + (f" ({data['model_note']})" if "model_note" in data else "")
    yield f"[{len(environments)} rounds](../bench/results/{file.name}) from {environments[0]['time']}, {model}.\n"


def _wish(better: str) -> str:
    return {"higher": " ^", "lower": " v"}.get(better, "")


def _cell(values: list[float]) -> str:
    return f"{_number(statistics.median(values))} [{_number(min(values))}, {_number(max(values))}]"


def _ratio(base: list[float], other: list[float]) -> str:
    try:
        found: Ratio = paired_ratio(base, other)
    except ValueError:
        return "-"
    text = f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]" if math.isfinite(found.high) else f"{found.mean:.3f} (one round)"
    return f"**{text}**" if found.excludes_one else text


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
