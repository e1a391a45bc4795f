"""One tenant floods the real engine with 200 streams: it is refused at its own limits, and another tenant sees nothing but its answers.

The storm with a thousand streams and times is `bench/storms/neighbour.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from http_kit import COMPLETIONS, Answer, Connection, request_bytes, stream
from server_kit import KEY, Server, serving

from headrace.bundled import DEFAULT_MODEL

MAX_REQUESTS, TENANT_SHARE = 64, 0.25
OPEN = {"flood": int(MAX_REQUESTS * TENANT_SHARE), "capped": 4}
"""Tenant -> its most open requests: by its share of the gateway's, and by its tier."""

NUM_STREAMS, NUM_ASKED = 200, 5
VICTIMS_TOKENS, FLOODS_TOKENS = 8, 1900
MAX_WAITING = 16
MAX_GROWTH_BYTES, MAX_PROMPT_BYTES = 48 << 20, 2 << 20
"""Of the gateway's resident memory, and of the prompts of all its requests."""


def key_of(tenant: str) -> str:
    return f"{KEY}-{tenant}"


@pytest.fixture(scope="module")
def site() -> Iterator[Server]:
    """A tier with every kind of limit for the victim and the flood, and one that allows few open requests."""
    counted = {"requests_per_minute": 100_000, "output_tokens_per_minute": 10**8, "max_concurrent_requests": 1000}
    tenants = {"victim": "team", "flood": "team", "capped": "small"}
    keys = [{"key": key_of(tenant), "tenant": tenant, "tier": tier} for tenant, tier in tenants.items()]
    engine = {"model": DEFAULT_MODEL, "num_threads": 1, "max_num_seqs": 16, "max_waiting": MAX_WAITING, "num_kv_blocks": 1024}
    limits = {"max_requests": MAX_REQUESTS, "max_tenant_share": TENANT_SHARE, "max_prompt_bytes": MAX_PROMPT_BYTES}
    config = {
        "models": [{"name": "tiny", "engine": engine}],
        "tiers": {"team": counted, "small": {**counted, "max_concurrent_requests": OPEN["capped"]}},
        "gateway": {
            "api_keys": [*keys, {"key": KEY, "tenant": "operator"}],
            "metrics_tenants": ["operator"],
            "limits": limits,
            "request_log": "off",
        },
    }
    with serving(config) as server:
        yield server


def body_of(seed: int, num_tokens: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [300 + seed, *range(400, 440)], "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}


@dataclass(slots=True)
class Flood:
    """What the flooding tenant saw. statuses: of its answers, as they come;  without_retry: refusals that have no time to come again"""

    tenant: str
    statuses: Counter[int] = field(default_factory=Counter)
    without_retry: list[dict[str, str]] = field(default_factory=list)

    async def run(self, port: int) -> None:
        await asyncio.gather(*(self._stream(port, seed) for seed in range(NUM_STREAMS)))

    async def _stream(self, port: int, seed: int) -> None:
        """Leaves when it is cancelled."""
        async with Connection(port) as connection:
            body = {**body_of(seed, FLOODS_TOKENS), "stream": True}
            await connection.send(request_bytes("POST", COMPLETIONS, body, key=key_of(self.tenant)))
            status, headers = await connection.head()
            self.statuses[status] += 1
            if status != 200:
                if not headers.get("retry-after", "").isdecimal():
                    self.without_retry.append(headers)
                return
            async for _ in connection.events():
                pass

    def is_full(self) -> bool:
        """All that its tenant may not have open is answered."""
        return self.statuses.total() - self.statuses[200] >= NUM_STREAMS - OPEN[self.tenant]


async def victims_answers(server: Server) -> list[Answer]:
    """One after the other: a tenant that asks quietly."""
    return [await stream(server.port, COMPLETIONS, body_of(seed, VICTIMS_TOKENS), key=key_of("victim")) for seed in range(NUM_ASKED)]


@pytest.mark.parametrize("tenant", list(OPEN))
async def test_a_flood_of_streams_is_refused_and_its_neighbour_never_is(site: Server, tenant: str) -> None:
    alone = await victims_answers(site)
    gateway = psutil.Process(site.pids()["gateway"])
    idle_bytes = gateway.memory_info().rss
    flood = Flood(tenant)
    flooding = asyncio.create_task(flood.run(site.port))
    try:
        await site.eventually(flood.is_full)
        beside = await victims_answers(site)
        assert not flooding.done(), f"the flood was over before the victim: {flood.statuses}"
        num_open, load = site.metric("headrace_gateway_requests_open"), site.load()
        held_bytes, grown_bytes = site.metric("headrace_gateway_held_bytes", of="prompts"), gateway.memory_info().rss - idle_bytes
    finally:
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
    assert [(answer.status, answer.error, answer.text) for answer in beside] == [(200, None, answer.text) for answer in alone]
    assert set(flood.statuses) == {200, 429}
    assert flood.statuses[429] == NUM_STREAMS - OPEN[tenant]
    assert not flood.without_retry
    assert num_open <= OPEN[tenant]
    assert load.num_waiting <= MAX_WAITING
    assert 0 < held_bytes <= MAX_PROMPT_BYTES
    assert grown_bytes < MAX_GROWTH_BYTES
    await site.eventually(lambda: site.load().is_idle)
    await site.eventually(lambda: site.metric("headrace_gateway_requests_open") == 0)
    assert site.metric("headrace_gateway_held_bytes") == 0
