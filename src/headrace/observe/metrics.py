"""Makes the metrics page: names, labels, buckets, and the source of each number.

An engine's state is read from its last snapshot, so any number of gateways may export it, with equal numbers.

Labels' values are configured names and fixed words, never a client's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from headrace.core.load import COUNTERS, STEP_BOUNDS_S, LoadSnapshot
from headrace.observe.finished_request import Outcome
from headrace.observe.reading_metrics import (
    BudgetReading,
    UpstreamReading,
    UsageReading,
    budget_families,
    reported_load_families,
    upstream_families,
    usage_families,
)
from headrace.observe.tally import CountCollector, ReadCollector, TallyCollector, add_histogram
from headrace.observe.tenant_metrics import EVERY_TENANT, ShownTenants, TenantMetrics
from headrace.observe.vllm_metrics import CACHE_INFO, LORA_INFO, vllm_families

WORKER = "worker"


LABELS = ("model", "replica")
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STORE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 1)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TEXT_KILL_REASONS = ("cpu", "memory", "time", "left", "lost")


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    model: str
    replica: str
    is_ready: bool
    snapshot: LoadSnapshot | None
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class TextReading:
    num_waiting: int
    num_waiting_bytes: int
    num_running: int
    num_refused: int
    killed: Mapping[str, int]
    busy_s: float


def _text_families(reading: TextReading) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("headrace_text_jobs", "Jobs of text workers by state.", labels=("state",))
    jobs.add_metric(("waiting",), reading.num_waiting)
    jobs.add_metric(("running",), reading.num_running)
    yield jobs
    yield GaugeMetricFamily("headrace_text_waiting_bytes", "Size of the jobs that wait for a text worker.", reading.num_waiting_bytes)
    yield CounterMetricFamily("headrace_text_refused", "Jobs for which there was no room.", reading.num_refused)
    killed = CounterMetricFamily(
        "headrace_text_workers_killed", "Text workers ended in the middle of a job, by what it exceeded.", labels=("reason",)
    )
    for reason in TEXT_KILL_REASONS:
        killed.add_metric((reason,), reading.killed.get(reason, 0))
    yield killed
    yield CounterMetricFamily("headrace_text_busy_seconds", "Seconds that text workers had a job.", reading.busy_s)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory by kind of content. held: bytes; refused: requests"""

    held: Mapping[str, int]
    refused: Mapping[str, int]
    num_streams_cut: int
    num_answers_pending: int


def _memory_families(reading: MemoryReading) -> Iterator[Metric]:
    held = GaugeMetricFamily("headrace_gateway_held_bytes", "What requests hold: prompts with their bodies, answers.", labels=("of",))
    refused = CounterMetricFamily("headrace_gateway_held_refused", "Requests refused because that sum was full.", labels=("of",))
    for name, num_bytes in reading.held.items():
        held.add_metric((name,), num_bytes)
        refused.add_metric((name,), reading.refused[name])
    yield from (held, refused)
    text = "Streams cut because their clients did not read."
    yield CounterMetricFamily("headrace_gateway_streams_cut", text, reading.num_streams_cut)
    text = "Answers with many log-probabilities that are queued or being encoded."
    yield GaugeMetricFamily("headrace_gateway_answers_pending", text, reading.num_answers_pending)


def _held_families(num_held: Mapping[str, int]) -> Iterator[Metric]:
    held = GaugeMetricFamily("headrace_requests_held", "Requests that wait for a replica of their model.", labels=("model",))
    for model, count in num_held.items():
        held.add_metric((model,), count)
    yield held


def _wanted_families(num_wanted: Mapping[str, int]) -> Iterator[Metric]:
    wanted = GaugeMetricFamily("headrace_replicas_wanted", "Replicas that the supervisor wants of a model.", labels=("model",))
    for model, count in num_wanted.items():
        wanted.add_metric((model,), count)
    yield wanted


def _ready_families(readings: Iterable[ReplicaReading]) -> Iterator[Metric]:
    ready = GaugeMetricFamily("headrace_replica_ready", "1 while the replica answers and its loop turns, or it sleeps.", labels=LABELS)
    for reading in readings:
        ready.add_metric((reading.model, reading.replica), float(reading.is_ready))
    yield ready


def _engine_families(readings: Iterable[ReplicaReading]) -> Iterator[Metric]:
    known = [(reading, reading.snapshot) for reading in readings if reading.snapshot is not None]
    yield from _gauges(known)
    yield from _counters(known)
    yield _steps(known)
    yield from _adapters(known)
    yield from _cache_config(known)


