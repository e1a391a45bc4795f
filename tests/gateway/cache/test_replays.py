"""Tests Idempotency-Key: one answer per key, whatever breaks between a request and its retry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from asgi_connection import connected
from gateway_kit import TestBench, chat_body, dial, events_of, eventually, metric, open_bench, post, serving
from scripted_store import script_replays

from headrace.core.errors import Unavailable
from headrace.gateway.cache import replays
from headrace.gateway.cache.replays import LEASE_S
from headrace.gateway.ledger.record import UsageRecord
from headrace.gateway.limits.reservation import LimitReservation
from headrace.gateway.stores.guard import REQUEST_WAIT_S
from headrace.gateway.upstream.seam import TokenUsage
from headrace.text.folder import TextModel
from tests.house.reader import ROOT

pytestmark = pytest.mark.loop

PATH = "/v1/chat/completions"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8}


async def ask(bench: TestBench, key: str, *, api_key: str = "", path: str = PATH, **fields: Any) -> httpx2.Response:
    headers = {"idempotency-key": key} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    return await bench.client.post(path, json=chat_body(**SAMPLED) | fields, headers=headers)


def is_replay(answer: httpx2.Response) -> bool:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("idempotent-replayed") == "true"


def outcome(bench: TestBench, name: str) -> float:
    return metric(bench.gateway, "headrace_idempotent_requests_total", outcome=name)


@pytest.fixture
async def one(text: TextModel) -> AsyncIterator[TestBench]:
    async with open_bench(text) as bench:
        yield bench
        bench.gateway.service.stages.replays.check()


@asynccontextmanager
async def two(text: TextModel, tmp_path: Path, url: str = "") -> AsyncIterator[tuple[TestBench, TestBench]]:
    """Two gateways over one store."""
    where: dict[str, Any] = {"store": {"url": url}} if url else {"state": str(tmp_path)}
    async with open_bench(text, **where) as first, open_bench(text, **where) as second:
        yield first, second


@pytest.fixture(params=["file", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("redis_url") if request.param == "redis" else ""


async def test_a_retry_gets_the_first_answer_although_it_was_drawn_at_random(one: TestBench) -> None:
    first = await ask(one, "a")
    one.replica.said = "Something else entirely."
    second = await ask(one, "a")
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert first.json()["choices"] == second.json()["choices"]
    assert first.json()["usage"] == second.json()["usage"]
    assert len(one.replica.requests) == 1
    assert (outcome(one, "first"), outcome(one, "replayed")) == (1, 1)
    assert (await ask(one, "b")).json()["choices"] != first.json()["choices"]


async def test_a_stream_is_replayed_in_its_pieces(one: TestBench) -> None:
    streams = [events_of((await ask(one, "a", stream=True)).text) for _ in range(2)]
    assert len(one.replica.requests) == 1
    deltas = [[event["choices"] for event in stream] for stream in streams]
    assert deltas[0] == deltas[1]


async def test_another_body_or_path_under_the_key_is_refused(one: TestBench) -> None:
    await ask(one, "a")
    for changed in ({"max_tokens": 9}, {"stream": True}):
        refused = await ask(one, "a", **changed)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert outcome(one, "mismatch") == 2


async def test_a_key_is_its_tenants_own(text: TextModel) -> None:
    keys = [{"key": f"key-of-{name}", "tenant": name} for name in ("one", "two")]
    async with open_bench(text, api_keys=keys) as bench:
        answers = [await ask(bench, "a", api_key=f"key-of-{name}") for name in ("one", "two", "one")]
        assert [is_replay(answer) for answer in answers] == [False, False, True]


@pytest.mark.socket
async def test_while_the_first_runs_a_retry_is_told_when_to_come_again(text: TextModel, tmp_path: Path, store_url: str) -> None:
    async with two(text, tmp_path, store_url) as (first, second):
        first.replica.go.clear()
        running = asyncio.create_task(ask(first, "a"))
        await eventually(lambda: bool(first.replica.requests))
        for bench in (first, second):
            busy = await ask(bench, "a")
            assert (busy.status_code, busy.json()["error"]["code"], busy.headers["retry-after"]) == (409, "idempotency_conflict", "1")
        first.replica.go.set()
        assert not is_replay(await running)
        await eventually(lambda: not first.gateway.service.stages.replays.claims)
        assert is_replay(await ask(second, "a"))
        assert not second.replica.requests


@pytest.mark.socket
async def test_of_many_first_requests_at_two_gateways_one_is_computed(text: TextModel, tmp_path: Path, store_url: str) -> None:
    async with two(text, tmp_path, store_url) as benches:
        for bench in benches:
            bench.replica.go.clear()
        asked = [asyncio.create_task(ask(bench, "a")) for _ in range(4) for bench in benches]
        await eventually(lambda: sum(task.done() for task in asked) == 7)
        for bench in benches:
            bench.replica.go.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7
        assert sum(len(bench.replica.requests) for bench in benches) == 1


async def test_after_a_failure_the_next_request_is_the_first(one: TestBench) -> None:
    def fail(*_: object) -> None:
        raise Unavailable("gone")

    one.replica.on_submit = fail
    assert (await ask(one, "a")).status_code == 503
    one.replica.on_submit = None
    await eventually(lambda: not one.gateway.service.stages.replays.claims)
    assert not is_replay(await ask(one, "a"))
    assert (await ask(one, "c", min_tokens=9)).status_code == 400
    await eventually(lambda: not one.gateway.service.stages.replays.claims)
    assert not is_replay(await ask(one, "c")), "a refused request binds its key to no body"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_finished_without_its_client_and_waits_for_the_retry(one: TestBench, stream: bool) -> None:
    async with serving(one.gateway) as port:
        one.replica.token_delay_s = 0.02
        async with dial(port) as (reader, writer):
            writer.write(post(PATH, chat_body(**SAMPLED, stream=stream), "idempotency-key: a"))
            await eventually(lambda: bool(one.replica.requests))
            if stream:
                await reader.readuntil(b"data: ")
        assert (await ask(one, "a", stream=stream)).status_code == 409
        await eventually(lambda: not one.gateway.service.stages.replays.claims)
        answer = await ask(one, "a", stream=stream)
        assert is_replay(answer)
        assert (len(one.replica.requests), one.replica.cancelled) == (1, [])
        if not stream:
            assert answer.json()["usage"]["completion_tokens"] == 8


async def test_what_a_shutdown_cuts_off_is_billed_as_it_counts_in_the_limits(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has left, the answer goes on for its retry, and then the request's task is cancelled."""
    left, written, counted = asyncio.Event(), list[UsageRecord](), list[TokenUsage | None]()
    count = LimitReservation.count

    def note(reservation: LimitReservation, usage: TokenUsage | None) -> None:
        counted.append(usage)
        count(reservation, usage)

    body = iter([{"type": "http.request", "body": json.dumps(chat_body(**SAMPLED)).encode()}])

    async def receive() -> dict[str, Any]:
        if (message := next(body, None)) is not None:
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        return

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost"), (b"idempotency-key", b"a")]
    scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers, "http_version": "1.1"}
    monkeypatch.setattr(LimitReservation, "count", note)
    async with open_bench(text, state=str(tmp_path)) as bench:
        ledger = bench.gateway.service.explanations.ledger
        assert ledger is not None
        monkeypatch.setattr(ledger, "write", written.append)
        bench.replica.token_delay_s = 1.0
        running = asyncio.create_task(connected(bench.gateway)(scope, receive, send))
        await asyncio.sleep(2.5)
        left.set()
        await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.wait([running])
    [used] = counted
    assert used is not None
    assert [record.completion_tokens for record in written] == [used.completion_tokens]
    assert used.completion_tokens > 0


