"""Tests the metrics page: names, labels, and engine numbers that are read, never added up twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.observe.metrics import Metrics, ReplicaReading

pytestmark = pytest.mark.pure

LOAD = LoadSnapshot(
    num_running=2,
    num_waiting=1,
    kv_blocks_free=5,
    kv_blocks_cached=3,
    kv_blocks_used=2,
    kv_blocks_total=10,
    counters=EngineCounters(
        prompt_tokens=100,
        generation_tokens=50,
        prefix_cache_hit_tokens=30,
        preemptions=4,
        steps=3,
        step_seconds=20.03,
        step_buckets=[0, 0, 0, 0, 1, 1, *[0] * 8, 1],
        finished={"stop": 3, "length": 1},
        failures={"step": 2},
    ),
)
PROMISED = {
    "headrace_requests_running",
    "headrace_requests_waiting",
    "headrace_kv_blocks",
    "headrace_prompt_tokens_total",
    "headrace_generation_tokens_total",
    "headrace_prefix_cache_hit_tokens_total",
    "headrace_preemptions_total",
    "headrace_engine_failures_total",
    "headrace_requests_total",
    "headrace_time_to_first_token_seconds_count",
    "headrace_time_per_output_token_seconds_count",
    "headrace_inter_token_latency_seconds_count",
    "headrace_request_latency_seconds_count",
    "headrace_queue_time_seconds_count",
    "headrace_step_seconds_count",
}


def filled() -> Metrics:
    metrics = Metrics()
    metrics.read_engines(lambda: [ReplicaReading("m", "r0", True, LOAD), ReplicaReading("m", "r1", False, None)])
    metrics.finished("m", "r0", "stop")
    metrics.replica("m", "r0")
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Of this process's own measurements, or of what engines report."""
    found = metrics.registry.get_sample_value(name, labels)
    return metrics.reported.get_sample_value(name, labels) if found is None else found


def test_page_has_every_promised_name_with_model_and_replica() -> None:
    body, content_type = filled().page()
    assert content_type.startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    named = {sample.name: sample for sample in samples}
    assert named.keys() >= PROMISED
    assert all({"model", "replica"} <= named[name].labels.keys() for name in PROMISED)
    assert not [name for name in named if name.endswith("_created")]


def test_kv_blocks_come_by_state() -> None:
    metrics = filled()
    states = {state: value(metrics, "headrace_kv_blocks", model="m", replica="r0", state=state) for state in ("free", "cached", "used")}
    assert states == {"free": 5, "cached": 3, "used": 2}


def test_engine_counters_are_read_not_added() -> None:
    metrics = filled()
    for _ in range(3):
        metrics.page()
    assert value(metrics, "headrace_generation_tokens_total", model="m", replica="r0") == 50
    assert value(metrics, "headrace_sequences_finished_total", model="m", replica="r0", reason="stop") == 3
    assert value(metrics, "headrace_engine_failures_total", model="m", replica="r0", kind="step") == 2
    assert value(metrics, "headrace_engine_failures_total", model="m", replica="r0", kind="plan") == 0


def test_a_restarted_engine_starts_at_zero() -> None:
    metrics = Metrics()
    now = [ReplicaReading("m", "r0", True, LOAD)]
    metrics.read_engines(lambda: now)
    now[0] = ReplicaReading("m", "r0", True, replace(LOAD, counters=EngineCounters(generation_tokens=1)))
    assert value(metrics, "headrace_generation_tokens_total", model="m", replica="r0") == 1


def test_an_unknown_replica_is_not_ready_and_has_no_numbers() -> None:
    metrics = filled()
    assert value(metrics, "headrace_replica_ready", model="m", replica="r1") == 0
    assert value(metrics, "headrace_requests_running", model="m", replica="r1") is None


def test_step_durations_are_observed_once_each() -> None:
    metrics = filled()
    metrics.page()
    assert value(metrics, "headrace_step_seconds_count", model="m", replica="r0") == 3
    assert value(metrics, "headrace_step_seconds_sum", model="m", replica="r0") == 20.03
    bounds = ("0.005", "0.01", "0.02", "10.0", "+Inf")
    below = [value(metrics, "headrace_step_seconds_bucket", model="m", replica="r0", le=le) for le in bounds]
    assert below == [0, 1, 2, 2, 3]


def test_openmetrics_is_served_to_who_asks() -> None:
    _, content_type = filled().page("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
