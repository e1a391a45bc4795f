"""Tests metrics by tier and tenant: bounded labels whatever tenants there are, sums that only grow, and vLLM's names."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.observe.metrics import Metrics, ReplicaReading
from headrace.observe.tenant_metrics import (
    MAX_TENANTS,
    MAX_WATCHED,
    NO_TENANT,
    OTHER,
    LargestTenants,
    RequestUse,
    ShownTenants,
    TenantMetrics,
)
from headrace.observe.vllm_metrics import LORA_INFO

pytestmark = pytest.mark.pure


def samples(metrics: TenantMetrics, name: str) -> dict[tuple[str, ...], float]:
    found = {}
    for family in metrics.collect():
        for sample in family.samples:
            if sample.name == name:
                found[tuple(sample.labels.values())] = sample.value
    return found


def test_a_request_counts_for_its_tier_and_its_tenant() -> None:
    metrics = TenantMetrics()
    use = RequestUse(prompt_tokens=10, cached_tokens=4, completion_tokens=3, cost_nanos=2_500_000_000)
    metrics.count("free", "acme", use, model="small")
    metrics.count("free", "other-tenant", RequestUse(refused="rate_limit_exceeded", limit="requests_per_minute"))
    assert samples(metrics, "headrace_tier_requests_total") == {("free",): 2}
    assert samples(metrics, "headrace_tenant_requests_total") == {("acme",): 1, ("other-tenant",): 1}
    assert samples(metrics, "headrace_tier_cost_total") == {("free",): 2.5}
    assert samples(metrics, "headrace_model_cost_total") == {("small",): 2.5}
    tokens = samples(metrics, "headrace_tenant_tokens_total")
    assert [tokens["acme", kind] for kind in ("input", "cached", "output")] == [10, 4, 3]
    assert samples(metrics, "headrace_tier_refused_total") == {("free", "rate_limit_exceeded"): 1}
    assert samples(metrics, "headrace_tier_limited_total") == {("free", "requests_per_minute"): 1}
    assert samples(metrics, "headrace_tenant_limited_total") == {("other-tenant", "requests_per_minute"): 1}


def test_any_number_of_tenants_has_a_bounded_number_of_series() -> None:
    metrics = TenantMetrics()
    for number in range(10_000):
        metrics.count("free", f"t{number}", RequestUse(completion_tokens=1))
        metrics.count("free", "large", RequestUse(completion_tokens=1))
    found = samples(metrics, "headrace_tenant_requests_total")
    assert len(found) <= MAX_TENANTS + 1
    assert found["large",] == 10_000
    assert found[OTHER,] > 9_000
    assert len(metrics._largest._recent) <= MAX_WATCHED


def test_a_tenant_that_grows_takes_the_place_of_a_small_one_and_no_series_shrinks() -> None:
    metrics, drawn = TenantMetrics(), random.Random(1)
    before: dict[tuple[str, ...], float] = {}
    for step in range(30_000):
        tenant = f"old{drawn.randrange(40)}" if step < 10_000 or step % 2 else "grown"
        metrics.count("free", tenant, RequestUse())
        if step % 500 == 0:
            now = samples(metrics, "headrace_tenant_requests_total")
            assert all(now[label] >= value for label, value in before.items() if label in now)
            before = now
    assert before["grown",] > 8_000


@given(st.lists(st.sampled_from([f"t{number}" for number in range(60)]), max_size=400))
@settings(max_examples=50, deadline=None)
def test_the_number_of_series_is_bounded_whatever_comes(tenants: list[str]) -> None:
    largest, seen = LargestTenants(), set()
    for tenant in tenants:
        ended = largest.note(tenant)
        seen.add(tenant)
        assert len(largest.labelled) == min(MAX_TENANTS, len(seen))
        assert largest.labelled <= seen
        assert ended not in largest.labelled


@pytest.mark.parametrize(
    "name", ['a"b', "a\\b", "a\nheadrace_forged_total 1", "a\r\nb", 'x"} 1\nheadrace_forged_total{a="', "\u2028", "{}"]
)
def test_no_name_can_forge_a_series(name: str) -> None:
    metrics = Metrics()
    metrics.tenants.count("free", name, RequestUse())
    metrics.finished("m", "r", "stop")
    page, _ = metrics.page()
    found = list(text_string_to_metric_families(page.decode()))
    assert "headrace_forged" not in {family.name for family in found}
    labels = [sample.labels["tenant"] for family in found for sample in family.samples if family.name == "headrace_tenant_requests"]
    assert labels == [name]


@pytest.mark.parametrize(("tenant", "seen"), [("acme", {"acme"}), (OTHER, set()), ("absent", set()), ("", set())])
def test_a_tenant_sees_its_own_series_of_all_workers_and_never_those_of_the_rest(tenant: str, seen: set[str]) -> None:
    metrics = Metrics()
    for name in ("acme", "beta", OTHER):
        metrics.tenants.count("free", name, RequestUse(completion_tokens=1, refused="overloaded"))
    page, _ = metrics.page("", {0: metrics.encoded(), 1: metrics.encoded()}, ShownTenants(own=tenant))
    samples = [sample for family in text_string_to_metric_families(page.decode()) for sample in family.samples]
    assert {sample.labels["tenant"] for sample in samples if "tenant" in sample.labels} == seen
    assert not [sample for sample in samples if "tier" in sample.labels]


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
        prefix_cache_query_tokens=90,
        preemptions=4,
        finished={"stop": 3, "length": 1, "cancelled": 2, "error": 7},
    ),
)


def filled() -> Metrics:
    metrics = Metrics()
    metrics.read_engines(lambda: [ReplicaReading("m", "r0", True, LOAD), ReplicaReading("m", "r1", False, None)])
    replica = metrics.replica("m", "r0")
    for seconds in (0.03, 0.3):
        replica.time_to_first_token.observe(seconds)
        replica.inter_token_latency.observe(seconds)
        replica.time_per_output_token.observe(seconds)
        replica.request_latency.observe(seconds)
        replica.queue_time.observe(seconds)
    return metrics


def page_of(metrics: Metrics) -> dict[str, float]:
    """Sample of the first replica, with its bucket or finish reason behind a slash -> value."""
    page = metrics.page()[0].decode()
    found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {
        "/".join([sample.name, *(sample.labels[name] for name in ("le", "finished_reason") if name in sample.labels)]): sample.value
        for sample in found
        if sample.labels.get("engine") == "r0" and sample.labels["model_name"] == "m"
    }


def test_vllms_names_stand_beside_ours_with_the_same_numbers() -> None:
    found = page_of(filled())
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:num_requests_waiting"] == 1
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0.2
    assert found["vllm:prompt_tokens_total"] == 100
    assert found["vllm:generation_tokens_total"] == 50
    assert found["vllm:prefix_cache_hits_total"] == 30
    assert found["vllm:prefix_cache_queries_total"] == 90
    assert found["vllm:num_preemptions_total"] == 4
    reasons = {key.partition("/")[2]: value for key, value in found.items() if key.startswith("vllm:request_success_total")}
    assert reasons == {"stop": 3, "length": 1, "abort": 2}
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "request_queue_time", "e2e_request_latency"):
        assert found[f"vllm:{name}_seconds_count"] == 2
        assert found[f"vllm:{name}_seconds_sum"] == pytest.approx(0.33)
    assert found["vllm:time_to_first_token_seconds_bucket/0.04"] == 1


def test_adapters_in_use_are_shown_as_routers_read_them_and_only_to_who_sees_all() -> None:
    metrics, adapted = Metrics(), replace(LOAD, max_loras=4, running_adapters=("sql", "acme/b"), waiting_adapters=("c",))
    loads = {"r0": adapted, "r1": replace(LOAD, max_loras=2), "r2": LOAD}
    metrics.read_engines(lambda: [ReplicaReading("m", name, True, load) for name, load in loads.items()])
    families = {family.name: family for family in text_string_to_metric_families(metrics.page()[0].decode())}
    shown = families[LORA_INFO]
    assert shown.type == "gauge"
    assert [sample.labels for sample in shown.samples] == [
        {
            "model_name": "m",
            "engine": "r0",
            "max_lora": "4",
            "running_lora_adapters": "sql,acme/b",
            "waiting_lora_adapters": "c",
        },
        {"model_name": "m", "engine": "r1", "max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""},
    ]
    assert all(sample.value > 1e9 for sample in shown.samples), "Unix seconds"
    assert LORA_INFO not in metrics.page(tenants=NO_TENANT)[0].decode()
    assert LORA_INFO not in filled().page()[0].decode()


def test_the_numbers_of_several_workers_have_labels_of_their_own_under_vllms_names_too() -> None:
    metrics = filled()
    page = metrics.page("", {0: metrics.encoded(), 1: metrics.encoded()})[0].decode()
    counts = [line for line in page.splitlines() if line.startswith("vllm:time_to_first_token_seconds_count")]
    assert len(counts) == len(set(counts)) == 2
    running = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
    assert len(running) == 1
