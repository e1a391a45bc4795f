"""Tests the grid of a sweep, and the row that a point gives."""

from __future__ import annotations

import json
import math

import pytest

from headrace.lab.metrics import LoadRecord
from headrace.lab.report import to_plain
from headrace.lab.sweep import COLUMNS, SweepPoint, heading, line_of, make_grid, make_row

pytestmark = pytest.mark.pure

POINT = SweepPoint(batch_size=4, input_tokens=100, concurrency=2)


def record(begin_s: float, **other: object) -> LoadRecord:
    """A request of 100 and 50 tokens that takes a second: 0.02 s to its first token, 0.98 s for the others."""
    return LoadRecord(
        intended_s=begin_s,
        sent_s=begin_s,
        chunk_s=(begin_s + 0.02, begin_s + 1.0),
        end_s=begin_s + 1.0,
        prompt_tokens=100,
        output_tokens=50,
        **other,  # type: ignore[arg-type]
    )


def test_a_grid_has_every_point_once_and_none_with_more_in_flight_than_there_are() -> None:
    points = make_grid([8, 1, 8], [512, 128], [1, 4, 16, 64], output_tokens=64)
    assert [(point.batch_size, point.input_tokens, point.concurrency) for point in points] == [
        *((1, 128, 1), (1, 512, 1)),
        *((8, 128, 1), (8, 128, 4), (8, 128, 8), (8, 512, 1), (8, 512, 4), (8, 512, 8)),
    ]


@pytest.mark.parametrize(
    ("batches", "lengths", "concurrencies", "size"),
    [
        (range(1, 21), range(1, 12), [1], "220 points, 2,310 requests"),
        ([50_000], [1], [1, 2, 3], "3 points, 150,000 requests"),
        ([1000], [100_000], [1], "1 points, 1,000 requests, 100,064,000 tokens"),
    ],
)
def test_an_absurd_grid_is_refused_with_its_size(batches: list[int], lengths: list[int], concurrencies: list[int], size: str) -> None:
    with pytest.raises(ValueError, match=f"the grid has {size}.*at most 200 points, 100,000 requests, 50,000,000 tokens"):
        make_grid(batches, lengths, concurrencies, output_tokens=64)


def test_a_row_has_the_times_and_the_price_of_its_batch() -> None:
    row = make_row(POINT, [record(0.0), record(0.0), record(1.0), record(1.0)], price_per_1m=0.20)
    assert (row.seconds, row.ms_per_request, row.failed) == (2.0, 500.0, 0)
    assert (row.output_tokens_per_s, row.total_tokens_per_s) == (100.0, 300.0)
    assert [row.ttft_ms, row.tpot_ms] == pytest.approx([20.0, 20.0])
    assert row.dollars == pytest.approx(4 * 150 * 0.20 / 1e6)
    assert line_of(row).split() == ["4", "100", "2", "2.00", "500.0", "100.0", "300.0", "20.0", "20.00", "0.000120", "0", "0"]
    assert len(line_of(row)) == len(heading())


def test_of_failed_requests_there_is_a_count_and_no_figure() -> None:
    row = make_row(POINT, [record(0.0), record(0.0, error="503 error")], price_per_1m=1.0)
    assert (row.failed, row.ms_per_request) == (1, 1000.0)
    assert row.dollars == pytest.approx(150 / 1e6)
    none = make_row(POINT, [record(0.0, error="503 error")], price_per_1m=1.0)
    for each in (row, none):
        assert math.isinf(each.ttft_ms)
        assert line_of(each).split()[-5:-3] == ["-", "-"]
    assert line_of(none).split()[4] == "-"
    plain = to_plain(none)
    assert isinstance(plain, dict)
    assert {field for field, _ in COLUMNS.values()} <= set(plain)
    assert json.loads(json.dumps(plain, allow_nan=False))["ms_per_request"] is None
