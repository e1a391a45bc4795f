"""Tests the metrics page: names, labels, engine numbers that are read and never added up twice, and several workers on one page."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.observe.metrics import Metrics, ReplicaReading
from headrace.observe.reading_metrics import UpstreamReading

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


def test_the_pool_of_adapters_is_shown_of_engines_that_have_adapters() -> None:
    metrics, adapted = Metrics(), replace(LOAD, adapter_pool_bytes=300, adapter_pool_highest_bytes=500)
    metrics.read_engines(lambda: [ReplicaReading("m", name, True, load) for name, load in {"r0": adapted, "r1": LOAD}.items()])
    for state, shown in (("", 300), ("highest_", 500)):
        name = f"headrace_adapter_pool_{state}bytes"
        assert [value(metrics, name, model="m", replica=replica) for replica in ("r0", "r1")] == [shown, None]


def test_the_size_of_a_kv_cache_is_in_labels_once_the_engine_has_said_hello() -> None:
    metrics = Metrics()
    metrics.read_engines(lambda: [ReplicaReading("m", "r0", True, LOAD, block_size=16), ReplicaReading("m", "r1", True, LOAD)])
    labels = {"model_name": "m", "block_size": "16", "num_gpu_blocks": "10"}
    assert [value(metrics, "vllm:cache_config_info", engine=engine, **labels) for engine in ("r0", "r1")] == [1, None]


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


SMALL_LOAD = LoadSnapshot(
    num_running=2,
    num_waiting=0,
    kv_blocks_free=1,
    kv_blocks_cached=1,
    kv_blocks_used=1,
    kv_blocks_total=3,
    counters=EngineCounters(generation_tokens=50),
)
FAR = UpstreamReading(
    model="far",
    replica="f0",
    attempts={"ok": 3},
    left_out={"usage": 2},
    num_open=1,
    is_circuit_open=False,
    held_s=0.0,
    num_running=7,
    num_waiting=None,
)


def a_worker(num_finished: int) -> Metrics:
    metrics = Metrics()
    metrics.read_engines(lambda: [ReplicaReading("m", "r0", True, SMALL_LOAD)])
    metrics.read_upstreams(lambda: [FAR])
    metrics.replica("m", "r0").request_latency.observe(0.4)
    for _ in range(num_finished):
        metrics.finished("m", "r0", "stop")
    return metrics


def samples_of(page: str) -> list[tuple[str, dict[str, str], float]]:
    return [(sample.name, sample.labels, sample.value) for family in text_string_to_metric_families(page) for sample in family.samples]


def named(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    return [(labels, value) for found, labels, value in samples_of(page) if found == name]


def page_of(workers: dict[int, bytes], asked: Metrics) -> str:
    return asked.page(by_worker=workers)[0].decode()


def test_each_workers_own_series_have_its_label_and_engines_series_come_once() -> None:
    first, second = a_worker(1), a_worker(2)
    page = page_of({1: second.encoded(), 0: first.encoded()}, first)
    finished = {"model": "m", "replica": "r0", "outcome": "stop"}
    assert named(page, "headrace_requests_total") == [({**finished, "worker": "0"}, 1), ({**finished, "worker": "1"}, 2)]
    assert named(page, "headrace_replica_ready") == [({"model": "m", "replica": "r0", "worker": worker}, 1) for worker in "01"]
    assert named(page, "headrace_upstream_requests_open") == [({"model": "far", "replica": "f0", "worker": worker}, 1) for worker in "01"]
    assert named(page, "headrace_generation_tokens_total") == [({"model": "m", "replica": "r0"}, 50)]
    assert named(page, "headrace_upstream_reported_requests") == [({"model": "far", "replica": "f0", "state": "running"}, 7)]
    assert named(page, "headrace_gateway_worker_up") == [({"worker": "0"}, 1), ({"worker": "1"}, 1)]


def test_every_family_is_there_once_with_all_that_its_worker_measured() -> None:
    worker = a_worker(1)
    page = page_of({0: worker.encoded(), 1: worker.encoded()}, worker)
    headers = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers))
    alone = samples_of(worker.page()[0].decode())
    together = samples_of(page)
    by_worker = {name for name, labels, _ in together if "worker" in labels}
    shown = {(name, *sorted(labels.items())) for name, labels, _ in together}
    own = [(name, labels) for name, labels, _ in alone if name in by_worker]
    assert own
    assert {name for name, *_ in alone} <= {name for name, *_ in together}
    assert all((name, *sorted({**labels, "worker": worker}.items())) in shown for name, labels in own for worker in "01")


@pytest.mark.parametrize("answer", [b"", b"[", b"{}x", b"[1]", b'[["a", "b"]]', b'[["a","","?","",[]]]'])
def test_a_worker_that_does_not_answer_is_shown_as_such_and_the_other_ones_remain(answer: bytes) -> None:
    worker = a_worker(1)
    page = page_of({0: worker.encoded(), 1: answer}, worker)
    assert named(page, "headrace_gateway_worker_up") == [({"worker": "0"}, 1), ({"worker": "1"}, 0)]
    assert [labels["worker"] for labels, _ in named(page, "headrace_requests_total")] == ["0"]


def test_the_only_gateway_has_no_label_of_a_worker() -> None:
    assert "worker" not in a_worker(1).page()[0].decode().replace("text_workers", "")
