"""Tests that a tenant created under the name of a removed one is another tenant: it reads and owes nothing of the earlier one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, open_bench
from identity_kit import administration

from headrace.gateway.access.administration import NewKey, NewTenant
from headrace.gateway.control.purge import purge
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

CHAT = "/v1/chat/completions"
CACHED, DRAWN = chat_body(temperature=0, max_tokens=2), chat_body(max_tokens=2)


async def valid(bench: TestBench, key: str) -> dict[str, str]:
    """Headers with the key, once the gateway knows it."""
    headers = {"authorization": f"Bearer {key}"}
    async with asyncio.timeout(60):
        for sent, status in (({}, 401), (headers, 200)):  # before it knows of any key, it answers without one
            while (await bench.client.get("/v1/models", headers=sent)).status_code != status:
                await asyncio.sleep(0.05)
    return headers


async def use(bench: TestBench, headers: dict[str, str]) -> tuple[str, str]:
    """A turn of a session, an answer that is cached and one under an Idempotency-Key: whether the last two were there already."""
    for more in ({"x-session-id": "s"}, {}):
        assert (await bench.client.post(CHAT, json=DRAWN, headers=headers | more)).status_code == 200
    cached = await bench.client.post(CHAT, json=CACHED, headers=headers)
    drawn = await bench.client.post(CHAT, json=DRAWN, headers=headers | {"idempotency-key": "k"})
    return cached.headers["x-headrace-cache"], drawn.headers.get("idempotent-replayed", "false")


async def usage(bench: TestBench, headers: dict[str, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await bench.client.get("/v1/usage?by=tenant", headers=headers)).json()["data"]
    return rows


@pytest.fixture
def gateway(tmp_path: Path) -> dict[str, Any]:
    return {"state": str(tmp_path), "cache": {"enabled": True}, "prices": {MODEL: {"output": 1.0}}}


@pytest.mark.socket  # the ledger has a thread
async def test_a_tenant_of_a_removed_ones_name_reads_and_owes_nothing_of_it(
    text: TextModel, tmp_path: Path, gateway: dict[str, Any]
) -> None:
    admin = administration(tmp_path)
    async with open_bench(text, **gateway) as bench:
        await admin.create_tenant(NewTenant(name="acme", budget=0.00001))
        first = await valid(bench, (await admin.create_key(NewKey(tenant="acme"))).key)
        assert await use(bench, first) == ("miss", "false")
        async with asyncio.timeout(60):
            while not await usage(bench, first):
                await asyncio.sleep(0.05)
        salt = bench.replica.requests[-1].salt
        await admin.remove_tenant("acme", revoke_keys=True)

        await admin.create_tenant(NewTenant(name="acme", budget=0.00001))
        second = await valid(bench, (await admin.create_key(NewKey(tenant="acme"))).key)
        assert (await bench.client.get("/v1/sessions/s", headers=second)).status_code == 404
        assert await usage(bench, second) == []
        assert await use(bench, second) == ("miss", "false"), "the budget is not used up either"
        assert bench.replica.requests[-1].salt != salt
        assert (await bench.client.get("/v1/sessions/s", headers=second)).status_code == 200
    await admin.close()


async def test_a_purge_finds_the_answers_of_a_tenant_by_its_name_and_by_the_id_of_a_removed_one(
    text: TextModel, tmp_path: Path, gateway: dict[str, Any]
) -> None:
    admin = administration(tmp_path)
    async with open_bench(text, **gateway) as bench:
        config = bench.gateway.config
        headers = await valid(bench, (await admin.create_key(NewKey(tenant="acme"))).key)
        for name in ("acme", "id"):
            async with asyncio.timeout(60):  # kept in the background; what the store did not take in time, by the next request
                while await use(bench, headers) != ("hit", "true"):
                    await asyncio.sleep(0.05)
            if name == "id":
                await admin.remove_tenant("acme", revoke_keys=True)
                name = str((await admin.audit(1))[0].detail["id"])
            assert await purge(config, name, admin, admin.now, is_all=False) == 2
    await admin.close()
