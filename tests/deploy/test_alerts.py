"""Each alert of deploy/prometheus fires on its fault and is silent without it, by Prometheus' own rule tests on virtual time."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")

R = 'model="m",replica="m-0"'


@dataclass(frozen=True)
class Fault:
    """Series by the minute, in promtool's notation. silent: the same series in a healthy site"""

    at: str
    firing: dict[str, str]
    silent: dict[str, str]


def slow(metric: str, bounds: tuple[str, ...], slow_from: str) -> dict[str, str]:
    """A histogram to which each minute adds ten observations, all of them above `slow_from`."""
    reached = False
    series = {}
    for bound in bounds:
        series[f'{metric}_bucket{{{R},le="{bound}"}}'] = "0+10x120" if reached else "0+0x120"
        reached = reached or bound == slow_from
    return series


def swing(high: int, low: int) -> str:
    return " ".join(f"{high} {low}" for _ in range(15))


def outcomes(failed: int, done: int, minutes: int = 500) -> dict[str, str]:
    return {
        f'headrace_requests_total{{{R},outcome="failed"}}': f"0+{failed}x{minutes}",
        f'headrace_requests_total{{{R},outcome="stop"}}': f"0+{done}x{minutes}",
    }


TTFT = ("0.25", "0.5", "1", "2.5", "5", "+Inf")
TPOT = ("0.025", "0.05", "0.1", "0.5", "+Inf")

FAULTS = {
    "HeadraceTtftHigh": Fault(
        "30m",
        slow("headrace_time_to_first_token_seconds", TTFT, "1"),
        slow("headrace_time_to_first_token_seconds", TTFT, "0.25"),
    ),
    "HeadraceTpotHigh": Fault(
        "30m",
        slow("headrace_time_per_output_token_seconds", TPOT, "0.05"),
        slow("headrace_time_per_output_token_seconds", TPOT, "0.025"),
    ),
    "HeadraceErrorsHigh": Fault("30m", outcomes(2, 98), outcomes(0, 98)),
    "HeadraceErrorBudgetFastBurn": Fault("90m", outcomes(10, 90), outcomes(1, 99)),
    "HeadraceErrorBudgetSlowBurn": Fault("420m", outcomes(4, 96), outcomes(1, 99)),
    "HeadraceNoReadyReplica": Fault("10m", {f"headrace_replica_ready{{{R}}}": "1 1 0x30"}, {f"headrace_replica_ready{{{R}}}": "1x30"}),
    "HeadraceGatewayDown": Fault("10m", {'up{job="headrace",instance="g"}': "1 1 0x30"}, {'up{job="headrace",instance="g"}': "1x30"}),
    "HeadraceQueueLong": Fault("10m", {f"headrace_requests_waiting{{{R}}}": swing(30, 5)}, {f"headrace_requests_waiting{{{R}}}": "10x30"}),
    "HeadraceKvCacheFull": Fault(
        "20m",
        {f'headrace_kv_blocks{{{R},state="{state}"}}': swing(*counts) for state, counts in (("used", (95, 60)), ("free", (5, 40)))},
        {f'headrace_kv_blocks{{{R},state="{state}"}}': f"{count}x30" for state, count in (("used", 50), ("cached", 50), ("free", 0))},
    ),
    "HeadracePreemptions": Fault(
        "20m", {f"headrace_preemptions_total{{{R}}}": "0+12x30"}, {f"headrace_preemptions_total{{{R}}}": "0+1x30"}
    ),
    "HeadraceGpuIdle": Fault(
        "120m",
        {f"headrace_gpu_utilization_ratio{{{R}}}": "0.2x120"} | outcomes(0, 5),
        {f"headrace_gpu_utilization_ratio{{{R}}}": "0.2x120"} | outcomes(0, 0),  # nobody asks, so that idling is right
    ),
    "HeadraceRequestLogLoss": Fault(
        "4m", {'headrace_request_log_dropped{instance="g"}': "0 0 5x30"}, {'headrace_request_log_dropped{instance="g"}': "5x30"}
    ),
    "HeadraceUsageLoss": Fault(
        "6m", {'headrace_usage_dropped_total{reason="disk"}': "0 0 1 2 3x30"}, {'headrace_usage_dropped_total{reason="disk"}': "3x30"}
    ),
    "HeadraceUsageLag": Fault(
        "20m", {'headrace_usage_waiting_bytes{sink="kafka"}': "30000000x30"}, {'headrace_usage_waiting_bytes{sink="kafka"}': "1000x30"}
    ),
    "HeadraceBudgetNearlyUsed": Fault(
        "5m",
        {'headrace_budget{limit="l"}': "100x30", 'headrace_budget_used{limit="l"}': "95x30"},
        {'headrace_budget{limit="l"}': "100x30", 'headrace_budget_used{limit="l"}': "50x30"},
    ),
}


def alerts() -> list[str]:
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


@pytest.mark.pure
def test_every_alert_has_a_fault() -> None:
    assert sorted(FAULTS) == sorted(alerts())


@pytest.mark.process
@pytest.mark.skipif(PROMTOOL is None, reason="Prometheus is not installed: run `make servers`")
def test_alerts_fire_on_their_faults_alone(tmp_path: Path) -> None:
    cases = [case_of(name, fault, is_firing=is_firing) for name, fault in FAULTS.items() for is_firing in (True, False)]
    rules = [str(RULES / "recording.yaml"), str(RULES / "alerts.yaml")]
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": rules, "evaluation_interval": "1m", "tests": cases}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def case_of(name: str, fault: Fault, *, is_firing: bool) -> dict[str, object]:
    series = fault.firing if is_firing else fault.silent
    query = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
    return {
        "name": f"{name}, {'fault' if is_firing else 'healthy'}",
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": fault.at, "exp_samples": [{"labels": "{}", "value": 1}] if is_firing else []}],
    }
