"""The page of the recorded measurements of tests: tables made from their JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report_tests import test_sections as sections
from headrace.lab.report import write_json

pytestmark = pytest.mark.pure


def test_what_precisions_cost_becomes_a_table_with_means(tmp_path: Path) -> None:
    origin = {"time": "then", "commit": "c", "cpu": "a cpu", "load_average": [0.0]}
    exact = {"float32": {"copy": 0.5, "sort": 1.0}, "int8": {"copy": 0.25, "sort": 0.5}}
    write_json(tmp_path / "quality.json", {"environment": origin, "n": {"copy": 40, "sort": 20}, "exact_match": exact})
    page = "\n".join(sections(tmp_path))
    assert "| copy | 40 | 50.0% | 25.0% |" in page
    assert "| mean | | 75.0% | 37.5% |" in page
    assert "15.8%" in page
