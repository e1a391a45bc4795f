"""Tests the rules beside which the autoscaler is measured, the chart's against the chart, and the page's table against its record."""

from __future__ import annotations

import json

import pytest
from helm_kit import example, rendered

from bench import scaling
from bench.harness import RESULTS, block_of
from bench.scaling_rules import HorizontalPodAutoscaler, KedaChartRule, KedaWaitingRule
from headrace.lab.simulate.scaling import ScalingPolicy
from headrace.policy.scaling.autoscaler import ScalingFacts

pytestmark = pytest.mark.pure

SYNC_S = HorizontalPodAutoscaler.SYNC_S


def facts(*, running: int = 0, waiting: int = 0, age_s: float = 0.0) -> ScalingFacts:
    return ScalingFacts(num_serving=1, num_arrived=0, num_finished=0, num_tokens=0, num_running=running, num_waiting=waiting, age_s=age_s)


def numbers(policy: ScalingPolicy, seen: ScalingFacts, begin_s: float, end_s: float) -> list[int]:
    """After each time that the HPA asks."""
    return [policy.decide(seen, begin_s + SYNC_S * step).num_replicas for step in range(int((end_s - begin_s) / SYNC_S))]


def test_the_rule_of_the_chart_has_the_charts_values() -> None:
    spec = rendered(example("gpu"))["ScaledObject"]["spec"]
    [trigger] = spec["triggers"]
    assert trigger["metadata"]["query"].count("sum(") == 2
    assert "requests_running" in trigger["metadata"]["query"]
    assert "requests_waiting" in trigger["metadata"]["query"]
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert spec["fallback"]["failureThreshold"] == KedaChartRule.FAILURE_THRESHOLD
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
    removal = {"type": "Pods", "value": KedaChartRule.MAX_REMOVED, "periodSeconds": HorizontalPodAutoscaler.REMOVAL_S}
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == {"scaleDown": {"stabilizationWindowSeconds": KedaChartRule.STABILIZATION_S, "policies": [removal]}}


def test_the_chart_counts_what_runs_and_the_other_rule_what_waits() -> None:
    seen = facts(running=40, waiting=3)
    assert numbers(KedaChartRule(12, 1, 16), seen, 0, 30)[-1] == 4
    assert numbers(KedaWaitingRule(3, 1, 16), seen, 0, 30)[-1] == 1


def test_replicas_double_or_grow_by_four_and_a_little_more_changes_nothing() -> None:
    assert numbers(KedaWaitingRule(1, 1, 100), facts(waiting=60), 0, 90) == [5, 10, 20, 40, 60, 60]
    assert numbers(KedaWaitingRule(1, 20, 100), facts(waiting=21), 0, 30) == [20, 20]


def test_one_pod_of_the_chart_goes_each_minute_after_ten_minutes() -> None:
    policy = KedaChartRule(12, 1, 16)
    numbers(policy, facts(running=60), 0, 30)
    found = numbers(policy, facts(), 30, 960)
    assert [found.index(count) * SYNC_S + 30 for count in (4, 3, 2, 1)] == [630, 690, 750, 810]


def test_all_go_at_once_where_waiting_requests_are_counted() -> None:
    policy = KedaWaitingRule(1, 0, 16)
    numbers(policy, facts(waiting=5), 0, 30)
    found = numbers(policy, facts(), 30, 400)
    assert set(found) == {5, 0}
    assert found.index(0) * SYNC_S + 30 == 330


def test_without_reports_the_chart_keeps_its_pods_and_the_other_rule_counts_none() -> None:
    chart, other = KedaChartRule(12, 1, 16), KedaWaitingRule(3, 1, 16)
    for policy in (chart, other):
        numbers(policy, facts(running=48, waiting=12), 0, 60)
    blind = facts(age_s=1.0)
    assert set(numbers(chart, blind, 60, 3600)) == {5}
    assert numbers(other, blind, 60, 3600)[-1] == 1


def test_the_chart_never_goes_to_zero() -> None:
    assert numbers(KedaChartRule(12, 0, 16), facts(), 0, 1800)[-1] == 1


def test_the_page_has_the_table_of_its_record() -> None:
    recorded = json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))
    assert not recorded["environment"]["commit"].endswith("+")
    assert block_of(scaling.PAGE, scaling.BLOCK_NAME) == scaling.markdown(recorded["runs"])
