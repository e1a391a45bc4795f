"""Writes the dashboards of deploy/grafana and deploy/datadog from one table of panels.

    python tools/dashboards.py            # after a change of the table; a test fails where a file has another content

Grafana gets its classic JSON, which Grafana 13 migrates by itself. Datadog gets the same panels where its query language has a counterpart
of the expression: its agent reads /metrics (deploy/datadog/openmetrics.yaml) and renames `headrace_x` to `headrace.x`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"

WIDTH, HEIGHT = 8, 8
"""Of a panel in Grafana's grid, which is 24 wide."""

M = '{model=~"$model"}'
BY_MODEL, BY_REPLICA = "{{model}}", "{{model}} {{replica}}"


@dataclass(frozen=True, slots=True)
class Line:
    """One expression of a panel. datadog: the same as a query of Datadog; empty: it has no counterpart"""

    expr: str
    legend: str
    datadog: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """unit: a unit of Grafana; highest: upper end of the axis, where there is one"""

    title: str
    unit: str
    lines: Sequence[Line]
    text: str = ""
    highest: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[tuple[str, str]] = (("model", "label_values(headrace_replica_ready, model)"),)


def dotted(metric: str) -> str:
    return metric.replace("headrace_", "headrace.", 1)


def latency(title: str, metric: str, text: str = "") -> Panel:
    lines = [
        Line(
            f"histogram_quantile({share}, sum by (model, le) (rate({metric}_bucket{M}[$__rate_interval])))",
            f"{BY_MODEL} {name}",
            f"{name}:{dotted(metric)}{{$model}} by {{model}}",
        )
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]
    return Panel(title, "s", lines, text)


def rates(title: str, metric: str, by: str, text: str = "", *, unit: str = "reqps", where: str = "") -> Panel:
    """A counter of the gateways, by labels: each gateway and worker counts its own. metric: without `_total`"""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    query = f"sum:{dotted(metric)}.count{{{'$model' if where else '*'}}} by {{{by.replace(' ', '')}}}.as_rate()"
    return Panel(title, unit, [Line(f"sum by ({by}) (rate({metric}_total{where}[$__rate_interval]))", legend, query)], text)


def engine(metric: str) -> str:
    """An engine's number. Every gateway shows it alike: the largest is the number, not the sum."""
    return f"max by (model, replica) ({metric}{M})"


def engine_rate(metric: str) -> str:
    return f"max by (model, replica) (rate({metric}{M}[$__rate_interval]))"


def engine_rates(title: str, metric: str, text: str = "") -> Panel:
    query = f"max:{dotted(metric)}.count{{$model}} by {{model,replica}}.as_rate()"
    return Panel(title, "short", [Line(engine_rate(f"{metric}_total"), BY_REPLICA, query)], text)


def gauges(title: str, unit: str, *metrics: str, text: str = "", highest: float | None = None) -> Panel:
    """Gauges of the engines. metrics: each with what its legend adds behind a colon, where there are several"""
    lines = []
    for metric, _, word in (each.partition(":") for each in metrics):
        lines.append(Line(engine(metric), f"{BY_REPLICA} {word}".strip(), f"max:{dotted(metric)}{{$model}} by {{model,replica}}"))
    return Panel(title, unit, lines, text, highest)


def site_gauge(title: str, unit: str, metric: str, by: str, text: str = "", *, how: str = "sum") -> Panel:
    query = f"{how}:{dotted(metric)}{{*}} by {{{by}}}"
    return Panel(title, unit, [Line(f"{how} by ({by}) ({metric})", f"{{{{{by}}}}}", query)], text)


def share(title: str, part: str, whole: str, legend: str = BY_REPLICA, text: str = "") -> Panel:
    """Expressions whose quotient Datadog's agent cannot see as one metric."""
    return Panel(title, "percentunit", [Line(f"{part} / {whole}", legend)], text, 1)


FAILED, ANSWERED = 'outcome=~"failed|deadline"', 'outcome!~"refused|cancelled"'
STEP_SECONDS = f"({engine_rate('headrace_step_seconds_sum')} > 0)"


def outcome_rate(outcome: str) -> str:
    return f'sum by (model) (rate(headrace_requests_total{{{outcome},model=~"$model"}}[$__rate_interval]))'


SERVICE = (
    rates("Requests by outcome", "headrace_requests", "outcome", where=M),
    share(
        "Failed share",
        f"({outcome_rate(FAILED)} or 0 * {outcome_rate(ANSWERED)})",  # the series of failures begins with the first one
        f"({outcome_rate(ANSWERED)} > 0)",
        BY_MODEL,
        "Of the requests that the server had to answer: refused and cancelled ones are left out.",
    ),
    site_gauge("Ready replicas", "short", "headrace_replica_ready", "model"),
    Panel("Open requests", "short", [Line("sum(headrace_gateway_requests_open)", "open", "sum:headrace.gateway_requests_open{*}")]),
    rates("Answers by status", "headrace_http_responses", "status"),
    rates("Resumed sequences", "headrace_sequences_resumed", "model, replica", "After the loss of their engine.", where=M),
)

