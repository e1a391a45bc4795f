"""Writes JSON results of the measuring tests: in var/results, and beside those of the benchmarks where they are to be kept."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from headrace.lab.environment import environment

ROOT = Path(__file__).resolve().parents[2]
COMMITTED, SCRATCH = ROOT / "bench" / "results", ROOT / "var" / "results"

RECORD = "HEADRACE_TEST_RECORD"
"""Variable that, set to 1, has results written over the committed ones. A run for its verdict alone, on a busy machine, leaves them."""


def save_result(name: str, values: Mapping[str, object]) -> None:
    folder = COMMITTED if os.environ.get(RECORD) == "1" else SCRATCH
    folder.mkdir(parents=True, exist_ok=True)
    content = {**values, "environment": asdict(environment())}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
