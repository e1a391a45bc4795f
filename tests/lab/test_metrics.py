"""Tests the formulas on traces made by hand, with results worked out on paper."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headrace.lab.metrics import (
    NEEDED_SAMPLES,
    LoadRecord,
    Slo,
    distribution,
    parse_slo,
    peak_concurrency,
    percentile,
    percentile_interval,
    summarize,
)

pytestmark = pytest.mark.pure

# Intended at 10.0, sent 50 ms late, four tokens in three chunks (0.5, 0.7, 1.1 s after the intended time).
LATE = LoadRecord(intended_s=10.0, sent_s=10.05, chunk_s=(10.5, 10.7, 11.1), end_s=11.2, prompt_tokens=7, output_tokens=4, status=200)
ONE_TOKEN = LoadRecord(intended_s=12.0, sent_s=12.0, chunk_s=(12.2,), end_s=12.25, prompt_tokens=3, output_tokens=1, status=200)
REFUSED = LoadRecord(intended_s=10.5, sent_s=10.5, end_s=10.6, status=429, error="429 overloaded")
BROKEN = LoadRecord(intended_s=10.5, sent_s=10.5, chunk_s=(10.8, 10.9), end_s=14.0, output_tokens=2, status=200, error="stream ended early")


def test_latencies_start_at_the_intended_send_time() -> None:
    assert LATE.ttft_s == pytest.approx(0.5)
    assert LATE.e2el_s == pytest.approx(1.1)
    assert LATE.tpot_s == pytest.approx((1.1 - 0.5) / 3)
    assert LATE.gaps_s == pytest.approx([0.2, 0.4])
    assert LATE.max_stall_s == pytest.approx(0.4)


def test_request_of_one_token_has_no_tpot_but_meets_any_tpot_limit() -> None:
    assert ONE_TOKEN.tpot_s is None
    assert Slo(tpot_s=0.001).is_met_by(ONE_TOKEN)


def test_failures_are_infinite_in_every_percentile() -> None:
    for record in (REFUSED, BROKEN):
        assert math.isinf(record.ttft_s)
        assert math.isinf(record.e2el_s)
        assert record.tpot_s == math.inf
        assert not Slo(e2el_s=1e9).is_met_by(record)
    assert BROKEN.gaps_s[0] == pytest.approx(0.1)
    assert math.isinf(BROKEN.max_stall_s)


def test_summary_reports_what_was_offered_admitted_and_finished() -> None:
    report = summarize([LATE, ONE_TOKEN, REFUSED, BROKEN], Slo(ttft_s=0.3))
    assert (report.offered, report.admitted, report.finished) == (4, 3, 2)
    assert report.duration_s == pytest.approx(4.0)
    assert report.output_tokens == 5
    assert report.output_throughput == pytest.approx(5 / 4)
    assert report.total_throughput == pytest.approx(15 / 4)
    assert report.goodput == pytest.approx(1 / 4)
    assert report.errors == {"429 overloaded": 1, "stream ended early": 1}
    assert report.ttft_s.quantiles["p50"] == math.inf  # 0.2, 0.5, inf, inf: halfway between 0.5 and inf
    assert report.itl_s.count == 5
    assert report.client_lag_s.max == pytest.approx(0.05)
    assert not report.is_valid


def test_summary_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarize([])


def test_percentiles_interpolate_between_ranks() -> None:
    ordered = [1.0, 2.0, 3.0, 4.0]
    assert percentile(ordered, 0.5) == pytest.approx(2.5)
    assert percentile(ordered, 0.0) == 1.0
    assert percentile(ordered, 1.0) == 4.0
    assert percentile([1.0, math.inf], 0.0) == 1.0
    assert percentile([1.0, math.inf], 0.5) == math.inf
    assert percentile([math.inf, math.inf], 0.5) == math.inf
    assert math.isnan(percentile([], 0.5))


def test_interval_covers_the_quantile_and_narrows_with_more_samples() -> None:
    few = percentile_interval([float(n) for n in range(20)], 0.5)
    many = percentile_interval([n / 100 for n in range(2000)], 0.5)
    assert few[0] < 9.5 < few[1]
    assert many[0] < 10.0 < many[1]
    assert many[1] - many[0] < (few[1] - few[0]) / 5


def test_distribution_names_its_quantiles() -> None:
    found = distribution([3.0, 1.0, 2.0])
    assert (found.count, found.mean, found.max) == (3, 2.0, 3.0)
    assert list(found.quantiles) == ["p50", "p90", "p95", "p99", "p99.9"]


def test_quantiles_are_known_once_one_sample_is_expected_beyond_them() -> None:
    assert NEEDED_SAMPLES == {"p50": 2, "p90": 10, "p95": 20, "p99": 100, "p99.9": 1000}
    for name, count in NEEDED_SAMPLES.items():
        assert distribution(range(count - 1)).known(name) is None
        assert distribution(range(count)).known(name) == distribution(range(count)).quantiles[name]


def test_waiting_for_a_place_is_latency_and_not_the_clients_lag() -> None:
    waited = LoadRecord(intended_s=10.0, due_s=12.0, sent_s=12.0005, chunk_s=(13.0,), end_s=13.0, output_tokens=1, status=200)
    assert waited.ttft_s == pytest.approx(3.0)
    assert waited.client_lag_s == pytest.approx(0.0005)
    assert summarize([waited]).is_valid
    assert not summarize([replace(waited, due_s=None)]).is_valid
    unsent = replace(waited, sent_s=None)
    assert unsent.client_lag_s is None
    assert not summarize([unsent]).is_valid, "a client that sent nothing measured nothing"


def test_goodput_limits_are_read_as_vllm_writes_them() -> None:
    assert parse_slo(["ttft:300", "tpot:50"]) == Slo(ttft_s=0.3, tpot_s=0.05)
    for word in ("ttft", "ttft:", "ttft:-1", "itl:5", "tpot:nan"):
        with pytest.raises(ValueError, match="is not one of"):
            parse_slo([word])


def test_peak_concurrency_does_not_count_a_handover_twice() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)]
    assert peak_concurrency([LoadRecord(intended_s=a, sent_s=a, end_s=b) for a, b in spans]) == 2
