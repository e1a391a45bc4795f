"""Tests figures of a plan: their formulas add up, and the picture shows what the plan says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from headrace.core.option import options
from headrace.engine.config import EngineConfig, default_on
from headrace.lab.plan.catalogue import Catalogue, read_catalogue
from headrace.lab.plan.chart import curve, write_chart
from headrace.lab.plan.plan import CapacityPlan, Figure, make_plan
from headrace.lab.plan.report import as_object, comparison, shown
from headrace.lab.plan.shapes import find_entry
from headrace.policy.placement.load import step_tokens
from headrace.policy.placement.need import Goals, Need, Traffic

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return read_catalogue()


def planned(
    catalogue: Catalogue, model: str, device: str, dtype: str = "bf16", *, num_devices: int | None = None, **traffic: float
) -> CapacityPlan:
    asked = Traffic(prompt_tokens=3072, output_tokens=1024, **traffic)  # type: ignore[arg-type]
    shape = find_entry(model, catalogue.models)[0]
    need = Need(
        model=shape,
        device=catalogue.device(device),
        dtype=dtype,
        kv_dtype="bf16",
        traffic=asked,
        num_devices=num_devices,
        compares_all=True,
    )
    return make_plan(need, catalogue.prices)


def milliseconds(formula: str) -> list[float]:
    return [float(term) for term in re.findall(r"([\d.]+) ms", formula)]


@pytest.mark.parametrize(
    ("model", "device", "dtype"),
    [("llama-3-8b", "h100", "bf16"), ("llama-3-8b", "a100", "fp8"), ("llama-3-70b", "h100", "fp8"), ("mixtral-8x7b", "l40s", "int8")],
)
@pytest.mark.parametrize("counts_prompts", [False, True])
def test_terms_of_a_formula_add_up_to_its_value(catalogue: Catalogue, model: str, device: str, dtype: str, counts_prompts: bool) -> None:
    plan = planned(catalogue, model, device, dtype, tokens_per_s=5000.0, counts_prompts=counts_prompts)
    figures = plan.figures
    assert ("ttft_p95_s" in figures) is counts_prompts
    for name in ("tpot_s", "ttft_s", *(["ttft_p95_s"] if counts_prompts else [])):
        assert sum(milliseconds(figures[name].formula)) == pytest.approx(figures[name].value * 1e3, abs=0.004), name
    whole, *terms = milliseconds(figures["prefill_tokens_per_s"].formula)
    assert sum(terms) == pytest.approx(whole, abs=0.004)
    assert 3072 / whole * 1e3 == pytest.approx(figures["prefill_tokens_per_s"].value, rel=1e-4)
    dollars = [float(term) for term in re.findall(r"\$([\d.]+)", figures["cost_per_1m_at_demand"].formula)]
    assert sum(dollars) == pytest.approx(figures["cost_per_1m_at_demand"].value, abs=2e-6)


def test_a_step_that_computes_longer_than_it_reads_says_so(catalogue: Catalogue) -> None:
    few, many = (planned(catalogue, "llama-3-8b", device, "fp8", num_devices=1).figures["tpot_s"].formula for device in ("h100", "a100"))
    assert "reading weights" in few
    assert "computing" in many
    assert "reading weights" not in many


def test_what_too_few_devices_cost_is_what_they_generate(catalogue: Catalogue) -> None:
    plan = planned(catalogue, "llama-3-8b", "h100", num_devices=1, tokens_per_s=1e6)
    assert not plan.is_met
    price = catalogue.device("h100").price_per_hour
    assert price is not None
    assert plan.dollars_per_hour == price
    devices = price / 3600 / plan.best.capacity_tokens_per_s * 1e6
    assert f"devices ${devices:.6f}" in plan.figures["cost_per_1m_at_demand"].formula


@pytest.mark.parametrize("device", ["h100", "l40s"])
@pytest.mark.parametrize("traffic", [{}, {"tokens_per_s": 3000.0, "counts_prompts": True}])
def test_bandwidth_alone_would_allow_more_than_the_plan_and_cost_less(catalogue: Catalogue, device: str, traffic: dict[str, float]) -> None:
    plan = planned(catalogue, "llama-3-8b", device, **traffic)  # type: ignore[arg-type]
    best, need = plan.best, plan.need
    context = 3072 + 512 if traffic else 4096
    read = need.model.read_bytes("bf16", best.batch) + best.batch * context * 131_072
    rate = best.replicas * best.batch * best.layout.num_devices * need.device.bytes_per_s / read
    assert plan.figures["bandwidth_tokens_per_s"].value == pytest.approx(rate)
    assert rate > best.capacity_tokens_per_s
    assert plan.figures["cost_per_1m_at_bandwidth"].value < plan.figures["cost_per_1m_at_capacity"].value
    assert plan.is_near_bandwidth is (rate <= 2 * best.capacity_tokens_per_s)
    word = "within" if plan.is_near_bandwidth else "not within"
    assert sum(f"the plan is {word} 2 times of that maximum" in note for note in plan.notes) == 1


def test_a_price_is_shown_with_its_source(catalogue: Catalogue) -> None:
    for device in ("a10g", "tpu-v5e"):
        plan, source = planned(catalogue, "llama-3-8b", device), catalogue.device(device).price_source
        assert f"({source})" in plan.figures["price_per_hour"].formula
        assert any(note.endswith(f"per hour: {source}.") for note in plan.notes)
        assert as_object(plan, "llama-3-8b")["price_source"] == source
        shown_lines = list(comparison([plan]))
        assert f"  Price of {device}: {source}." in shown_lines
        assert "  within 2x: the capacity is at least half of what memory bandwidth alone would allow." in shown_lines


@pytest.mark.parametrize(
    "traffic", [{}, {"tokens_per_s": 3000.0, "counts_prompts": True}, {"tokens_per_s": 3000.0, "user_tokens_per_s": 8.0}]
)
def test_the_planned_batch_is_a_point_of_the_curve(catalogue: Catalogue, traffic: dict[str, float]) -> None:
    plan = planned(catalogue, "llama-3-70b", "h100", **traffic)  # type: ignore[arg-type]
    batches, per_device, seconds = curve(plan)
    best = plan.best
    assert best.batch in batches
    before = max(index for index, batch in enumerate(batches) if batch <= max(1, best.load.running))
    after = min(before + 1, len(batches) - 1)
    assert seconds[before] <= plan.figures["tpot_s"].value <= seconds[after] * (1 + 1e-9)
    assert per_device[before] <= best.load.tokens_per_s / best.layout.num_devices * (1 + 1e-9)
    assert seconds == sorted(seconds)


@pytest.mark.process
def test_a_picture_has_a_line_and_a_dot_for_each_device(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("plot") / "plan.svg"
    write_chart(file, [planned(catalogue, "llama-3-8b", device) for device in ("h100", "l40s")])
    ElementTree.parse(file)
    text = file.read_text()
    for drawn in ("h100, TP", "l40s, TP", "TPOT (ms)", "Tokens/s per device"):
        assert f"<!-- {drawn}" in text, drawn
    assert len(set(re.findall(r"clip-path.*?stroke: (#[0-9a-f]{6}); stroke-width: 1.5", text))) == 2, "one colour for each device"


def test_what_a_plan_assumes_is_said(catalogue: Catalogue) -> None:
    shape = find_entry("llama-3-8b", catalogue.models)[0]
    traffic = Traffic(prompt_tokens=3072, output_tokens=1024)
    need = Need(model=shape, device=catalogue.device("a100"), dtype="fp8", kv_dtype="bf16", traffic=traffic, goals=Goals(ttft_p95_s=10.0))
    notes = "\n".join(make_plan(need, catalogue.prices).notes)
    assert "No queue of prompts is modelled here: ttft_p95 is the mean." in notes
    assert "has no fp8 products" in notes
    assert "65% of the FLOP/s" in notes
    counted = Traffic(prompt_tokens=3072, output_tokens=1024, tokens_per_s=100.0, counts_prompts=True)
    more = Need(model=shape, device=catalogue.device("h100"), dtype="fp8", kv_dtype="bf16", traffic=counted, goals=Goals(ttft_p95_s=10.0))
    notes = "\n".join(make_plan(more, catalogue.prices).notes)
    assert "No queue" not in notes
    assert "has no fp8" not in notes


def test_a_slow_rate_is_a_number_and_no_share() -> None:
    assert shown(Figure(0.0456, "tokens/s", "")) == "0.0456 tokens/s"
    assert shown(Figure(0.456, "", "")) == "46%"
    assert shown(Figure(1234.5, "tokens/s", "")) == "1,234 tokens/s"


def test_int4_beyond_what_was_measured_is_said(catalogue: Catalogue) -> None:
    few, many = (planned(catalogue, "llama-3-8b", "h100", "int4", tokens_per_s=rate, num_devices=1) for rate in (100.0, 8000.0))
    said = "INT4 beyond 32 sequences at a time was measured slower"
    assert said not in "\n".join(few.notes)
    assert said in "\n".join(many.notes)


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("h100", "cuda")])
def test_steps_are_as_long_as_an_engine_makes_them(catalogue: Catalogue, device: str, kind: str) -> None:
    need = planned(catalogue, "mistral-7b", device, num_devices=1).need
    assert step_tokens(need) == default_on(kind, dict(options(EngineConfig))["max_num_batched_tokens"])
