"""A cell of the comparison and its file. Resuming means: cells that have a file are not run again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.harness import RESULTS, write_portable

FOLDER = RESULTS / "peers"
SHAPES = ("llama-1.1b", "qwen2-0.4b", "llama-0.5b-hd128")
PRECISIONS = ("bf16", "int8", "int4")
ENGINES = ("headrace", "llama.cpp", "vllm", "openvino", "ceiling")


METHOD = 2
"""Raised whenever a cell's figure comes to mean something else (README, "Methods"): cells of an earlier one are measured anew, and the
report never puts two into one median."""
CEILING_METHOD = 3
"""The same for the ceiling, which no other engine is compared with."""


def method_of(engine: str) -> int:
    return CEILING_METHOD if engine == "ceiling" else METHOD


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """machine: see `bench.machine`. row: see rows.py and http.py. round: 0.."""

    machine: str
    shape: str
    precision: str
    engine: str
    row: str
    round: int

    @property
    def file(self) -> Path:
        return FOLDER / self.machine / self.shape / self.precision / self.engine / f"{self.row}.{self.round}.json"

    @property
    def is_done(self) -> bool:
        """The cell has a file, measured by today's method."""
        return self.file.is_file() and load(self.file)[1].method == method_of(self.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one cell gave.

    value        the row's figure; None when it failed
    unit         of value
    error        why there is no value
    setting      how the engine was run, in its own words
    samples      the single measurements behind value
    environment  commit, load, versions, time
    read_bandwidth_bytes_per_s  just before the cell; None when it could not be measured
    read_bandwidth_pattern  the way to read that was fastest (`bench/bandwidth.py`); a plain sum where a file says nothing
    facts        of the model: "weights" that a step multiplies, "kv_numbers_per_token"
    method       see `method_of`; 1 where a file says nothing
    load         of HTTP rows: what was offered and what the client saw (`http.figures_of`); seconds and counts, null where none is finite.
                 Of the ceiling: "headrace", what Headrace gave in turns with it
    remark       what a reader has to know of this cell, printed below its table; a value is never replaced, it is remarked upon
    """

    value: float | None
    unit: str
    setting: Mapping[str, object]
    environment: Mapping[str, object]
    read_bandwidth_bytes_per_s: float | None
    samples: tuple[float, ...] = ()
    error: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)
    load: Mapping[str, float | None] = field(default_factory=dict)
    method: int = 1
    remark: str = ""
    read_bandwidth_pattern: str | None = "sum"


def save(cell: Cell, outcome: Outcome) -> None:
    cell.file.parent.mkdir(parents=True, exist_ok=True)
    write_portable(cell.file, {"cell": asdict(cell), **asdict(outcome)})


def load(file: Path) -> tuple[Cell, Outcome]:
    data = json.loads(file.read_bytes())
    cell = Cell(**data.pop("cell"))
    return cell, Outcome(**{**data, "samples": tuple(data["samples"])})


def load_all(folder: Path = FOLDER) -> Iterator[tuple[Cell, Outcome]]:
    for file in sorted(folder.rglob("*.json")):
        yield load(file)