async def test_a_gateway_that_died_keeps_its_keys_for_a_lease(text: TextModel, tmp_path: Path) -> None:
    async with two(text, tmp_path) as (first, second):
        first.replica.go.clear()
        running = asyncio.create_task(ask(first, "a"))
        await asyncio.sleep(3 * LEASE_S)
        assert (await ask(second, "a")).status_code == 409, "a living gateway renews its claim, again and again"
        replays = first.gateway.service.stages.replays
        (claim,) = replays.claims
        assert await claim.lease.renew(replays._store.store)
        claim.lease.end()  # what its death does
        await asyncio.sleep(LEASE_S - 0.001)
        assert (await ask(second, "a")).status_code == 409
        await asyncio.sleep(0.001)
        taken = await ask(second, "a")
        assert not is_replay(taken)
        await eventually(lambda: not second.gateway.service.stages.replays.claims)
        first.replica.said = "The dead one's late answer."
        first.replica.go.set()
        await running
        await eventually(lambda: not first.gateway.service.stages.replays.claims)
        assert (await ask(second, "a")).json()["choices"] == taken.json()["choices"], "the late answer does not take the place"


async def test_an_answer_that_is_too_large_is_not_computed_again(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MAX_REPLAY_BYTES", 300)
    async with open_bench(text) as bench:
        assert (await ask(bench, "a", max_tokens=100, ignore_eos=True)).status_code == 200
        await eventually(lambda: not bench.gateway.service.stages.replays.claims)
        again = await ask(bench, "a", max_tokens=100, ignore_eos=True)
        assert (again.status_code, "retry-after" in again.headers) == (409, False)
        assert "too large" in again.json()["error"]["message"]
        assert len(bench.replica.requests) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "two words", "t\u00e4gl"])