GAUGES = (
    ("headrace_requests_running", "Sequences computed in the current step.", "num_running"),
    ("headrace_requests_running_highest", "Most sequences in one step since the engine started.", "num_running_highest"),
    ("headrace_requests_waiting", "Sequences waiting for their first step.", "num_waiting"),
    ("headrace_peak_read_bytes_per_second", "What the device read at most, measured at the engine's start.", "peak_read_bytes_per_s"),
    ("headrace_peak_flops_per_second", "What the device computed at most, measured at the engine's start.", "peak_flops_per_s"),
    ("headrace_engine_resident_bytes", "Memory of the engine's process.", "resident_bytes"),
    ("headrace_adapter_pool_bytes", "Weights of adapters in the pool on the host.", "adapter_pool_bytes"),
    ("headrace_adapter_pool_highest_bytes", "Most of them since the engine started.", "adapter_pool_highest_bytes"),
    ("headrace_gpu_utilization_ratio", "Share of time in which a kernel ran, as nvidia-smi's utilization.gpu.", "gpu_utilization"),
    ("headrace_gpu_memory_used_bytes", "As nvidia-smi's memory.used.", "gpu_memory_used_bytes"),
    ("headrace_gpu_memory_total_bytes", "As nvidia-smi's memory.total.", "gpu_memory_total_bytes"),
)
"""Family, text, and field of `LoadSnapshot`; a replica whose field is None has no series."""


def _gauges(known: list[tuple[ReplicaReading, LoadSnapshot]]) -> Iterator[Metric]:
    for name, text, read in GAUGES:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        for reading, snapshot in known:
            if (value := getattr(snapshot, read)) is not None:
                family.add_metric((reading.model, reading.replica), value)
        yield family
    cpu = CounterMetricFamily("headrace_engine_cpu_seconds", "Processor time of the engine's process.", labels=LABELS)
    blocks = GaugeMetricFamily("headrace_kv_blocks", "KV blocks by state; free + cached + used is the pool.", labels=(*LABELS, "state"))
    for reading, snapshot in known:
        labels = (reading.model, reading.replica)
        cpu.add_metric(labels, snapshot.cpu_s)
        for state in ("free", "cached", "used"):
            blocks.add_metric((*labels, state), getattr(snapshot, f"kv_blocks_{state}"))
    yield from (cpu, blocks)


def _counters(known: list[tuple[ReplicaReading, LoadSnapshot]]) -> Iterator[Metric]:
    for counted, counter in COUNTERS.items():
        family = CounterMetricFamily(counter.metric, counter.text, labels=(*LABELS, *counter.labels))
        for reading, snapshot in known:
            for values, count in counter.series(getattr(snapshot.counters, counted)):
                family.add_metric((reading.model, reading.replica, *values), count)
        yield family


