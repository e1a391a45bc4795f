"""Tests the folders in which measuring tests write their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import results
from results import RECORD, save_result

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("recorded", ["1", "", "0"])
def test_a_committed_record_is_replaced_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str
) -> None:
    monkeypatch.setattr("headrace.lab.environment.commit_of", lambda folder: None)
    monkeypatch.setattr(results, "COMMITTED", tmp_path / "committed")
    monkeypatch.setattr(results, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setenv(RECORD, recorded)
    save_result("storm", {"num_requests": 3})
    (written,) = tmp_path.rglob("*.json")
    assert written == tmp_path / ("committed" if recorded == "1" else "scratch") / "storm.json"
    assert json.loads(written.read_text())["num_requests"] == 3
