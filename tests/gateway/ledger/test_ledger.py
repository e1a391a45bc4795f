"""Tests that the usage of every request is in usage.db, however the request ended. How soon: `test_shipper`."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, dial, eventually, metric, open_bench, post, serving

from headrace.gateway.access.principal import Principal
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.ledger.ledger import open_ledger
from headrace.gateway.ledger.record import MAX_PROMPT_BYTES, prompt_json
from headrace.gateway.ledger.usage_db import FILE, UsageDb
from headrace.gateway.ledger.usage_query import UsageQuery
from headrace.text.folder import TextModel

pytestmark = pytest.mark.socket

PRICES = {MODEL: {"input": 1.0, "output": 2.0, "cached_input": 0.5}}


async def recorded(bench: TestBench, count: int, by: str = "tenant") -> list[dict[str, Any]]:
    """The rows, once they are of this many requests."""
    ledger = bench.gateway.service.explanations.ledger
    assert ledger is not None
    async with asyncio.timeout(60):
        while True:
            rows = await ledger.rows(UsageQuery(by=[by]))
            if sum(int(str(row["requests"])) for row in rows) >= count:
                return rows
            await asyncio.sleep(0.02)


def records(state: Path) -> list[dict[str, Any]]:
    """All that is in the file, by column."""
    import sqlite3

    connection = sqlite3.connect(state / FILE)
    connection.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in connection.execute("SELECT * FROM usage ORDER BY time_ms, request_id")]
    finally:
        connection.close()


async def test_usage_adds_up_to_what_clients_were_shown(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path), prices=PRICES) as bench:
        bench.replica.cached_tokens = 1
        shown = []
        for fields in ({}, {"max_tokens": 3}, {"n": 2, "max_tokens": 4}):
            shown.append((await bench.chat(**fields)).json()["usage"])
        answer = await bench.chat(stream=True, max_tokens=5, stream_options={"include_usage": True})
        shown.append(json.loads(answer.text.split("data: ")[-2])["usage"])
        [row] = await recorded(bench, 4)
    assert row["tenant"] == "default"
    assert row["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in shown)
    assert row["completion_tokens"] == sum(usage["completion_tokens"] for usage in shown)
    assert row["cached_tokens"] == 4
    cost_nanos = (row["prompt_tokens"] - 4) * 1000 + 4 * 500 + row["completion_tokens"] * 2000
    assert (row["cost_nanos"], row["cost"]) == (cost_nanos, cost_nanos / 1e9)


async def test_a_record_has_what_is_known_of_its_request(text: TextModel, tmp_path: Path) -> None:
    keys = [{"key": "sk-0123456789abcdef", "tenant": "acme"}]
    began_ms = int(time.time() * 1000)
    async with open_bench(text, state=str(tmp_path), prices=PRICES, api_keys=keys) as bench:
        headers = {"authorization": "Bearer sk-0123456789abcdef"}
        answer = await bench.client.post("/v1/chat/completions", json=chat_body(max_tokens=6), headers=headers)
        await recorded(bench, 1)
    [record] = records(tmp_path)
    assert record["request_id"] == answer.headers["x-request-id"]
    assert began_ms <= record["time_ms"] <= time.time() * 1000
    wanted = {
        "tenant": "acme",
        "model": MODEL,
        "version": answer.json()["system_fingerprint"],
        "endpoint": "/v1/chat/completions",
        "route": "r0",
        "outcome": "completed",
        "finish_reason": "length",
        "completion_tokens": 6,
        "queue_ms": 1.0,
        "prefill_ms": 250.0,
        "decode_ms": 500.0,
        "stalled_ms": 125.0,
        "prompt": None,
    }
    assert {name: record[name] for name in wanted} == wanted
    assert 0 < record["ttft_ms"] <= record["total_latency_ms"]
    assert record["tpot_ms"] is not None
    assert record["tpot_ms"] * 5 <= record["total_latency_ms"]


async def test_an_aborted_stream_is_recorded_with_what_it_used(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench, serving(bench.gateway) as port:
        bench.replica.token_delay_s = 0.02
        async with dial(port) as (reader, writer):
            writer.write(post("/v1/chat/completions", chat_body(stream=True, max_tokens=200, ignore_eos=True)))
            await reader.readuntil(b'"content"')
            await reader.readuntil(b'"content"')
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
        await recorded(bench, 1)
    [record] = records(tmp_path)
    assert record["outcome"] == "cancelled"
    assert 0 < record["completion_tokens"] < 200
    assert record["prompt_tokens"] > 0


async def test_refused_requests_have_no_record_and_failed_ones_no_tokens(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path), prices=PRICES) as bench:
        assert (await bench.chat(temperature=9)).status_code == 400
        assert (await bench.chat(max_tokens=10**6)).status_code == 400
        assert (await bench.client.get("/v1/models")).status_code == 200
        bench.replica.on_submit = lambda request, stream: (_ for _ in ()).throw(RuntimeError("words"))
        assert (await bench.chat()).status_code == 500
        bench.replica.on_submit = None
        assert (await bench.chat(max_tokens=2)).status_code == 200
        await recorded(bench, 2)
    failed, completed = records(tmp_path)
    assert (failed["outcome"], failed["prompt_tokens"], failed["completion_tokens"], failed["cost_nanos"]) == ("failed", 0, 0, 0)
    assert (completed["outcome"], completed["completion_tokens"]) == ("completed", 2)


async def test_what_a_gateway_did_not_ship_the_next_one_does(text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship = UsageDb.ship
    with monkeypatch.context() as broken:
        broken.setattr(UsageDb, "ship", lambda *_: (_ for _ in ()).throw(RuntimeError("no sink")))
        async with open_bench(text, state=str(tmp_path)) as bench:
            for _ in range(3):
                await bench.chat(max_tokens=2)
    assert UsageDb.ship is ship
    assert not records(tmp_path)
    async with open_bench(text, state=str(tmp_path)) as bench:
        await recorded(bench, 3)


async def test_at_the_end_everything_is_shipped(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench:
        for _ in range(3):
            await bench.chat(max_tokens=2)
    assert len(records(tmp_path)) == 3


async def test_metrics_count_records(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, state=str(tmp_path)) as bench:
        await bench.chat(max_tokens=2)
        await recorded(bench, 1)
        assert metric(bench.gateway, "headrace_usage_records_total") == 1
        assert metric(bench.gateway, "headrace_usage_dropped_total", reason="queue") == 0
        assert metric(bench.gateway, "headrace_usage_waiting_bytes", sink="sql") >= 0


async def test_without_a_state_folder_nothing_is_kept(bench: TestBench) -> None:
    assert bench.gateway.service.explanations.ledger is None
    assert (await bench.chat(max_tokens=2)).status_code == 200


CANARY = "xyzzy-canary-prompt"


@pytest.mark.parametrize("surface", ["chat", "completions"])
@pytest.mark.parametrize("is_opted_in", [True, False])
async def test_prompts_are_kept_only_where_their_tenant_opted_in(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surface: str, is_opted_in: bool
) -> None:
    principal = Principal(tenant="acme", options={"log_prompts": is_opted_in})

    async def authenticate(*_: object) -> Principal:
        return principal

    async with open_bench(text, state=str(tmp_path)) as bench:
        monkeypatch.setattr(type(bench.gateway.active.authenticator), "principal", authenticate)
        if surface == "chat":
            answer = await bench.chat(messages=[{"role": "user", "content": CANARY}], max_tokens=2)
        else:
            answer = await bench.complete(prompt=[CANARY, "Hello"], max_tokens=2)
        assert answer.status_code == 200
        await recorded(bench, 1)
    [record] = records(tmp_path)
    if is_opted_in:
        shown = json.loads(record["prompt"])
        assert shown == ([{"role": "user", "content": CANARY}] if surface == "chat" else [CANARY, "Hello"])
    else:
        assert record["prompt"] is None
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not any(CANARY.encode() in path.read_bytes() for path in files)


@pytest.mark.pure
def test_a_long_prompt_is_cut() -> None:
    assert len(prompt_json(["\u00e9" * MAX_PROMPT_BYTES]).encode()) <= MAX_PROMPT_BYTES


async def test_the_time_of_one_query_does_not_end_later_work_on_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.ledger.ledger.QUERY_S", 0.0)
    ledger = open_ledger(str(tmp_path), UsageConfig(), time.time)
    assert ledger is not None
    counting = "WITH RECURSIVE numbers(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < 100000)"
    try:
        assert await ledger.rows(UsageQuery(by=["day"])) == []
        reader = ledger._local._reader
        found = await reader.call(lambda: reader.connection.execute(f"{counting} SELECT count(*) FROM numbers").fetchone(), is_read=True)
        assert found == (100_000,)
    finally:
        await ledger.close()
