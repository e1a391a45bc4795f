"""Debian's Prometheus scrapes a deployment, loads the shipped rules, and answers every expression of the shipped dashboards."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clickhouse_kit import free_port
from patience import until
from server_kit import Server

from tools.dashboards import DASHBOARDS

PROMETHEUS = shutil.which("prometheus")
RULES = Path(__file__).parents[2] / "deploy" / "prometheus"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed: run `make servers`"),
]

WITHOUT_SERIES = ("GPU", "Budgets", "Resumed", "Refused", "Limits", "Foreign", "Lost", "Usage records that wait")
"""Beginnings of the panels that show nothing of a healthy machine without a GPU, budgets, refusals, foreign servers and a ledger."""


class Prometheus:
    def __init__(self, folder: Path, target_port: int) -> None:
        self.port = free_port()
        scraped = {"job_name": "headrace", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES / "recording.yaml"), str(RULES / "alerts.yaml")],
            "scrape_configs": [scraped],
        }
        (folder / "prometheus.yaml").write_text(json.dumps(config))
        files = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with open(folder / "log", "wb") as log:
            address = f"--web.listen-address=127.0.0.1:{self.port}"
            assert PROMETHEUS is not None
            self.process = subprocess.Popen([PROMETHEUS, *files, address], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def get(self, path: str, **query: str) -> Any:
        """None while it starts."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        except OSError:
            return None

    def series(self, expression: str) -> list[dict[str, Any]]:
        data = self.get("query", query=expression)
        return [] if data is None else list(data["result"])


@pytest.fixture(scope="module")
def prometheus(pair: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), pair.port)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


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
