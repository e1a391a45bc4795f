"""Tests replicas that stand by: counted and priced apart from the plan."""

from __future__ import annotations

import pytest

from headrace.lab.plan.catalogue import read_catalogue
from headrace.lab.plan.plan import CapacityPlan, Standby, make_plan
from headrace.policy.placement.need import Need, Traffic
from tools.plan_sizings import shape

pytestmark = pytest.mark.pure


def planned(standby: Standby) -> CapacityPlan:
    catalogue = read_catalogue()
    traffic = Traffic(prompt_tokens=1536, output_tokens=512, tokens_per_s=30_000.0, user_tokens_per_s=30.0)
    model, device = shape(catalogue, "llama-70b"), catalogue.device("h100")
    need = Need(model=model, device=device, dtype="fp16", kv_dtype="fp16", traffic=traffic, compares_all=True)
    return make_plan(need, catalogue.prices, standby=standby)


def test_replicas_that_stand_by_are_counted_and_priced_apart() -> None:
    none, two = planned(Standby()), planned(Standby(2))
    price = two.need.device.price_per_hour
    assert price is not None
    assert two.figures["standby_replicas"].value == 2
    assert two.figures["standby_per_hour"].value == pytest.approx(2 * 4 * price)
    assert {name: figure for name, figure in two.figures.items() if not name.startswith("standby")} == none.figures
    assert two.placements == none.placements


def test_without_one_a_plan_says_how_long_a_spike_waits() -> None:
    plan = planned(Standby())
    assert plan.figures["load_s"].value == pytest.approx(89, abs=0.5)
    assert plan.figures["load_s"].formula == "20 s to start (assumed) + 138.0 GB of weights / 2 GB/s (assumed, --load-gbps sets it)"
    assert any("No replica stands by: a spike of one replica beyond capacity waits an assumed 89 s" in note for note in plan.notes)
    fast = planned(Standby(load_bytes_per_s=14e9))
    assert any("waits an assumed 30 s" in note for note in fast.notes)
    assert not any("No replica stands by" in note for note in planned(Standby(1)).notes)
