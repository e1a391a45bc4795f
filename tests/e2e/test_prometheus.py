"""Debian's Prometheus scrapes a deployment, loads the shipped rules, and answers every expression of the shipped dashboards."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from patience import until
from prometheus_kit import MISSING, PROGRAM, Prometheus
from server_kit import Server

from tools.dashboards import DASHBOARDS

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
]

WITHOUT_SERIES = (
    "GPU",
    "Tokens at the hottest expert",
    "Drafted",
    "Budgets",
    "Resumed",
    "Refused",
    "Limits",
    "Foreign",
    "Lost",
    "Usage records that wait",
)
"""Beginnings of the panels that show nothing of a healthy machine without a GPU, speculation, budgets, refusals, foreign servers and a
ledger."""


@pytest.fixture(scope="module")
def prometheus(pair: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), pair.port)
    try:
        yield started
    finally:
        started.stop()


def ask(server: Server) -> None:
    body = json.dumps({"model": "pair", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def test_every_panel_and_rule_works_on_a_live_deployment(pair: Server, prometheus: Prometheus) -> None:
    def has_rates() -> bool:
        ask(pair)
        return all(map(prometheus.series, ("rate(headrace_requests_total[5m]) > 0", "headrace:mbu:ratio5m > 0")))

    until(has_rates)
    for dashboard in DASHBOARDS:
        for _, panels in dashboard.rows:
            for panel in panels:
                for line in panel.lines:
                    series = prometheus.series(line.expr.replace("$__rate_interval", "5m").replace("$model", ".*"))
                    assert series or panel.title.startswith(WITHOUT_SERIES), f"{panel.title}: {line.expr}"
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert rules
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
