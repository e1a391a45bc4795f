"""Tests several workers on one metrics page: own series by worker, engines' series once."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.observe.metrics import Metrics, ReplicaReading
from headrace.observe.reading_metrics import UpstreamReading

pytestmark = pytest.mark.pure

LOAD = LoadSnapshot(
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
    metrics.read_engines(lambda: [ReplicaReading("m", "r0", True, LOAD)])
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
