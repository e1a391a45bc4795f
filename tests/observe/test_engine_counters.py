"""Tests that one row of EngineCounters is all that a counter of the engine needs: it crosses the wire, and is on the page under
both names.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.load import COUNTERS, LABELLED_COUNTERS, PLAIN_COUNTERS, EngineCounters, LoadSnapshot
from headrace.observe.metrics import Metrics, ReplicaReading
from headrace.observe.vllm_metrics import REASONS
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import decode_load, encode_load

pytestmark = pytest.mark.pure


def counted() -> EngineCounters:
    """Another number in each row."""
    plain = {name: 100 + number for number, name in enumerate(PLAIN_COUNTERS)}
    labelled = {name: dict.fromkeys(COUNTERS[name].values or REASONS, 200 + number) for number, name in enumerate(LABELLED_COUNTERS)}
    return EngineCounters(**plain, **labelled)  # type: ignore[arg-type]


def over_the_wire(counters: EngineCounters) -> LoadSnapshot:
    load = LoadSnapshot(
        num_running=2, num_waiting=1, kv_blocks_free=5, kv_blocks_cached=3, kv_blocks_used=2, kv_blocks_total=10, counters=counters
    )
    return decode_load(pb.Load.FromString(encode_load(load).SerializeToString()))


def page_of(load: LoadSnapshot) -> dict[str, list[float]]:
    """The gateway's page: the values of each sample name."""
    metrics = Metrics()
    metrics.read_engines(lambda: [ReplicaReading("m", "r0", True, load)])
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(metrics.page()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.value)
    return found


@pytest.mark.parametrize("name", COUNTERS)
def test_a_row_crosses_the_wire_and_is_on_the_page_under_both_names(name: str) -> None:
    load, counter = over_the_wire(counted()), COUNTERS[name]
    assert getattr(load.counters, name) == getattr(counted(), name)
    values = [float(count) for _, count in counter.series(getattr(counted(), name))]
    page = page_of(load)
    assert page[f"{counter.metric}_total"] == values
    if counter.vllm:
        assert page[f"{counter.vllm}_total"] == values


def test_published_names_stay() -> None:
    assert [(counter.metric, counter.vllm, *counter.labels) for counter in COUNTERS.values()] == [
        ("headrace_prompt_tokens", "vllm:prompt_tokens"),
        ("headrace_generation_tokens", "vllm:generation_tokens"),
        ("headrace_prefix_cache_hit_tokens", "vllm:prefix_cache_hits"),
        ("headrace_prefix_cache_query_tokens", "vllm:prefix_cache_queries"),
        ("headrace_preemptions", "vllm:num_preemptions"),
        ("headrace_steps", ""),
        ("headrace_read_bytes", "vllm:estimated_read_bytes_per_gpu"),
        ("headrace_flops", "vllm:estimated_flops_per_gpu"),
        ("headrace_adapter_reads", ""),
        ("headrace_adapter_read_seconds", ""),
        ("headrace_adapter_reads_failed", ""),
        ("headrace_adapter_evictions", ""),
        ("headrace_expert_tokens", ""),
        ("headrace_hottest_expert_tokens", "", "expert"),
        ("headrace_rank_exchanges", ""),
        ("headrace_rank_exchange_bytes", ""),
        ("headrace_rank_exchange_wait_seconds", ""),
        ("headrace_pipeline_stage_idle_seconds", "", "stage"),
        ("headrace_spec_decode_drafts", "vllm:spec_decode_num_drafts"),
        ("headrace_spec_decode_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
        ("headrace_spec_decode_accepted_tokens", "vllm:spec_decode_num_accepted_tokens"),
        ("headrace_spec_decode_accepted_tokens_per_pos", "vllm:spec_decode_num_accepted_tokens_per_pos", "position"),
        ("headrace_spec_decode_steps_not_overlapped", ""),
        ("headrace_sequences_finished", "vllm:request_success", "reason"),
        ("headrace_engine_failures", "", "kind"),
    ]


def test_a_copy_shares_nothing_with_what_is_counted_on() -> None:
    counters = counted()
    copied = counters.copy()
    counters.steps += 1
    counters.note_step(0.1)
    counters.note_finished("stop")
    counters.note_verified(3, 2)
    for name in LABELLED_COUNTERS:
        getattr(counters, name)["more"] = 1
    assert copied == counted()


def test_a_counter_that_one_end_has_no_row_for_is_passed_over_or_zero() -> None:
    message = encode_load(over_the_wire(counted()))
    del message.counters.plain["steps"]
    message.counters.plain["of_a_later_release"] = 5
    decoded = decode_load(message).counters
    assert (decoded.steps, decoded.preemptions) == (0, counted().preemptions)


NEW_ROW = """
import sys
from importlib.util import find_spec, module_from_spec

spec = find_spec("headrace.core.load")
source = spec.loader.get_source(spec.name)
row = '    swaps: Annotated[int, Counter("headrace_swaps", "Sequences swapped out.", "vllm:num_swaps")] = 0\\n'
place = "    step_seconds: float"
assert source.count(place) == 1
sys.modules[spec.name] = module = module_from_spec(spec)
exec(compile(source.replace(place, row + place), spec.origin, "exec"), vars(module))

import test_engine_counters as test

counters = module.EngineCounters()
counters.swaps += 7
page = test.page_of(test.over_the_wire(counters.copy()))
print(page["headrace_swaps_total"], page["vllm:num_swaps_total"])
"""


@pytest.mark.process
def test_a_new_counter_is_one_row() -> None:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {__file__.rpartition('/')[0]!r})\n{NEW_ROW}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[7.0] [7.0]\n"
