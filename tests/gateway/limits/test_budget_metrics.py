"""Tests the deployment's budget on the metrics page."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import TestBench, metric, open_bench
from scripted_store import script_limits

from headrace.gateway.limits.limiter import BUDGET_READ_S, CARRY_S
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

PRICES = {"fox": {"output": 1000}}  # 0.001 for each token


def shown(bench: TestBench, limit: str = "deployment_daily_budget") -> tuple[float, float]:
    """The budget, and what is used of it; 0 where there is no series."""
    return metric(bench.gateway, "headrace_budget", limit=limit), metric(bench.gateway, "headrace_budget_used", limit=limit)


async def read_again() -> None:
    """Until each gateway has charged what ended, and has read the budget since."""
    await asyncio.sleep(CARRY_S + BUDGET_READ_S)


async def test_what_is_reserved_and_used_is_shown(text: TextModel) -> None:
    async with open_bench(text, prices=PRICES, limits={"daily_budget": 0.5, "monthly_budget": 2.0}) as bench:
        await read_again()
        assert shown(bench) == (0.5, 0.0)
        bench.replica.go.clear()
        running = asyncio.create_task(bench.chat(max_tokens=90))
        await read_again()
        assert shown(bench) == (0.5, 0.09)
        bench.replica.go.set()
        tokens = (await running).json()["usage"]["completion_tokens"]
        assert tokens < 90
        await read_again()
        assert shown(bench) == (0.5, tokens / 1000)


async def test_two_gateways_of_one_store_show_the_same_sum(text: TextModel, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"prices": PRICES, "limits": {"monthly_budget": 2.0}, "state": str(tmp_path)}
    async with open_bench(text, **changes) as one, open_bench(text, **changes) as two:
        tokens = [(await bench.chat(max_tokens=9)).json()["usage"]["completion_tokens"] for bench in (one, two)]
        await read_again()
        expected = 2.0, sum(tokens) / 1000
        assert shown(one, "deployment_monthly_budget") == shown(two, "deployment_monthly_budget") == expected


async def test_a_reload_changes_it_and_takes_it_away(text: TextModel) -> None:
    async with open_bench(text, prices=PRICES, limits={"daily_budget": 0.5}) as bench:
        await read_again()
        assert shown(bench)[0] == 0.5
        config = bench.reloader.config
        for budget in (0.25, None):
            limits = replace(config.limits, daily_budget=budget)
            await bench.reloader.reload(lambda limits=limits: replace(config, limits=limits))  # type: ignore[misc]
            await read_again()
            assert shown(bench)[0] == (budget or 0.0)
        assert "headrace_budget{" not in (await bench.client.get("/metrics")).text


async def test_while_the_store_fails_there_is_none(text: TextModel) -> None:
    async with open_bench(text, prices=PRICES, limits={"daily_budget": 0.5}) as bench:
        store = script_limits(bench)
        await read_again()
        assert shown(bench)[0] == 0.5
        store.failure = "down"
        await read_again()
        assert shown(bench)[0] == 0.0
        store.go_on()
        await read_again()
        assert shown(bench)[0] == 0.5


KEYS: list[dict[str, Any]] = [{"key": f"hr-{tenant}-0123456789", "tenant": tenant} for tenant in ("alice", "bob")]
KEYS.append({"key": "hr-ops-0123456789", "tenant": "ops", "role": "reader"})


@pytest.mark.parametrize(
    ("reader", "options", "is_shown"),
    [
        ("alice", {}, False),
        ("ops", {}, True),
        ("", {"open_metrics": "totals"}, False),
        ("", {"open_metrics": "all"}, True),
    ],
)
async def test_readers_of_all_tenants_series_see_it_and_no_other(
    text: TextModel, reader: str, options: dict[str, Any], is_shown: bool
) -> None:
    async with open_bench(text, prices=PRICES, limits={"daily_budget": 0.5}, api_keys=KEYS, **options) as bench:
        await read_again()
        assert shown(bench)[0] == 0.5
        headers = {"authorization": f"Bearer hr-{reader}-0123456789"} if reader else {}
        page = await bench.client.get("/metrics", headers=headers)
        assert page.status_code == 200
        assert ("headrace_budget" in page.text) is is_shown