async def test_a_key_of_another_form_is_refused(one: TestBench, key: str) -> None:
    headers = {"idempotency-key": key.encode("latin-1")}
    refused = await one.client.post(PATH, json=chat_body(), headers=headers)  # type: ignore[arg-type]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert "xx" not in refused.text


async def test_what_cannot_be_kept_is_refused_under_a_key(one: TestBench) -> None:
    refused = await ask(one, "a", prompt_logprobs=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
    headers = {"idempotency-key": "a", "last-event-id": "0"}
    refused = await one.client.post(PATH, json=chat_body(stream=True), headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_cached_answer_is_kept_under_the_key_too(text: TextModel) -> None:
    async with open_bench(text, cache={"enabled": True}) as bench:
        first = await ask(bench, "a", temperature=0)
        hit = await ask(bench, "b", temperature=0)
        replay = await ask(bench, "b", temperature=0)
        assert (first.headers["x-headrace-cache"], hit.headers["x-headrace-cache"], is_replay(replay)) == ("miss", "hit", True)
        assert first.json()["choices"] == replay.json()["choices"]


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
async def test_without_the_store_a_request_with_a_key_is_refused_retryably(one: TestBench, trouble: str) -> None:
    store, loop = script_replays(one), asyncio.get_running_loop()
    assert (await ask(one, "a")).status_code == 200
    await eventually(lambda: not one.gateway.service.stages.replays.claims)
    if trouble == "fails":
        store.failure = "down"
    else:
        store.hang()
    began = loop.time()
    refused = await ask(one, "b")
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert loop.time() - began == pytest.approx(0.0 if trouble == "fails" else REQUEST_WAIT_S)
    assert (await one.chat()).status_code == 200, "without a key it is answered"
    store.go_on()
    assert (await ask(one, "b")).status_code == 200
    await eventually(lambda: not one.gateway.service.stages.replays.claims)


async def test_a_replay_and_a_hit_take_nothing_of_the_tenants_limits(text: TextModel) -> None:
    """Three requests' tokens do not fit the tier; one computation does."""
    tiers = {"small": {"output_tokens_per_minute": 20}}
    keys = [{"key": "key-of-one", "tenant": "one", "tier": "small"}]
    async with open_bench(text, tiers=tiers, api_keys=keys, cache={"enabled": True}) as bench:
        answers = [await ask(bench, "a", api_key="key-of-one", temperature=0) for _ in range(3)]
        answers += [await ask(bench, key, api_key="key-of-one", temperature=0) for key in "bcd"]
        assert [answer.status_code for answer in answers] == [200] * 6
        assert [is_replay(answer) for answer in answers] == [False, True, True, False, False, False]
        assert len(bench.replica.requests) == 1


class WithWebhook:
    """The client of a gateway, for which one address is another server's. told: what was posted there"""

    HOOK = "http://hooks.example/done"

    def __init__(self, bench: TestBench) -> None:
        self._client = bench.client
        self.told: list[Any] = []

    async def post(self, url: str, *, json: Any, headers: dict[str, str] | None = None, timeout: float | None = 5) -> httpx2.Response:
        if url == self.HOOK:
            self.told.append(json)
            return httpx2.Response(200)
        return await self._client.post(url, json=json, headers=headers, timeout=timeout)


async def test_the_webhook_of_the_page_is_told_the_answer_of_a_client_that_was_killed(one: TestBench) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    code = page.partition("and webhooks")[2].partition("```python")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "api.md", "exec"), names)
    predict, client, body = names["predict"], WithWebhook(one), chat_body(**SAMPLED)
    one.replica.go.clear()
    async with serving(one.gateway) as port:
        async with dial(port) as (_, writer):
            writer.write(post(PATH, body, "idempotency-key: a"))
            await eventually(lambda: bool(one.replica.requests))
        again = asyncio.create_task(predict(client, body, "a", client.HOOK))
        await asyncio.sleep(3)
        assert not again.done(), "the first one runs"
        await predict(client, body, "a", client.HOOK, within_s=0)
        assert client.told.pop()["status"] == "failed", "it gave up"
        one.replica.go.set()
        await again
    assert len(one.replica.requests) == 1
    [told] = client.told
    assert (told["id"], told["status"], told["output"]["choices"][0]["finish_reason"]) == ("a", "succeeded", "length")
    await predict(client, {"model": "nothing"}, "b", client.HOOK)
    assert client.told[1]["status"] == "failed"