LATENCY = (
    latency("Time to first token", "headrace_time_to_first_token_seconds", "Arrival at the gateway to the first token."),
    latency("Time per output token", "headrace_time_per_output_token_seconds", "(last - first token) / (tokens - 1) of a sequence."),
    latency("Gaps between tokens", "headrace_inter_token_latency_seconds"),
    latency("Whole request", "headrace_request_latency_seconds", "Arrival to the end of the answer."),
    latency("Queue of the engine", "headrace_queue_time_seconds", "Arrival at the engine to the first step."),
    latency("Step", "headrace_step_seconds", "Duration of an engine's step."),
)

ENGINES = (
    gauges(
        "Running and waiting sequences",
        "short",
        "headrace_requests_running:running",
        "headrace_requests_waiting:waiting",
        "headrace_requests_running_highest:highest",
    ),
    engine_rates("Output tokens per second", "headrace_generation_tokens"),
    engine_rates("Prompt tokens per second", "headrace_prompt_tokens"),
    share(
        "KV blocks in use",
        'max by (model, replica) (headrace_kv_blocks{state="used",model=~"$model"})',
        'sum by (model, replica) (max by (model, replica, state) (headrace_kv_blocks{model=~"$model"}))',
    ),
    share(
        "Prompt tokens from the prefix cache",
        engine_rate("headrace_prefix_cache_hit_tokens_total"),
        f"({engine_rate('headrace_prefix_cache_query_tokens_total')} > 0)",
    ),
    engine_rates("Preemptions", "headrace_preemptions", "Sequences that lost their KV blocks, a second."),
    share(
        "Drafted tokens that were right",
        engine_rate("headrace_spec_decode_accepted_tokens_total"),
        f"({engine_rate('headrace_spec_decode_draft_tokens_total')} > 0)",
    ),
    share(
        "Steps not overlapped for drafts",
        engine_rate("headrace_spec_decode_steps_not_overlapped_total"),
        f"({engine_rate('headrace_steps_total')} > 0)",
        text="No step is planned beside one in flight while speculation is on; with `depth` 1 none ever is, and none counts.",
    ),
    share(
        "Tokens at the hottest expert",
        engine_rate("headrace_hottest_expert_tokens_total"),
        f"({engine_rate('headrace_expert_tokens_total')} > 0)",
        text="Of a layer's tokens, in the layer where it is most. 1 / number of experts would be even.",
    ),
    engine_rates("Adapters read", "headrace_adapter_reads", "LoRA adapters that were not in the engine's memory, a second."),
)

UTILISATION = (
    share(
        "Memory bandwidth (MBU)",
        engine_rate("headrace_read_bytes_total"),
        f"{STEP_SECONDS} / {engine('headrace_peak_read_bytes_per_second')}",
        text="Bytes that steps must read, over the time of the steps and the device's read bandwidth.",
    ),
    share(
        "Arithmetic (MFU)",
        engine_rate("headrace_flops_total"),
        f"{STEP_SECONDS} / {engine('headrace_peak_flops_per_second')}",
        text="Multiplications and additions of the model, over the time of the steps and the device's peak.",
    ),
    engine_rates("Cores in use by engines", "headrace_engine_cpu_seconds"),
    gauges("Memory of engines", "bytes", "headrace_engine_resident_bytes"),
    gauges("GPU in use", "percentunit", "headrace_gpu_utilization_ratio", text="As nvidia-smi's utilization.gpu.", highest=1),
    gauges("GPU memory", "bytes", "headrace_gpu_memory_used_bytes:used", "headrace_gpu_memory_total_bytes:total"),
)

GATEWAY = (
    latency("Lateness of the event loop", "headrace_gateway_loop_lag_seconds"),
    latency("Waits for stores", "headrace_store_wait_seconds", "What a request waited for all stores together."),
    Panel(
        "Cores in use by gateways",
        "short",
        [
            Line(
                "sum(rate(headrace_gateway_cpu_seconds_total[$__rate_interval]))",
                "cores",
                "sum:headrace.gateway_cpu_seconds.count{*}.as_rate()",
            )
        ],
    ),
    Panel("Memory of gateways", "bytes", [Line("sum(headrace_gateway_resident_bytes)", "bytes", "sum:headrace.gateway_resident_bytes{*}")]),
    site_gauge("Held prompts and answers", "bytes", "headrace_gateway_held_bytes", "of"),
    site_gauge("Usage records that wait", "bytes", "headrace_usage_waiting_bytes", "sink", how="max"),
    rates("Lost usage records", "headrace_usage_dropped", "reason", unit="short"),
    rates("Foreign servers: results", "headrace_upstream_attempts", "model, replica, result", where=M),
)

