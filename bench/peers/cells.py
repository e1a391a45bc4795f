"""Keeps the cells of the comparison: one file for each machine, shape and precision. Cells that are in it are not run again."""

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
        """Where it is kept, with the other cells of its table."""
        return FOLDER / self.machine / f"{self.shape}-{self.precision}.json"

    @property
    def outcome(self) -> Outcome | None:
        """What it gave; None where it was not measured yet."""
        return load(self.file).get(self)

    @property
    def is_done(self) -> bool:
        """The cell was measured by today's method."""
        return (outcome := self.outcome) is not None and outcome.method == method_of(self.engine)


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
    """Put the cell into its file, in the place of an earlier outcome of its own; the other cells stay. One process at a time."""
    kept = {**load(cell.file), cell: outcome}
    table = {"machine": cell.machine, "shape": cell.shape, "precision": cell.precision}
    own = [{"engine": each.engine, "row": each.row, "round": each.round, **asdict(kept[each])} for each in sorted(kept)]
    cell.file.parent.mkdir(parents=True, exist_ok=True)
    write_portable(cell.file, {**table, "cells": own})


def load(file: Path) -> dict[Cell, Outcome]:
    """The cells of one file, in their order; none where there is no file."""
    if not file.is_file():
        return {}
    table = json.loads(file.read_bytes())
    found = {}
    for own in table.pop("cells"):
        cell = Cell(**table, engine=own.pop("engine"), row=own.pop("row"), round=own.pop("round"))
        found[cell] = Outcome(**{**own, "samples": tuple(own["samples"])})
    return found


def load_all(folder: Path = FOLDER) -> Iterator[tuple[Cell, Outcome]]:
    for file in sorted(folder.rglob("*.json")):
        yield from load(file).items()
