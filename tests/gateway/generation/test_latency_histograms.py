"""Tests that the metrics page and the load generator mean the same by TTFT and TPOT: one load, on virtual time, seen from both sides.

A histogram knows of each value its bucket. No time passes between client and gateway here, so that each bucket must hold as many of the
client's values as of the gateway's, and a quantile read from the page is off by less than its bucket is wide.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from itertools import cycle, pairwise
from pathlib import Path

import pytest
from gateway_kit import MODEL, serving
from prometheus_client.parser import text_string_to_metric_families
from virtual_gateway import virtual_gateway
from virtual_time import virtual_loop
from virtual_wire import VirtualServed

from headrace.lab import loadgen
from headrace.lab.datasets import WorkloadShape, make_requests, send_times
from headrace.lab.loadgen import LoadTarget, run_load
from headrace.lab.metrics import percentile
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

NUM_REQUESTS = 60
SHAPE = WorkloadShape(input_tokens=96, output_tokens=12, spread=0.9, low_id=100, high_id=300)
RATE = 40.0
PAUSES_S, CHANGE_S = (0.0017, 0.0083, 0.033), 0.3
"""Between two steps; each for so long in turn. No multiple of these lies on a bound of a bucket."""

TTFT = ("headrace_time_to_first_token_seconds", "vllm:time_to_first_token_seconds")
TPOT = ("headrace_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds")


async def test_histograms_hold_what_the_client_measured(text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loadgen, "SPIN_S", 0.0)  # on virtual time a sender wakes at its time
    async with virtual_gateway(text, pause_s=PAUSES_S[0], state=str(tmp_path)) as (gateway, engine), serving(gateway) as port:
        changing = asyncio.create_task(change_pace(engine))
        target = LoadTarget(url=f"http://127.0.0.1:{port}", model=MODEL)
        times = send_times(NUM_REQUESTS, rate=RATE)
        records = await run_load(target, make_requests(NUM_REQUESTS, SHAPE), times, clock=virtual_loop().time)
        page = gateway.metrics.page()[0].decode()
        changing.cancel()
    assert all(record.is_finished for record in records)
    ttfts = [record.ttft_s for record in records]
    tpots = [record.tpot_s for record in records if record.tpot_s is not None]
    for names, values in ((TTFT, ttfts), (TPOT, tpots)):
        for name in names:
            check(name, buckets(page, name), sorted(values))


async def change_pace(engine: VirtualServed) -> None:
    for engine.step_s in cycle(PAUSES_S):
        await asyncio.sleep(CHANGE_S)


def buckets(page: str, name: str) -> list[tuple[float, int]]:
    """Upper bounds, with the number of values up to each."""
    [family] = [family for family in text_string_to_metric_families(page) if family.name == name]
    return [(float(sample.labels["le"]), int(sample.value)) for sample in family.samples if sample.name == f"{name}_bucket"]


def check(name: str, histogram: list[tuple[float, int]], values: list[float]) -> None:
    """values: the client's, ascending"""
    assert histogram == [(bound, bisect_left(values, bound)) for bound, _ in histogram], name
    assert sum(count > below for (_, below), (_, count) in pairwise([(0.0, 0), *histogram])) >= 3, "the values lie in several buckets"
    for quantile in (0.5, 0.95, 0.99):
        [low, high] = next(
            [below, bound] for (below, _), (bound, count) in pairwise([(0.0, 0), *histogram]) if count >= quantile * len(values)
        )
        assert low <= percentile(values, quantile) <= high, (name, quantile)
