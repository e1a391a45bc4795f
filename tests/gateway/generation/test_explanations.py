"""Tests that an ended request can be explained: its stages fill its time, each attempt is named, and only its tenant may read it."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import httpx2
import pytest
from asgi_connection import connected
from gateway_kit import MODEL, TestBench, chat_body, gateway_config, open_bench, some_replicas
from local_workers import LocalWorkers
from msgspec import structs
from virtual_time import do_sqlite_inline, virtual_loop
from virtual_wire import VirtualServed

from headrace.core.clock import Clock
from headrace.gateway.access.principal import Principal
from headrace.gateway.compose import open_gateway
from headrace.gateway.control.models import Sources
from headrace.gateway.generation.explanations import ENTRY_BYTES, EXPLAIN, Explanations, kept
from headrace.gateway.ledger.record import encode_record, usage_record
from headrace.gateway.ledger.usage_db import FILE, USAGE, UsageDb
from headrace.gateway.ledger.usage_query import LocalUsage
from headrace.gateway.stores.sqlite_thread import SqliteThread, open_sqlite
from headrace.gateway.text_host import TextContext
from headrace.gateway.upstream.model_config import ReplicaConfig
from headrace.lab.fake_runner import FakeOptions
from headrace.observe.finished_request import Caller, End, FinishedRequest, Outcome, RequestArrival
from headrace.observe.timeline import ADMIT
from headrace.policy.routing.choice import ONLY
from headrace.text.folder import TextModel
from headrace.wire.client import ReplicaClient

pytestmark = pytest.mark.loop

NUM_REQUESTS = 1_000


def allowed_s(wall_s: float) -> float:
    return max(0.01 * wall_s, 0.002)


def body(draw: random.Random) -> dict[str, Any]:
    """Short and long, several choices, stop strings, refused ones, and ones that a cache answers."""
    kind = draw.choice(("plain", "plain", "plain", "n", "stop", "refused", "cached", "several"))
    made: dict[str, Any] = {"model": MODEL, "prompt": f"request {draw.randrange(10**6)}", "max_tokens": draw.randint(1, 24)}
    if kind == "n":
        made["n"] = draw.randint(2, 4)
    if kind == "stop":
        made["stop"] = [draw.choice("abcdefgh")]
    if kind == "refused":
        made["temperature"] = 9
    if kind == "several":
        made["prompt"] = [f"one {draw.random()}", f"other {draw.random()}"]
    if kind == "cached":
        made |= {"prompt": "the same", "temperature": 0, "max_tokens": 4}
    return made


async def test_the_stages_of_a_thousand_requests_fill_their_time(text: TextModel) -> None:
    draw, loop = random.Random(49), virtual_loop()
    first, last = (text.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "az")
    options = FakeOptions(vocab_size=text.tokenizer.vocab_size, produced=(first, last), numerics={"attention": "1"})
    engines = {name: VirtualServed(step_s=0.01, options=options) for name in ("r0", "r1")}
    config = gateway_config(models=some_replicas(2), timeouts={"failover_s": 20}, cache={"enabled": True})

    def connect(given: ReplicaConfig, _text: TextModel, _clock: Clock) -> ReplicaClient:
        return engines[given.name].client(name=given.name)

    texts = {model.name: text for model in config.models}
    running = [asyncio.create_task(engine.run()) for engine in engines.values()]
    sources = Sources(clock=loop.time, unix_time=loop.unix_time)
    async with open_gateway(config, texts, LocalWorkers(TextContext(dict(texts))), connect=connect, sources=sources) as opened:
        await asyncio.sleep(1.0)  # until they are connected
        transport = httpx2.ASGITransport(app=connected(opened.app))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            breaking = asyncio.create_task(break_links(engines))
            answers = await asyncio.gather(*[later(client, number / 50, body(draw)) for number in range(NUM_REQUESTS)])
            breaking.cancel()
            told = [(await client.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")).json() for answer in answers]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

    assert {answer.status_code for answer in answers} <= {200, 400, 503}
    filled = 0
    for answer, one in zip(answers, told, strict=True):
        stages = one["stages"]
        assert one["request_id"] == answer.headers["x-request-id"]
        assert all(a["start_s"] + a["seconds"] <= b["start_s"] + 2e-6 for a, b in itertools.pairwise(stages)), stages
        total_s = sum(stage["seconds"] for stage in stages) + one["unattributed_s"]
        assert total_s == pytest.approx(one["wall_s"], abs=1e-5)
        filled += abs(one["unattributed_s"]) <= allowed_s(one["wall_s"])
    assert filled >= 0.99 * NUM_REQUESTS
    results = {attempt["result"] for one in told for attempt in one["route"].get("attempts", ())}
    assert {"answered", "lost"} <= results
    assert any("resume" in {stage["name"] for stage in one["stages"]} for one in told)
    assert {one["route"].get("cache_tier") for one in told} == {None, "response"}
    assert any(len(attempt.get("compared", ())) == 2 for one in told for attempt in one["route"].get("attempts", ()))


async def later(client: httpx2.AsyncClient, seconds: float, fields: dict[str, Any]) -> httpx2.Response:
    await asyncio.sleep(seconds)
    return await client.post("/v1/completions", json=fields)


async def break_links(engines: dict[str, VirtualServed]) -> None:
    while True:
        for engine in engines.values():
            await asyncio.sleep(1.3)
            engine.link.reset()
        if virtual_loop().time() % 5 < 2:
            for engine in engines.values():
                engine.link.reset()


KEYS = [
    {"key": "sk-acme-0123456789", "tenant": "acme"},
    {"key": "sk-globex-0123456789", "tenant": "globex"},
    {"key": "sk-ops-0123456789", "tenant": "ops", "role": "reader"},
    {"key": "sk-audit-0123456789", "tenant": "audit", "role": "reader"},
]


async def explanation(bench: TestBench, name: str, shown_id: str) -> httpx2.Response:
    return await bench.client.get(f"/v1/requests/{shown_id}/explain", headers={"authorization": f"Bearer sk-{name}-0123456789"})


async def test_a_tenant_reads_its_own_requests_and_a_reader_all(text: TextModel) -> None:
    async with open_bench(text, api_keys=KEYS, prices={MODEL: {"output": 1.0}}) as bench:
        headers = {"authorization": "Bearer sk-acme-0123456789"}
        answer = await bench.client.post("/v1/chat/completions", json=chat_body(max_tokens=2), headers=headers)
        for shown_id in (answer.json()["id"], answer.headers["x-request-id"], f"{answer.headers['x-request-id']}-0.1"):
            told = (await explanation(bench, "ops", shown_id)).json()
            assert (told["request_id"], told["tenant"], told["kept_in"]) == (answer.headers["x-request-id"], "acme", "memory")
            assert told["tokens"]["completion"] == 2
            assert told["cost"] == 2e-6
            assert told["route"]["attempts"][0] | {"start_s": 0, "seconds": 0} == {
                "replica": "r0",
                "start_s": 0,
                "seconds": 0,
                "reason": ONLY,
                "result": "answered",
            }
            assert (await explanation(bench, "acme", shown_id)).json() == told
            other = await explanation(bench, "globex", shown_id)
            assert (other.status_code, other.json()["error"]["code"]) == (404, "request_not_found")
        assert (await explanation(bench, "acme", "f" * 24)).json() == other.json(), "an id of another tenant is as unknown as none"
        assert (await explanation(bench, "acme", "no id")).status_code == 400


async def test_a_refused_request_says_what_refused_it(text: TextModel) -> None:
    async with open_bench(text, api_keys=KEYS, tiers={"standard": {"requests_per_minute": 1}}) as bench:
        headers = {"authorization": "Bearer sk-acme-0123456789"}
        first, second = [await bench.client.post("/v1/completions", json={"prompt": "x"}, headers=headers) for _ in range(2)]
        assert [first.status_code, second.status_code] == [200, 429]
        told = (await explanation(bench, "ops", first.headers["x-request-id"])).json()
        assert told["limits"] == [{"name": "requests_per_minute", "used": 1, "limit": 1}]
        told = (await explanation(bench, "audit", second.headers["x-request-id"])).json()
        assert (told["outcome"], told["limit"], told["route"]) == ("refused", "requests_per_minute", {})
        assert [stage["name"] for stage in told["stages"]] in ([], ["admit"])


async def test_what_another_process_answered_is_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do_sqlite_inline(monkeypatch)
    usage = usage_record(finished(7))
    encoded = kept(finished(7), usage, is_in_ledger=True).decode()
    db = UsageDb(str(tmp_path / FILE), retention_days=1, unix_time=lambda: 0.0)
    db.ship([encode_record(structs.replace(usage, explain=encoded))])
    local = LocalUsage(SqliteThread(open_sqlite(str(tmp_path / FILE), USAGE)))
    try:
        assert await local.explanation(f"{7:024x}", "acme", 5.0) == encoded
        assert await local.explanation(f"{7:024x}", None, 5.0) == encoded
        assert await local.explanation(f"{7:024x}", "globex", 5.0) is None
    finally:
        await local.close()
        db.close()


async def test_a_worker_asks_the_others() -> None:
    one, other = Explanations(None), Explanations(None)

    class Workers:
        def handle(self, _question: str, _handler: object) -> None:
            return

        async def ask_others(self, question: str, argument: str) -> list[bytes]:
            assert question == EXPLAIN
            return [b"", await other._for_sibling(argument)]

    one.join(Workers())
    other.keep(finished(7), None)
    acme, globex = Principal(tenant="acme"), Principal(tenant="globex")
    assert await one.find(f"{7:024x}", acme, sees_site=True) == await other.find(f"{7:024x}", acme, sees_site=True) != None  # noqa: E711
    assert await one.find(f"{7:024x}", globex, sees_site=True) is None


def finished(number: int, tenant: str = "acme") -> FinishedRequest:
    end = End(Outcome.REFUSED, 400, 0.25, error="invalid")
    return FinishedRequest(RequestArrival(f"{number:024x}", "POST", "/v1/completions"), end, Caller(tenant), entered=[(ADMIT, 0.0)])


async def test_what_is_kept_is_bounded_in_bytes() -> None:
    explanations = Explanations(None, max_bytes=10_000)
    for number in range(1000):
        explanations.keep(finished(number), None)
        assert explanations.num_bytes <= 10_000
    sizes = [len(encoded) + ENTRY_BYTES for encoded in explanations._kept.values()]
    assert explanations.num_bytes == sum(sizes)
    assert 10 < len(sizes) < 1000