SITE = Dashboard(
    "headrace",
    "Headrace",
    (("Service", SERVICE), ("Latency", LATENCY), ("Engines", ENGINES), ("Utilisation", UTILISATION), ("Gateway", GATEWAY)),
)


def use_by(of: str) -> tuple[Panel, ...]:
    """What tenants, tiers or models use."""
    prefix, legend = f"headrace_{of}_", f"{{{{{of}}}}}"
    currency = "In the currency of the configuration's prices."
    return (
        Panel(
            f"Cost per hour by {of}",
            "short",
            [Line(f"sum by ({of}) (rate({prefix}cost_total[$__rate_interval])) * 3600", legend)],
            currency,
        ),
        Panel(f"Cost of the last 24 hours by {of}", "short", [Line(f"sum by ({of}) (increase({prefix}cost_total[1d]))", legend)], currency),
        rates(f"Requests by {of}", f"{prefix}requests", of),
        rates(f"Tokens by {of}", f"{prefix}tokens", f"{of}, kind", "A second; cached is a part of input.", unit="short"),
        rates(f"Refused by {of}", f"{prefix}refused", f"{of}, code"),
        rates(f"Limits that refused by {of}", f"{prefix}limited", f"{of}, limit"),
    )


OUTPUT = '(sum by (model) (rate(headrace_model_tokens_total{kind="output"}[$__rate_interval])) > 0)'
BUDGETS = (
    share("Budgets in use", "max by (limit) (headrace_budget_used)", "max by (limit) (headrace_budget)", "{{limit}}"),
    Panel(
        "Cost of a million output tokens",
        "short",
        [Line(f"1e6 * sum by (model) (rate(headrace_model_cost_total[$__rate_interval])) / {OUTPUT}", BY_MODEL)],
        "All money that is charged, over the output tokens.",
    ),
)

USE = Dashboard(
    "headrace-use",
    "Headrace: cost and use",
    (("Site", BUDGETS), *((f"By {of}", use_by(of)) for of in ("tenant", "tier", "model"))),
    variables=(),
)

DASHBOARDS = (SITE, USE)


def grafana(dashboard: Dashboard) -> dict[str, object]:
    panels: list[dict[str, object]] = []
    y = 0
    for row, of_row in dashboard.rows:
        panels.append(
            {
                "type": "row",
                "title": row,
                "collapsed": False,
                "panels": [],
                "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        for number, panel in enumerate(of_row):
            place = {"x": number % 3 * WIDTH, "y": y + number // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({**_grafana_panel(panel), "id": len(panels) + 1, "gridPos": place})
        y += -(-len(of_row) // 3) * HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    variables = [
        {
            "name": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": query,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        for name, query in dashboard.variables
    ]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["headrace"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _grafana_panel(panel: Panel) -> dict[str, object]:
    axis: dict[str, object] = {"unit": panel.unit, "min": 0} | ({} if panel.highest is None else {"max": panel.highest})
    targets = [
        {"refId": chr(ord("A") + number), "expr": line.expr, "legendFormat": line.legend, "datasource": _SOURCE}
        for number, line in enumerate(panel.lines)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": axis, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def datadog(dashboard: Dashboard) -> dict[str, object]:
    groups = []
    for row, panels in dashboard.rows:
        widgets = [widget for panel in panels if (widget := _datadog_widget(panel)) is not None]
        if widgets:
            groups.append({"definition": {"type": "group", "layout_type": "ordered", "title": row, "widgets": widgets}})
    variables = [{"name": name, "prefix": name, "available_values": [], "default": "*"} for name, _ in dashboard.variables]
    return {"title": dashboard.title, "layout_type": "ordered", "template_variables": variables, "widgets": groups}


def _datadog_widget(panel: Panel) -> dict[str, object] | None:
    queries = [line.datadog for line in panel.lines if line.datadog]
    if not queries:
        return None
    requests = [
        {
            "response_format": "timeseries",
            "display_type": "line",
            "queries": [{"data_source": "metrics", "name": "a", "query": query}],
            "formulas": [{"formula": "a"}],
        }
        for query in queries
    ]
    return {"definition": {"type": "timeseries", "title": panel.title, "show_legend": True, "requests": requests}}


def files() -> dict[Path, str]:
    """Path -> content of every file that this program writes."""
    made = {DEPLOY / "grafana" / f"{dashboard.uid}.json": grafana(dashboard) for dashboard in DASHBOARDS}
    made |= {DEPLOY / "datadog" / f"{dashboard.uid}.json": datadog(dashboard) for dashboard in DASHBOARDS}
    return {path: json.dumps(content, indent=1) + "\n" for path, content in made.items()}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(DEPLOY.parent))
