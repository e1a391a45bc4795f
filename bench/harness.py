"""Runs the benchmark tables: two engines that differ by one switch run in turn, and every round is written down.

A table is a `Table`: its variants' configurations, a workload, and the measures taken from each run. `run_table` interleaves the variants
(a b, b a, a b, ...), takes the read bandwidth before each round and keeps every round, bad ones included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.engine.build import build_engine
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.lab.datasets import LoadRequest, WorkloadShape, make_requests
from headrace.lab.environment import bandwidth_facts, bandwidth_script, environment, measure_bandwidth
from headrace.lab.offline import Collector, OfflineRun
from headrace.lab.report import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a run. better: "lower", "higher" or "" for a plain fact."""

    name: str
    unit: str
    better: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine and the outbox that stamps its tokens."""

    engine: Engine
    collector: Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One comparison.

    name       of the result file
    question   what it answers, in one sentence
    workload   what is run, in one sentence
    variants   baseline first; the configurations differ by the switch in question only
    static     the variant that runs each batch to its end before the next, if any
    measures   in the order of the columns
    run        (machine, round number) -> measure name -> value; the same requests for every variant of a round
    """

    name: str
    question: str
    workload: str
    variants: Mapping[str, EngineConfig]
    measures: tuple[Measure, ...]
    run: Callable[[Machine, int], Mapping[str, float]]
    settings: Mapping[str, object] = field(default_factory=dict)
    static: str | None = None


def build(config: EngineConfig) -> Machine:
    collector = Collector()
    return Machine(build_engine(config.checked(), collector), collector)


def machines_of(table: Table) -> dict[str, Machine]:
    """By variant."""
    machines = {name: build(config) for name, config in table.variants.items()}
    if table.static is not None:
        machines[table.static].engine.scheduler.batch_statically()
    return machines


def run_table(table: Table, *, rounds: int, say: Callable[[str], None] = print) -> Path:
    """Run all rounds and write bench/results/NAME-TIME.json. The first round of each variant is a warm-up that is not kept."""
    machines = machines_of(table)
    for machine in machines.values():
        table.run(machine, -1)
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    script = bandwidth_script()
    kept = []
    for number in range(rounds):
        bandwidth = measure_bandwidth(script)
        values = {}
        for name in sorted(machines, key=list(table.variants).index, reverse=number % 2 == 1):
            values[name] = dict(table.run(machines[name], number))
            machines[name].engine.scheduler.check()
        kept.append({"round": number, "environment": environment(), **bandwidth_facts(bandwidth), "values": values})
        say(f"{table.name} round {number + 1}/{rounds}: {values}")
    file = RESULTS / f"{table.name}-{began}.json"
    write_portable(
        file,
        {
            "table": table.name,
            "question": table.question,
            "workload": table.workload,
            "measures": table.measures,
            "variants": table.variants,
            "settings": table.settings,
            "static": table.static,
            "decided": {name: machine.engine.info.decided for name, machine in machines.items()},
            "rounds": kept,
        },
    )
    return file


def write_portable(file: Path, data: Mapping[str, object]) -> None:
    """Like `write_json`, with paths relative to this checkout and the home folder: other machines have other folders. Never half a file."""
    part = file.with_name(f"{file.name}.part")
    write_json(part, data)
    text = part.read_text(encoding="utf-8").replace(f"{ROOT}/", "").replace(f"{Path.home()}/", "~/")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def block_of(page: Path, name: str) -> str:
    """What stands between the marks `<!-- NAME -->` and `<!-- end NAME -->` of a page. Raises ValueError without them."""
    _, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    text, end, _ = rest.partition(f"\n<!-- end {name} -->")
    if not begin or not end:
        raise ValueError(f"{page.name} has no block {name!r}")
    return text


def replace_block(page: Path, name: str, text: str) -> None:
    """Write `text` between the marks `<!-- NAME -->` and `<!-- end NAME -->` of a page. Raises ValueError without them."""
    old, marks = block_of(page, name), (f"<!-- {name} -->\n", f"\n<!-- end {name} -->")
    page.write_text(page.read_text(encoding="utf-8").replace(old.join(marks), text.join(marks)), encoding="utf-8")


def requests_for(machine: Machine, count: int, shape: WorkloadShape, *, seed: int) -> list[LoadRequest]:
    """Prompts of `shape` from the model's own vocabulary. Equal for equal seeds and models, whatever the configuration."""
    vocab_size = machine.engine.info.vocab_size
    fitted = replace(shape, low_id=min(shape.low_id, vocab_size // 2), high_id=min(shape.high_id, vocab_size))
    return make_requests(count, fitted, seed=seed)


def finished(run: OfflineRun) -> OfflineRun:
    """The run, if every request was answered. Raises RuntimeError: a figure of a run with failures is no figure."""
    errors = [record.error for record in run.records if record.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(run.records)} requests failed: {errors[0]}")
    return run
