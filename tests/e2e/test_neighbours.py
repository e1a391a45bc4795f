"""Tests that a tenant that floods a gateway with 200 streams is refused at its own limits, and that another tenant notices nothing.

On virtual time, over a replica that says a token every 20 ms. What the engine's queue does with a flood is in tests/engine
(test_overload.py, test_fairness.py); the storm with a thousand streams, real engines and times is `bench/storms/neighbour.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_kit import TestBench, chat_body, events_of, metric, open_bench

from headrace.text.folder import load_text

pytestmark = pytest.mark.loop

MAX_REQUESTS, TENANT_SHARE = 64, 0.25
OPEN = {"flood": int(MAX_REQUESTS * TENANT_SHARE), "capped": 4}
"""Tenant -> its most open requests: by its share of the gateway's, and by its tier."""

NUM_STREAMS, NUM_ASKED = 200, 5
VICTIMS_TOKENS, FLOODS_TOKENS = 8, 400
TOKEN_S = 0.02
MAX_PROMPT_BYTES = 2 << 20


def key_of(tenant: str) -> str:
    return f"sk-of-the-tenant-{tenant}"


def config() -> dict[str, Any]:
    """A tier with every kind of limit for the victim and the flood, and one that allows few open requests."""
    counted = {"requests_per_minute": 100_000, "output_tokens_per_minute": 10**8, "max_concurrent_requests": 1000}
    tenants = {"victim": "team", "flood": "team", "capped": "small"}
    return {
        "tiers": {"team": counted, "small": {**counted, "max_concurrent_requests": OPEN["capped"]}},
        "api_keys": [{"key": key_of(tenant), "tenant": tenant, "tier": tier} for tenant, tier in tenants.items()],
        "limits": {"max_requests": MAX_REQUESTS, "max_tenant_share": TENANT_SHARE, "max_prompt_bytes": MAX_PROMPT_BYTES},
    }


async def asked(bench: TestBench, tenant: str, num_tokens: int, seed: int) -> httpx2.Response:
    body = chat_body(max_tokens=num_tokens, seed=seed, ignore_eos=True, stream=True)
    return await bench.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key_of(tenant)}"})


async def victims_answers(bench: TestBench) -> list[tuple[int, str, float]]:
    answers, loop = [], asyncio.get_running_loop()
    for seed in range(NUM_ASKED):
        began_s = loop.time()
        answer = await asked(bench, "victim", VICTIMS_TOKENS, seed)
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events_of(answer.text))
        answers.append((answer.status_code, text, round(loop.time() - began_s, 6)))
    return answers


@pytest.mark.parametrize("tenant", list(OPEN))
async def test_a_flood_of_streams_is_refused_and_its_neighbour_never_is(random_folder: Path, tenant: str) -> None:
    async with open_bench(load_text(random_folder), **config()) as bench:
        bench.replica.token_delay_s = TOKEN_S
        alone = await victims_answers(bench)
        assert {status for status, _, _ in alone} == {200}
        flood = [asyncio.create_task(asked(bench, tenant, FLOODS_TOKENS, seed)) for seed in range(NUM_STREAMS)]
        while sum(task.done() for task in flood) < NUM_STREAMS - OPEN[tenant]:
            await asyncio.sleep(TOKEN_S)
        assert metric(bench.gateway, "headrace_gateway_requests_open") == OPEN[tenant]
        assert 0 < metric(bench.gateway, "headrace_gateway_held_bytes", of="prompts") <= MAX_PROMPT_BYTES
        assert await victims_answers(bench) == alone, "nor does it wait longer"
        assert not all(task.done() for task in flood), "the flood was over before the victim"
        answers = await asyncio.gather(*flood)
        assert Counter(answer.status_code for answer in answers) == {200: OPEN[tenant], 429: NUM_STREAMS - OPEN[tenant]}
        assert all(answer.headers["retry-after"].isdecimal() for answer in answers if answer.status_code == 429)
        assert metric(bench.gateway, "headrace_gateway_requests_open") == 0
        assert metric(bench.gateway, "headrace_gateway_held_bytes", of="prompts") == 0