def _adapters(known: list[tuple[ReplicaReading, LoadSnapshot]]) -> Iterator[Metric]:
    """As vLLM and the Gateway API's router have it: the value is the time, and the latest sample counts."""
    labels = ("model_name", "engine", "max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(LORA_INFO, "Names of the LoRA adapters in use and waited for; the value is the Unix time.", labels=labels)
    for reading, snapshot in known:
        if snapshot.max_loras:
            names = [",".join(adapters) for adapters in (snapshot.running_adapters, snapshot.waiting_adapters)]
            family.add_metric((reading.model, reading.replica, str(snapshot.max_loras), *names), time.time())
    if family.samples:
        yield family


def _cache_config(known: list[tuple[ReplicaReading, LoadSnapshot]]) -> Iterator[Metric]:
    """As vLLM has it, for the Gateway API's pickers: the facts are labels."""
    family = GaugeMetricFamily(CACHE_INFO, "The KV cache; always 1.", labels=("model_name", "engine", "block_size", "num_gpu_blocks"))
    for reading, snapshot in known:
        if reading.block_size:
            family.add_metric((reading.model, reading.replica, str(reading.block_size), str(snapshot.kv_blocks_total)), 1)
    if family.samples:
        yield family


def _process_families(resident_bytes: int) -> Iterator[Metric]:
    yield CounterMetricFamily("headrace_gateway_cpu_seconds", "Processor time of this gateway's process.", time.process_time())
    yield GaugeMetricFamily("headrace_gateway_resident_bytes", "Memory of this gateway's process.", resident_bytes)


def _steps(known: list[tuple[ReplicaReading, LoadSnapshot]]) -> Metric:
    family = HistogramMetricFamily("headrace_step_seconds", "Duration of a step.", labels=LABELS)
    for reading, snapshot in known:
        counters = snapshot.counters
        add_histogram(family, (reading.model, reading.replica), STEP_BOUNDS_S, counters.step_buckets, counters.step_seconds)
    return family


class ReplicaMetrics:
    def __init__(self, metrics: Metrics, model: str, replica: str) -> None:
        labels = (model, replica)
        self.time_to_first_token = metrics.time_to_first_token.labels(*labels)
        self.time_per_output_token = metrics.time_per_output_token.labels(*labels)
        self.inter_token_latency = metrics.inter_token_latency.labels(*labels)
        self.request_latency = metrics.request_latency.labels(*labels)
        self.queue_time = metrics.queue_time.labels(*labels)


class Metrics:
    """reported: values of engines and foreign servers, the same in every gateway"""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they are a second series per counter
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self.reported = CollectorRegistry(auto_describe=False)
        self.tenants = TenantMetrics()
        registry.register(self.tenants)
        self._replicas: dict[tuple[str, str], ReplicaMetrics] = {}
        self.requests = self._counted("headrace_requests", "Requests by outcome.", (*LABELS, "outcome"))
        self.sequences_resumed = self._counted(
            "headrace_sequences_resumed", "Sequences submitted again after the loss of their engine, by the replica of the last.", LABELS
        )
        self.shadow_requests = self._counted(
            "headrace_shadow_requests", "Copies of requests for the shadow model of their route.", ("model", "result")
        )
        self.fallbacks = self._counted(
            "headrace_fallbacks", "Requests given to a fallback of their model, by why that did not answer.", ("model", "to", "reason")
        )
        self.time_to_first_token = self._tallied(
            "headrace_time_to_first_token_seconds", "Arrival at the gateway to the first token.", LABELS, TTFT_BUCKETS
        )
        self.time_per_output_token = self._tallied(
            "headrace_time_per_output_token_seconds",
            "(last token - first token) / (tokens - 1), once per sequence.",
            LABELS,
            TOKEN_BUCKETS,
        )
        self.inter_token_latency = self._tallied(
            "headrace_inter_token_latency_seconds",
            "Gaps between chunks of a sequence; a chunk of k tokens counts as k gaps of a k-th each.",
            LABELS,
            TOKEN_BUCKETS,
        )
        self.request_latency = self._tallied(
            "headrace_request_latency_seconds", "Arrival to the end of the answer.", LABELS, LATENCY_BUCKETS
        )
        self.queue_time = self._tallied("headrace_queue_time_seconds", "Arrival at the engine to the first step.", LABELS, TTFT_BUCKETS)
        self.http_responses = self._counted("headrace_http_responses", "Answers by status code.", ("status",))
        self.requests_open = Gauge("headrace_gateway_requests_open", "Generating requests in this gateway.", registry=registry)
        self.loop_lag = self._tallied(
            "headrace_gateway_loop_lag_seconds",
            "How late the gateway's event loop came to a regular look, four times a second.",
            (),
            LAG_BUCKETS,
        ).labels()
        self.store_wait = self._tallied(
            "headrace_store_wait_seconds",
            "What a generating request waited for all stores together: keys, limits, caches, sessions, streams.",
            (),
            STORE_BUCKETS,
        ).labels()
        self.log_dropped = Gauge("headrace_request_log_dropped", "Lines the request log could not write.", registry=registry)

    def _counted(self, name: str, documentation: str, labels: Sequence[str]) -> CountCollector:
        made = CountCollector(name, documentation, labels)
        self.registry.register(made)
        return made

    def _tallied(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> TallyCollector:
        made = TallyCollector(name, documentation, labels, bounds)
        self.registry.register(made)
        return made

    def replica(self, model: str, replica: str) -> ReplicaMetrics:
        made = self._replicas.get((model, replica))
        if made is None:
            made = self._replicas[model, replica] = ReplicaMetrics(self, model, replica)
        return made

    def finished(self, model: str, replica: str, outcome: str) -> None:
        """Empty for a request that did not get so far."""
        self.requests.labels(model, replica, outcome).inc()

    def expect_failures(self, model: str, replica: str) -> None:
        """Give the outcomes that alerts count series of zero."""
        for outcome in (Outcome.DEADLINE, Outcome.FAILED):
            self.requests.labels(model, replica, outcome)

    def forget(self, model: str, replica: str | None = None) -> None:
        leading = (model,) if replica is None else (model, replica)
        if replica is None:
            self.tenants.forget_model(model)
            self.fallbacks.remove(model)
            self.shadow_requests.remove(model)
        for labels in [labels for labels in self._replicas if labels[: len(leading)] == leading]:
            del self._replicas[labels]
        for metric in (self.requests, self.sequences_resumed):
            metric.remove(*leading)
        for histogram in (
            self.time_to_first_token,
            self.time_per_output_token,
            self.inter_token_latency,
            self.request_latency,
            self.queue_time,
        ):
            histogram.remove(*leading)

    def read_process(self, resident_bytes: Callable[[], int]) -> None:
        self.registry.register(ReadCollector(_process_families, resident_bytes))

    def read_engines(self, readings: Callable[[], Iterable[ReplicaReading]]) -> None:
        self.registry.register(ReadCollector(_ready_families, readings))
        self.reported.register(ReadCollector(_engine_families, readings))

    def read_held(self, num_held: Callable[[], Mapping[str, int]]) -> None:
        self.registry.register(ReadCollector(_held_families, num_held))

    def read_wanted(self, num_wanted: Callable[[], Mapping[str, int]]) -> None:
        self.reported.register(ReadCollector(_wanted_families, num_wanted))

    def read_upstreams(self, readings: Callable[[], Iterable[UpstreamReading]]) -> None:
        self.registry.register(ReadCollector(upstream_families, readings))
        self.reported.register(ReadCollector(reported_load_families, readings))

    def read_memory(self, reading: Callable[[], MemoryReading]) -> None:
        self.registry.register(ReadCollector(_memory_families, reading))

    def read_text(self, reading: Callable[[], TextReading]) -> None:
        self.registry.register(ReadCollector(_text_families, reading))

    def read_budgets(self, readings: Callable[[], Iterable[BudgetReading]]) -> None:
        self.registry.register(ReadCollector(budget_families, readings))

    def read_usage(self, reading: Callable[[], UsageReading]) -> None:
        self.registry.register(ReadCollector(usage_families, reading))

    def encoded(self) -> bytes:
        return encode_families(self.registry.collect())

    def page(
        self, accept: str = "", by_worker: Mapping[int, bytes] | None = None, tenants: ShownTenants = EVERY_TENANT
    ) -> tuple[bytes, str]:
        """by_worker  `encoded` of each worker of this gateway's port; None: there is one process
        tenants    those whose series the reader may see
        """
        encoder, content_type = choose_encoder(accept)
        own = self.registry.collect() if by_worker is None else merge_workers(by_worker)
        families = tenants.shown([*own, *self.reported.collect()])
        return encoder(_Page([*families, *vllm_families(families)])), content_type


@dataclass(frozen=True, slots=True)
class _Page:
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def encode_families(families: Iterable[Metric]) -> bytes:
    """What all workers read alike from engines is not included. JSON: per family name, text, type, unit and samples."""
    encoded = [
        [family.name, family.documentation, family.type, family.unit, [[name, labels, value] for name, labels, value, *_ in family.samples]]
        for family in families
    ]
    return json.dumps(encoded, separators=(",", ":")).encode()


def merge_workers(by_worker: Mapping[int, bytes]) -> list[Metric]:
    """Bytes that `encode_families` did not make count as no answer."""
    is_up = GaugeMetricFamily("headrace_gateway_worker_up", "1 for each gateway worker whose series are on this page.", labels=(WORKER,))
    merged: dict[str, Metric] = {is_up.name: is_up}
    for worker, data in sorted(by_worker.items()):
        families = _decoded(data)
        is_up.add_metric((str(worker),), float(families is not None))
        for family in families or ():
            one = merged.setdefault(family.name, _family(family.name, family.documentation, family.type, family.unit, ()))
            for sample in family.samples:
                one.add_sample(sample.name, {**sample.labels, WORKER: str(worker)}, sample.value)
    return list(merged.values())


def _decoded(data: bytes) -> list[Metric] | None:
    try:
        return [_family(*family) for family in json.loads(data)]
    except (ValueError, TypeError, RecursionError):
        return None


def _family(name: str, documentation: str, kind: str, unit: str, samples: Iterable[tuple[str, dict[str, str], float]]) -> Metric:
    family = Metric(name, documentation, kind, unit)
    for sample_name, labels, value in samples:
        family.add_sample(sample_name, labels, float(value))
    return family
