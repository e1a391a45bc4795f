"""Tests GET /v1/usage: a tenant sees its own usage, and no other's."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, eventually, open_bench

from headrace.core.errors import Overloaded
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.ledger.ledger import open_ledger
from headrace.gateway.ledger.usage_query import UsageQuery
from headrace.text.folder import TextModel

pytestmark = pytest.mark.socket

KEYS = [{"key": f"sk-{name}-0123456789", "tenant": name} for name in ("acme", "globex")]


def as_tenant(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}-0123456789"}


async def rows(bench: TestBench, tenant: str, query: str = "", *, count: int) -> list[dict[str, Any]]:
    """Once they are of `count` requests."""
    async with asyncio.timeout(60):
        while True:
            answer = await bench.client.get(f"/v1/usage{query}", headers=as_tenant(tenant))
            assert answer.status_code == 200, answer.text
            found: list[dict[str, Any]] = answer.json()["data"]
            if sum(row["requests"] for row in found) >= count:
                return found
            await asyncio.sleep(0.02)


async def test_each_tenant_sees_its_own_usage(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path), api_keys=KEYS, prices={MODEL: {"output": 1.0}}) as bench:
        for tenant, count in (("acme", 3), ("globex", 1)):
            for _ in range(count):
                body = chat_body(max_tokens=2)
                assert (await bench.client.post("/v1/chat/completions", json=body, headers=as_tenant(tenant))).status_code == 200
        [acme] = await rows(bench, "acme", "?by=tenant", count=3)
        [globex] = await rows(bench, "globex", "?by=tenant", count=1)
        assert (acme["tenant"], acme["requests"], acme["completion_tokens"], acme["cost"]) == ("acme", 3, 6, 6e-6)
        assert (globex["tenant"], globex["requests"]) == ("globex", 1)
        [by_model] = await rows(bench, "acme", "?by=model&since=1h", count=3)
        assert by_model["model"] == MODEL
        [by_day] = await rows(bench, "acme", count=3)
        assert len(by_day["day"]) == len("2026-11-30")


async def test_a_reader_sees_the_usage_of_every_tenant_and_asks_once_at_a_time(text: TextModel, tmp_path: Path) -> None:
    keys = [*KEYS, {"key": "sk-reader-0123456789", "tenant": "acme", "role": "reader"}]
    async with open_bench(text, state=str(tmp_path), api_keys=keys) as bench:
        for tenant in ("acme", "globex"):
            assert (await bench.client.post("/v1/chat/completions", json=chat_body(), headers=as_tenant(tenant))).status_code == 200
        both = await rows(bench, "reader", "?by=tenant", count=2)
        assert [(row["tenant"], row["requests"]) for row in both] == [("acme", 1), ("globex", 1)]
        ledger = bench.gateway.service.explanations.ledger
        assert ledger is not None
        ledger._asking.add(None)
        assert (await bench.client.get("/v1/usage", headers=as_tenant("reader"))).status_code == 429


async def test_a_time_without_requests_has_no_rows(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path), api_keys=KEYS) as bench:
        answer = await bench.client.get("/v1/usage?since=2001-01-01&until=2001-01-02", headers=as_tenant("acme"))
        assert answer.json() == {"object": "list", "data": [], "has_more": False}


@pytest.mark.parametrize(
    ("query", "param"),
    [("?by=colour", "by"), ("?since=yesterday", "since"), ("?until=soon", "until"), ("?tenant=globex", "tenant"), ("?by=", "by")],
)
async def test_a_wrong_question_is_refused_by_its_parameter(text: TextModel, tmp_path: Path, query: str, param: str) -> None:
    """A tenant cannot be asked for: it is the key's."""
    async with open_bench(text, state=str(tmp_path), api_keys=KEYS) as bench:
        answer = await bench.client.get(f"/v1/usage{query}", headers=as_tenant("acme"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_tenants_second_query_at_a_time_is_refused_and_another_tenants_waits_for_the_first(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path), api_keys=KEYS) as bench:
        ledger = bench.gateway.service.explanations.ledger
        assert ledger is not None
        released = threading.Event()
        blocking = asyncio.create_task(ledger._local._reader.call(lambda: released.wait(600), is_read=True))
        first = asyncio.create_task(bench.client.get("/v1/usage", headers=as_tenant("acme")))
        await eventually(lambda: "acme" in ledger._asking)
        refused = await bench.client.get("/v1/usage", headers=as_tenant("acme"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        other = asyncio.create_task(bench.client.get("/v1/usage", headers=as_tenant("globex")))
        await eventually(lambda: "globex" in ledger._asking)
        released.set()
        assert [(await answer).status_code for answer in (first, other)] == [200, 200]
        assert (await bench.client.get("/v1/usage", headers=as_tenant("acme"))).status_code == 200
        await blocking


async def test_a_client_that_leaves_does_not_make_room_for_another_query(tmp_path: Path) -> None:
    ledger = open_ledger(str(tmp_path), UsageConfig(), time.time)
    assert ledger is not None
    released = threading.Event()
    blocking = asyncio.create_task(ledger._local._reader.call(lambda: released.wait(600), is_read=True))
    query = UsageQuery(by=["day"], tenant="acme")
    left = asyncio.create_task(ledger.rows(query))
    await asyncio.sleep(0.01)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    with pytest.raises(Overloaded):
        await ledger.rows(query)
    released.set()
    await blocking
    await eventually(lambda: not ledger._asking)
    assert await ledger.rows(query) == []
    await ledger.close()


async def test_usage_wants_a_key(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path), api_keys=KEYS) as bench:
        assert (await bench.client.get("/v1/usage")).status_code == 401


async def test_without_a_state_folder_there_is_no_such_path(bench: TestBench) -> None:
    assert (await bench.client.get("/v1/usage")).status_code == 404
