"""Tests `make gpu` where there is no GPU: its parts run on the CPU with small shapes, and a part that fails fails the whole."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench import gpu

pytestmark = pytest.mark.pure


@pytest.fixture
def report() -> gpu.Report:
    return gpu.Report(deadline_s=math.inf)


def test_both_runners_give_the_same_tokens(report: gpu.Report, tmp_path: Path) -> None:
    gpu.answers(report, tmp_path, "cpu")
    assert report.values["answers_equal"] == [12, 12]


def test_a_format_has_its_row(report: gpu.Report, tmp_path: Path) -> None:
    report.values["read_gbps"] = 10.0
    model = gpu.write_folder(tmp_path / "tiny", gpu.TINY)
    gpu.decode_and_prefill(report, model, "cpu", "none", (1, 3), (16, 8))
    found = report.values["none"]
    assert isinstance(found, dict)
    assert {*found} == {"start_s", "decode_1", "decode_3", "prefill_tok_s"}
    speed = found["decode_3"]
    assert speed["tok_s"] == pytest.approx(3000 / speed["step_ms"])
    assert speed["mbu"] > 0


def test_cancelled_requests_end_and_are_counted_as_far_as_they_were_computed(report: gpu.Report, tmp_path: Path) -> None:
    gpu.churn(report, gpu.write_folder(tmp_path / "tiny", gpu.TINY), "cpu", 4, 12)
    found = report.values["churn"]
    assert isinstance(found, dict)
    assert {*found} == {"share_of_steady", "tok_s", "steady_tok_s"}
    assert all(value > 0 for value in found.values())


def test_a_part_that_fails_fails_the_whole_and_the_next_one_runs(report: gpu.Report) -> None:
    done: list[str] = []
    report.part("one", lambda: 1 / 0)  # type: ignore[arg-type]
    report.part("two", lambda: done.append("two"))
    assert (report.failed, done) == (True, ["two"])
    assert report.rows == ["one: FAILED, ZeroDivisionError: division by zero"]


def test_parts_for_which_no_time_is_left_are_named() -> None:
    report = gpu.Report(deadline_s=0.0)
    report.part("one", lambda: pytest.fail("it was run"))
    assert report.rows == ["one: left out, the time is spent"]
