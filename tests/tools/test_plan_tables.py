"""Tests that the tables of the planning pages are those that the planner computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.lab.plan.catalogue import read_catalogue
from headrace.policy.placement.layout import choose_layout
from headrace.policy.placement.need import Goals, Link, Need, Traffic
from headrace.policy.placement.roofline import Layout, Roofline
from tools.plan_sizings import known_sizings, shape
from tools.plan_tables import LOADS, PAGES, PLACE, ROOT, SUMS, TABLES, fit_link, measured, measured_sums, with_tables

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_that_the_planner_computes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(text, read_catalogue()), "python -m tools.plan_tables writes them"


def test_every_table_has_its_place() -> None:
    placed = [found[2] for page in PAGES for found in PLACE.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(placed) == sorted(TABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count("\n") <= 120


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def dollars(cell: str) -> float:
    return float(cell.strip("$").replace(",", ""))


def test_tokens_of_a_design_load_are_paid_by_the_mean_rate() -> None:
    rows = [cells(row) for row in list(TABLES["loads"](read_catalogue()))[2:]]
    tokens_of_an_hour = {"1,000 requests/s": 1000 * 200 * 3600, "1M requests a day": 1e6 * 200 / 24}
    for label, *_, hourly, cost, _ in rows:
        tokens = next(tokens for name, tokens in tokens_of_an_hour.items() if label.startswith(name))
        egress = 250 * 1e6 / 1e9 * 0.09
        assert dollars(cost) == pytest.approx(dollars(hourly) / tokens * 1e6 + egress, abs=0.01), label


def test_the_first_device_of_a_design_load_is_the_cheapest_of_all() -> None:
    catalogue = read_catalogue()
    rows = [cells(row) for row in list(TABLES["loads"](catalogue))[2:]]
    for label, model, peak, _ in LOADS:
        traffic = Traffic(prompt_tokens=500, output_tokens=200, tokens_per_s=peak * 200, counts_prompts=True)
        found = {}
        for device in catalogue.devices.values():
            need = Need(
                model=shape(catalogue, model),
                device=device,
                dtype="fp16",
                kv_dtype="fp16",
                traffic=traffic,
                goals=Goals(tpot_s=0.05),
                compares_all=True,
            )
            best = choose_layout(need)[0]
            if device.is_served and best.price_per_hour is not None and not best.reason:
                found[device.name] = round(best.price_per_hour, 2)
        shown = [(row[1], dollars(row[5])) for row in rows if row[0] == label]
        assert shown == sorted(found.items(), key=lambda item: item[1])[:2]


def test_the_fit_finds_a_link_again() -> None:
    link = Link("wire", 25e9, 3e-6, 2)
    assert fit_link([(size, link.all_reduce_s(2, size)) for size in (1_000, 100_000, 10_000_000)]) == pytest.approx(
        (link.latency_s, link.bytes_per_s)
    )


def test_the_link_of_cpus_is_the_fit_of_the_record_that_it_names() -> None:
    link = read_catalogue().device("cpu").link
    latency_s, bytes_per_s = fit_link(measured_sums())
    assert (round(latency_s * 1e6, 1), round(bytes_per_s / 1e9, 1)) == (link.latency_s * 1e6, link.bytes_per_s / 1e9)
    assert link.source.endswith("/".join(SUMS.parts[-2:]))
    for size, seconds in measured_sums():
        assert link.all_reduce_s(2, size) == pytest.approx(seconds, rel=0.16), size


def shares_of_collectives(tp: int) -> list[float]:
    catalogue = read_catalogue()
    steps = [
        (Roofline(shape(catalogue, model), catalogue.device(device), Layout(tp), "bf16", "bf16"), batch)
        for model in ("mistral-7b", "llama-3-8b")
        for device in ("l40s", "rtx4090", "a10g")
        for batch in (1, 16, 64)
    ]
    return [latency.collectives_s(batch) / latency.decode_s(batch, 2048) for latency, batch in steps]


def test_what_all_reduces_cost_without_nvlink_is_what_the_planner_computes() -> None:
    two, four = shares_of_collectives(2), shares_of_collectives(4)
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert f"{100 * min(two):.0f} to {100 * max(two):.0f} % of a step over two cards" in text
    assert f"over two cards, {100 * min(four):.0f} to {100 * max(four):.0f} % over four" in text


def test_rates_of_7b_on_one_a100_are_those_of_the_page() -> None:
    catalogue = read_catalogue()
    rates = []
    for context in (2048, 512):
        traffic = Traffic(prompt_tokens=context * 3 // 4, output_tokens=context // 4)
        model, device = shape(catalogue, "llama-2-7b"), catalogue.device("a100")
        need = Need(model=model, device=device, dtype="fp16", kv_dtype="fp16", traffic=traffic, goals=Goals(tpot_s=0.05), num_devices=1)
        rates.append(choose_layout(need)[0].capacity_tokens_per_s)
    text = " ".join((ROOT / "docs" / "sizings.md").read_text(encoding="utf-8").split())
    assert f"the planner gives {round(rates[0], -2):,.0f} at 2K of context and {round(rates[1], -2):,.0f} at 512 tokens" in text


def test_ratios_of_the_pages_are_those_of_the_tables() -> None:
    catalogue = read_catalogue()
    found = {row.question: row.found for row in known_sizings(catalogue)}
    assert found["H100 against A100"] == "decoding 1.64 x, prompts 3.1 x; FP8 prompts 4.6 x"
    assert found["A token of 70B against one of 8B, on H100"] == "4.5 x; with prompts 9.0 x"
    assert "TP 8 x PP 2" in found["Weights, 405B fp16, and what they fit on"], "more than the 8 cards of common texts"
    rates = {(dtype, streams): rate for dtype, streams, rate in measured()}
    gains = [rates["fp8", streams] / rates["bf16", streams] for streams in (1, 8, 32, 128, 256)]
    text = " ".join((ROOT / "docs" / "sizings.md").read_text(encoding="utf-8").split())
    assert f"{min(gains):.1f} to {max(gains):.1f} x to decoding" in text
    assert 1.4 < rates["fp8", 0] / rates["bf16", 0] < 1.65
    for ratio in ("1.64 x", "4.5 x", "4.6"):
        assert any(ratio in page.read_text(encoding="utf-8") for page in PAGES), ratio


def test_planned_rates_are_near_the_measured_ones() -> None:
    catalogue = read_catalogue()
    rows = [cells(row) for row in list(TABLES["fit"](catalogue))[2:]]
    assert len(rows) == len(list(measured())) == 18
    for dtype, streams, _, _, share in rows:
        if dtype != "int4" or streams in ("prefill of 2,048", "1", "8", "32"):  # the page says what happens above
            assert 0.81 < float(share) < 1.2, (dtype, streams)
