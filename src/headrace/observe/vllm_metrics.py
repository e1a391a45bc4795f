"""Repeats the metrics page's families under vLLM's names and labels, for dashboards and autoscalers that know these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from headrace.core.load import COUNTERS

NAMES: Mapping[str, tuple[str, ...]] = {
    **{counter.metric: (counter.vllm,) for counter in COUNTERS.values() if counter.vllm},
    "headrace_requests_running": ("vllm:num_requests_running",),
    "headrace_requests_waiting": ("vllm:num_requests_waiting",),
    "headrace_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "headrace_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "headrace_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "headrace_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "headrace_queue_time_seconds": ("vllm:request_queue_time_seconds",),
}
"""Ours -> vLLM's; the older vllm:time_per_output_token_seconds is the gaps between tokens."""

KV_BLOCKS, KV_USAGE = "headrace_kv_blocks", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")

FINISHED = "vllm:request_success"
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}

LORA_INFO, CACHE_INFO = "vllm:lora_requests_info", "vllm:cache_config_info"

LABELS = {"model": "model_name", "replica": "engine", "reason": "finished_reason"}


def vllm_families(families: Iterable[Metric]) -> Iterator[Metric]:
    for family in families:
        for name in NAMES.get(family.name, ()):
            yield _renamed(family, name)
        if family.name == KV_BLOCKS:
            yield from (_usage(family, name) for name in KV_USAGE)


def _renamed(family: Metric, name: str) -> Metric:
    made = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = _labels(sample.labels)
        if name == FINISHED:
            if sample.labels["reason"] not in REASONS:
                continue
            labels["finished_reason"] = REASONS[sample.labels["reason"]]
        made.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return made


def _usage(family: Metric, name: str) -> Metric:
    blocks: dict[tuple[str, str], dict[str, float]] = {}
    for sample in family.samples:
        by_state = blocks.setdefault((sample.labels["model"], sample.labels["replica"]), {})
        by_state[sample.labels["state"]] = sample.value
    made = GaugeMetricFamily(name, "Used part of the KV blocks, 0..1.", labels=("model_name", "engine"))
    for labels, by_state in blocks.items():
        total = sum(by_state.values())
        made.add_metric(labels, by_state.get("used", 0.0) / total if total else 0.0)
    return made


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {LABELS.get(name, name): value for name, value in labels.items()}
