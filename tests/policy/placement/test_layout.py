"""Tests layouts and roofline: what must hold for every model and device, and what is known of one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policy.placement.layout import HEADROOM, TIE, Placement, capacity, choose_layout, judge, why_not_run
from headrace.policy.placement.load import at_rate, at_running
from headrace.policy.placement.model import LatentAttention, ModelShape, WeightSizes
from headrace.policy.placement.need import MAX_NUM_SEQS, Device, Goals, Link, Need, Traffic
from headrace.policy.placement.roofline import COMPUTING, Layout, Roofline

pytestmark = pytest.mark.pure

NVLINK = Link("nvlink", 450e9, 15e-6, 8)
NETWORK = Link("network", 50e9, 10e-6, 4096)
CARD = Device(
    name="card",
    title="A card",
    memory_bytes=80e9,
    bytes_per_s=3350e9,
    flops={"bf16": 989e12, "fp8": 1979e12},
    link=NVLINK,
    network=NETWORK,
    price_per_hour=3.0,
    price_source="assumption",
    as_of="2026-11",
    source="test",
)
LARGE = ModelShape(
    name="large",
    num_layers=80,
    hidden_size=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_positions=4096,
    mlp_size=28672,
)
SMALL = replace(LARGE, name="small", num_layers=32, hidden_size=4096, heads=32, mlp_size=14336, vocab_size=128256)
EXPERTS = replace(SMALL, name="experts", num_experts=8, experts_per_token=2, expert_size=14336, vocab_size=32000)


def need(model: ModelShape = SMALL, device: Device = CARD, *, context: int = 2048, goals: Goals = Goals(), **traffic: float) -> Need:  # noqa: B008
    asked = Traffic(prompt_tokens=context * 3 // 4, output_tokens=context - context * 3 // 4, **traffic)  # type: ignore[arg-type]
    return Need(model=model, device=device, dtype="bf16", kv_dtype="bf16", traffic=asked, goals=goals, compares_all=True)


def best(asked: Need) -> Placement:
    return choose_layout(asked)[0]


@cache
def full_replica(counts_prompts: bool) -> tuple[Need, Placement]:
    """A need that many examples share, and the layout that is chosen for it."""
    asked = need(goals=Goals(tpot_s=0.05), counts_prompts=counts_prompts)
    return asked, best(asked)


FEW = settings(max_examples=30)
"""Of a test that judges every layout in every example."""


@given(memory_gb=st.integers(20, 400), more_gb=st.integers(0, 200), tp=st.sampled_from([1, 2, 4, 8]), context=st.integers(16, 100_000))
def test_more_memory_never_holds_fewer_sequences(memory_gb: int, more_gb: int, tp: int, context: int) -> None:
    asked = need(LARGE, replace(CARD, memory_bytes=memory_gb * 1e9), context=context)
    larger = replace(asked, device=replace(CARD, memory_bytes=(memory_gb + more_gb) * 1e9))
    before, after = capacity(asked, Layout(tp)), capacity(larger, Layout(tp))
    assert after[0] >= before[0]
    assert after[1] >= before[1]


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 100_000), st.sampled_from([SMALL, LARGE, EXPERTS]))
def test_a_larger_batch_takes_longer_and_gives_more_tokens(first: int, second: int, context: int, model: ModelShape) -> None:
    low, high = sorted((first, second))
    latency = Roofline(model, CARD, Layout(4), "bf16", "bf16")
    assert latency.decode_s(low, context) <= latency.decode_s(high, context)
    assert low / latency.decode_s(low, context) <= high / latency.decode_s(high, context) * (1 + 1e-9)


@FEW
@given(st.integers(1, 300), st.floats(0.005, 0.2), st.floats(0.05, 5.0), st.booleans())
def test_a_chosen_layout_keeps_every_goal_with_its_headroom(users: int, tpot_s: float, ttft_s: float, counts_prompts: bool) -> None:
    asked = need(goals=Goals(tpot_s=tpot_s, ttft_p95_s=ttft_s), tokens_per_s=users * 10.0, counts_prompts=counts_prompts)
    found = best(asked)
    if found.reason:
        return
    latency = Roofline(asked.model, CARD, found.layout, "bf16", "bf16")
    assert 1 <= found.batch <= found.num_sequences
    assert found.load.tpot_s <= HEADROOM * tpot_s
    assert found.load.ttft_p95_s <= HEADROOM * ttft_s
    assert found.capacity_tokens_per_s >= users * 10.0 - 1e-6
    assert found.load.ttft_p95_s >= found.load.ttft_s >= latency.prefill_s(asked.traffic.prompt_tokens)
    more = at_running(asked, latency, found.batch + 1)
    if more.slots <= min(found.num_sequences, MAX_NUM_SEQS):
        late = more.ttft_p95_s > HEADROOM * ttft_s or more.tpot_s > HEADROOM * tpot_s
        assert late, "one sequence more would break a goal"


@given(st.floats(0.01, 1.0), st.booleans())
def test_a_replica_at_a_part_of_its_rate_is_earlier_than_a_full_one(share: float, counts_prompts: bool) -> None:
    asked, full = full_replica(counts_prompts)
    latency = Roofline(asked.model, CARD, full.layout, "bf16", "bf16")
    part = at_rate(asked, latency, share * full.full_tokens_per_s, full.load.running)
    assert part.tokens_per_s == pytest.approx(share * full.full_tokens_per_s, rel=1e-6)
    assert part.running <= full.load.running
    assert part.tpot_s <= full.load.tpot_s * (1 + 1e-9)
    assert part.ttft_s <= full.load.ttft_s * (1 + 1e-9)


def test_what_this_version_does_not_run_is_not_chosen() -> None:
    runnable = replace(need(LARGE, tokens_per_s=1000.0), compares_all=False)
    found = choose_layout(runnable)
    assert found[0].reason == "weights of 138.0 GB do not fit in 80.0 GB"
    assert {each.reason for each in found if each.layout.num_devices > 1} == {"replicas on several GPUs are not planned"}
    assert not best(replace(runnable, compares_all=True)).reason


def test_the_cpus_of_one_machine_run_several_ranks_and_those_of_two_do_not() -> None:
    sockets = replace(CARD, name="cpu", link=replace(NVLINK, num_devices=2))
    assert [why_not_run(sockets, layout) for layout in (Layout(1), Layout(2), Layout(1, 2))] == ["", "", ""]
    assert why_not_run(sockets, Layout(2, 2)) == "headrace serve starts all ranks of a replica on one machine"
    found = best(replace(need(LARGE, sockets), compares_all=False, num_devices=4))
    assert (str(found.layout), found.reason, found.replicas) == ("TP 2", "", 2)


@FEW
@given(st.integers(1, 2000))
def test_no_other_layout_that_keeps_the_goals_takes_fewer_devices(users: int) -> None:
    asked = need(LARGE, goals=Goals(tpot_s=0.05), tokens_per_s=users * 20.0, user_tokens_per_s=20.0)
    found = choose_layout(asked)
    usable = [each for each in (judge(asked, layout.layout) for layout in found) if not each.reason]
    assert found[0].num_devices == min(each.num_devices for each in usable)
    assert all(each.reason for each in found[1:]), "each of the others says why it is not chosen"


def test_weights_and_kv_of_a_70b_model() -> None:
    assert round(LARGE.num_params / 1e9, 2) == 68.98
    assert 2 * LARGE.num_kv_values == 320 * 1024


def test_tensor_parallelism_over_more_devices_than_kv_heads_holds_them_twice() -> None:
    wide = replace(CARD, link=replace(NVLINK, num_devices=16))
    eight, sixteen = (capacity(need(LARGE, wide), Layout(tp)) for tp in (8, 16))
    assert sixteen[0] < 2 * eight[0]
    assert Roofline(LARGE, wide, Layout(16), "bf16", "bf16").kv_bytes(1) == 2 * Roofline(LARGE, wide, Layout(8), "bf16", "bf16").kv_bytes(1)


def test_heads_that_tensor_parallelism_does_not_divide_are_named() -> None:
    odd = replace(SMALL, heads=28, kv_heads=4, hidden_size=3584)
    refused = {str(each.layout): each.reason for each in choose_layout(need(odd)) if "divide" in each.reason}
    assert refused["TP 8"] == "28 query heads do not divide by it"


def test_a_model_that_does_not_fit_says_how_large_it_is() -> None:
    asked = replace(need(LARGE), num_devices=1)
    assert best(asked).reason == "weights of 138.0 GB do not fit in 80.0 GB"
    assert best(asked).batch == 0


def test_a_cache_smaller_than_one_sequence_is_named() -> None:
    tight = replace(need(LARGE, context=4096), num_devices=2, memory_fraction=0.866)
    assert "less than one sequence of 4096" in best(tight).reason


def test_too_few_devices_say_how_many_would_do() -> None:
    asked = replace(need(tokens_per_s=100_000.0), num_devices=2)
    assert "would be needed" in best(asked).reason


def test_a_step_of_few_tokens_reads_few_experts() -> None:
    one, many = EXPERTS.read_bytes("bf16", 1), EXPERTS.read_bytes("bf16", 10_000)
    assert one == pytest.approx(2 * EXPERTS.num_active_params, rel=1e-6)
    assert many == pytest.approx(2 * (EXPERTS.num_params - EXPERTS.vocab_size * EXPERTS.hidden_size), rel=1e-3)


def test_quantized_layers_leave_the_tables_as_they_are() -> None:
    """A step reads the head in 16 bits, and not the embedding."""
    stored = replace(SMALL, stored=WeightSizes(layer=0.6, table=2.0))
    assert stored.weights_bytes("int4") == pytest.approx(0.6 * SMALL.num_layer_params + 2 * SMALL.num_table_params)
    assert stored.read_bytes("int4", 1) == pytest.approx(0.6 * SMALL.num_layer_params + SMALL.num_table_params)
    assert SMALL.weights_bytes("fp8") == SMALL.num_layer_params + 2 * SMALL.num_table_params


def test_a_window_bounds_what_a_sequence_holds() -> None:
    windowed = replace(SMALL, window=4096, num_window_layers=16)
    assert windowed.num_resident_kv_values(4096) == SMALL.num_resident_kv_values(4096)
    assert windowed.num_resident_kv_values(131_072) == pytest.approx(SMALL.num_resident_kv_values((131_072 + 4096) / 2))


def test_a_latent_cache_is_held_by_every_device() -> None:
    latent = replace(SMALL, latent=LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128))
    assert latent.num_kv_values == 32 * 576
    assert Roofline(latent, CARD, Layout(4), "bf16", "bf16").kv_bytes(10) == 4 * Roofline(latent, CARD, Layout(1), "bf16", "bf16").kv_bytes(
        10
    )


def test_a_pipeline_gives_more_tokens_and_none_earlier() -> None:
    one, two = (Roofline(LARGE, CARD, Layout(4, pp), "bf16", "bf16") for pp in (1, 2))
    assert two.decode_s(64, 2048) > one.decode_s(32, 2048)
    assert 64 / two.decode_s(64, 2048) > 32 / one.decode_s(32, 2048)


def test_an_encoder_is_planned_by_the_tokens_that_it_reads() -> None:
    encoder = replace(SMALL, is_encoder=True, kv_heads=32)
    found = best(
        Need(
            model=encoder, device=CARD, dtype="bf16", kv_dtype="bf16", traffic=Traffic(prompt_tokens=512, output_tokens=0, tokens_per_s=1e6)
        )
    )
    assert not found.reason
    assert found.capacity_tokens_per_s >= 1e6
    assert found.resident_tokens == 0


def test_of_layouts_with_as_many_devices_the_smaller_replicas_are_chosen() -> None:
    found = choose_layout(need(LARGE, context=2048, tokens_per_s=30_000.0, user_tokens_per_s=30.0))
    assert (found[0].layout, found[0].replicas) == (Layout(4), 8)
    assert any("larger replicas" in each.reason for each in found[1:])


@given(st.integers(1, 40), st.sampled_from([SMALL, LARGE]))
def test_with_a_count_and_no_rate_the_devices_that_are_there_give_the_most_tokens(count: int, model: ModelShape) -> None:
    found = choose_layout(replace(need(model), num_devices=count))
    if not found[0].reason:
        assert found[0].capacity_tokens_per_s >= (1 - TIE) * max(each.capacity_tokens_per_s for each in found)


def test_three_cards_for_a_model_that_fits_on_one_are_three_replicas() -> None:
    found = best(replace(need(SMALL, context=4096), num_devices=3))
    assert (found.layout, found.replicas) == (Layout(1), 3)


def test_a_pipeline_over_machines_is_not_chosen_for_a_few_percent() -> None:
    found = choose_layout(need(LARGE, context=4096))
    per_device = {str(each.layout): each.capacity_tokens_per_s / each.num_devices for each in found}
    assert per_device["TP 4 x PP 4"] > per_device["TP 8"] > (1 - TIE) * per_device["TP 4 x PP 4"]
    assert found[0].layout == Layout(8)
    reasons = {str(each.layout): each.reason for each in found}
    assert reasons["TP 4 x PP 4"] == "as many tokens/s per device within 5%, in larger replicas: a failure takes more away"


COMPARED = (
    re.compile(r"([\d.,]+) tokens/s(?: per device)? instead of ([\d.,]+)"),
    re.compile(r"weights of ([\d.,]+) GB do not fit in ([\d.,]+) GB"),
    re.compile(r"([\d.,]+) ms with 1 sequence\(s\): more than ([\d.,]+) ms"),
)


@FEW
@given(st.floats(0.5, 1.0), st.integers(64, 8192), st.sampled_from([SMALL, LARGE, EXPERTS]), st.floats(1e-3, 1e3), st.floats(0.002, 0.05))
def test_a_reason_never_compares_two_numbers_that_print_equal(
    fraction: float, context: int, model: ModelShape, slower: float, tpot_s: float
) -> None:
    card = replace(CARD, bytes_per_s=CARD.bytes_per_s / slower)
    for goals in (Goals(), Goals(tpot_s=tpot_s)):
        for each in choose_layout(replace(need(model, card, context=context, goals=goals), memory_fraction=fraction)):
            for pattern in COMPARED:
                if found := pattern.search(each.reason):
                    assert found[1] != found[2], each.reason


def test_numbers_that_nearly_meet_are_printed_with_the_digits_that_part_them() -> None:
    exact = replace(CARD, memory_bytes=SMALL.num_params * 2.0 * (1 - 1e-5))
    assert best(replace(need(device=exact), num_devices=1)).reason == "weights of 16.061 GB do not fit in 16.060 GB"


def test_of_layouts_that_do_not_fit_the_one_that_lacks_least_comes_first() -> None:
    chip = replace(CARD, memory_bytes=0.23e9)
    found = choose_layout(need(device=chip))
    devices = [each.layout.num_devices for each in found if "do not fit" in each.reason]
    assert devices[0] == 64
    assert devices == sorted(devices, reverse=True)
    assert found[0].reason == "weights of 16.1 GB do not fit in 14.7 GB"


def test_weights_that_a_device_has_no_products_for_are_multiplied_as_16_bits() -> None:
    older = replace(CARD, flops={"bf16": 312e12})
    seconds = [Roofline(SMALL, older, Layout(1), dtype, "bf16").prefill_terms(2048)[COMPUTING] for dtype in ("bf16", "fp8", "int8")]
    assert seconds[0] == seconds[1] == seconds[2]
    assert Roofline(SMALL, CARD, Layout(1), "fp8", "bf16").prefill_terms(2048)[COMPUTING] < seconds[0]


def test_bandwidth_use_is_that_of_the_time_between_tokens_prompts_included() -> None:
    found = judge(need(tokens_per_s=1000.0, counts_prompts=True), Layout(1))
    read = 2 * SMALL.num_active_params + found.load.running * 2048 * SMALL.num_kv_values * 2
    assert found.mbu == pytest.approx(read / found.load.tpot_s / 3350e9)


@given(st.integers(2, 1000), st.integers(64, 8192), st.sampled_from([SMALL, LARGE, EXPERTS]), st.sampled_from(["bf16", "fp8"]))
def test_terms_of_a_step_and_of_a_prompt_add_up(batch: int, tokens: int, model: ModelShape, dtype: str) -> None:
    latency = Roofline(model, CARD, Layout(2, 2), dtype, "bf16")
    weights_s, flops_s = latency.read_weights_s(batch / 2), 2 * batch / 2 * model.num_active_params / (2 * latency.compute_rate)
    rest_s = latency.read_kv_s(batch / 2, tokens) + model.num_layers * CARD.layer_overhead_s + latency.collectives_s(batch / 2)
    assert latency.decode_s(batch, tokens) == pytest.approx(max(weights_s, flops_s) + rest_s)
    assert latency.prefill_busy_s(tokens) == pytest.approx(sum(latency.prefill_terms(tokens).values()))


@pytest.mark.parametrize("context", [512, 100_000])
def test_fewer_sequences_than_groups_of_a_pipeline_take_as_long_as_one(context: int) -> None:
    """Each passes every group alone, with its whole KV and all weights."""
    flat, deep = Roofline(LARGE, CARD, Layout(4), "bf16", "bf16"), Roofline(LARGE, CARD, Layout(4, 4), "bf16", "bf16")
    assert deep.decode_s(1, context) == deep.decode_s(3, context)
    assert deep.decode_s(1, context) >= flat.decode_s(1, context)
    assert deep.decode_bytes(1, context) == pytest.approx(flat.decode_bytes(1, context))
    assert deep.decode_bytes(8, context) == pytest.approx(4 * flat.decode_bytes(2, context))
