"""JSON results of the measuring tests, beside those of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from headrace.lab.environment import environment

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def save_result(name: str, values: Mapping[str, object]) -> None:
    """Write bench/results/<name>.json: the values, and where they were measured (commit, machine, load)."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {**values, "environment": asdict(environment())}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
