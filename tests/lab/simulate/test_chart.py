"""Tests that a chart draws the quantiles that a report prints, and no others."""

from __future__ import annotations

import math

import pytest

from headrace.lab.metrics import LoadRecord
from headrace.lab.simulate.chart import MIN_BINS, timeline

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("in_a_bin", "has_p95"), [(2, False), (19, False), (20, True)])
def test_a_bin_of_too_few_requests_has_no_p95(in_a_bin: int, has_p95: bool) -> None:
    begins = [second + 0.1 for second in range(MIN_BINS) for _ in range(in_a_bin)]
    records = [LoadRecord(intended_s=at, sent_s=at, chunk_s=(at + 0.1, at + 0.9), end_s=at + 0.9, output_tokens=2) for at in begins]
    drawn = timeline(records)
    assert len(drawn.begin_s) == MIN_BINS
    for measure in (drawn.ttft_s, drawn.tpot_s):
        assert all(math.isfinite(value) for value in measure["p50"])
        assert all(math.isfinite(value) == has_p95 for value in measure["p95"])
