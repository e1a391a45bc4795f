"""Sessions over HTTP: what the model reads, what is kept, what is refused; on a file and on a real Redis, two gateways with one store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_kit import MAX_MODEL_LEN, eventually, metric, open_bench
from lateness import machine_lateness
from redis_kit import RedisServer
from session_kit import CHAT, assistant, benches, history, idle, prompt_of, text_of, turn, user

from headrace.core.finish import FinishReason
from headrace.gateway.stores.guard import REQUEST_WAIT_S
from headrace.text.folder import TextModel


@pytest.fixture(params=["file", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "file":
        return {"state": str(tmp_path)}
    return {"store": {"url": request.getfixturevalue("redis_url")}}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_reads_the_earlier_turns_whichever_gateway_has_this_one(
    text: TextModel, store: dict[str, Any], stream: bool
) -> None:
    async with benches(text, store) as (one, other):
        first = text_of(await turn(one, "s", "My name is Ann.", stream=stream, max_tokens=5))
        assert text_of(await turn(other, "s", "What is my name?", stream=stream, max_tokens=4))
        prompt = prompt_of(other)
        assert prompt.index("My name is Ann.") < prompt.index(first) < prompt.index("What is my name?")
        assert (
            await history(one, "s")
            == await history(other, "s")
            == [
                user("My name is Ann."),
                assistant(first),
                user("What is my name?"),
                assistant(text_of(await turn(one, "t", "x", max_tokens=4))),
            ]
        )


async def test_a_session_outlives_its_gateway(text: TextModel, store: dict[str, Any]) -> None:
    for said in ("one", "two"):
        async with open_bench(text, **store) as bench:
            await turn(bench, "s", said, max_tokens=2)
            assert len(await history(bench, "s")) == (2 if said == "one" else 4)


async def test_no_turn_is_lost_where_two_gateways_are_asked_at_once(text: TextModel, store: dict[str, Any]) -> None:
    async with benches(text, store) as opened:
        asked = [turn(opened[number % 2], "s", f"say {number}", max_tokens=2) for number in range(6)]
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} <= {200, 409}
        kept = [message["content"] for message in await history(opened[0], "s") if message["role"] == "user"]
        assert sorted(kept) == [f"say {number}" for number, answer in enumerate(answers) if answer.status_code == 200]


async def test_a_turn_that_waits_too_long_for_another_is_refused(
    text: TextModel, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.sessions.sessions.CLAIM_WAIT_S", 0.05)
    async with benches(text, store) as (one, other):
        one.replica.go.clear()
        first = asyncio.create_task(turn(one, "s", "slow", max_tokens=2))
        await eventually(lambda: bool(one.replica.requests))
        for refused in (await turn(other, "s", "fast"), await other.client.delete("/v1/sessions/s")):
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_conflict")
            assert refused.headers["retry-after"] == "1"
        one.replica.go.set()
        assert (await first).status_code == 200
        await idle(one)
        assert (await turn(other, "s", "fast", max_tokens=2)).status_code == 200
        assert [m["content"] for m in await history(one, "s") if m["role"] == "user"] == ["slow", "fast"]


async def test_an_answer_that_its_client_left_is_not_in_the_session(text: TextModel, store: dict[str, Any]) -> None:
    async with open_bench(text, **store) as bench:
        await turn(bench, "s", "one", max_tokens=2)
        bench.replica.go.clear()
        left = asyncio.create_task(turn(bench, "s", "left"))
        await eventually(lambda: len(bench.replica.requests) == 2)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        bench.replica.go.set()
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
        await idle(bench)
        assert len(await history(bench, "s")) == 2
        await turn(bench, "s", "again", max_tokens=2)
        assert "left" not in prompt_of(bench)


async def test_an_answer_that_failed_is_not_in_the_session(text: TextModel) -> None:
    async with open_bench(text) as bench:
        bench.replica.on_submit = lambda request, stream: bench.replica.die()
        assert (await turn(bench, "s", "one")).status_code == 503
        assert (await bench.client.get("/v1/sessions/s")).status_code == 404


async def test_two_turns_that_both_hold_the_claim_end_with_one_stored(text: TextModel, redis_server: RedisServer) -> None:
    """A store that was emptied has lost the claim."""
    store = {"store": {"url": redis_server.url}}
    async with benches(text, store) as (one, other):
        for bench in (one, other):
            bench.replica.go.clear()
        first = asyncio.create_task(turn(one, "s", "first", max_tokens=2))
        await eventually(lambda: bool(one.replica.requests))
        await one.gateway.service.sessions.store.store._client.flushall()  # type: ignore[attr-defined]
        second = asyncio.create_task(turn(other, "s", "second", max_tokens=2, stream=True))
        await eventually(lambda: bool(other.replica.requests))
        one.replica.go.set()
        assert (await first).status_code == 200
        other.replica.go.set()
        late = await second
        assert "session_conflict" in late.text
        assert "[DONE]" not in late.text
        assert (await history(one, "s"))[0]["content"] == "first"


async def test_system_messages_at_the_head_take_the_place_of_the_histories(text: TextModel) -> None:
    async with open_bench(text) as bench:
        for word in ("alpha", "beta"):
            body = {"messages": [{"role": "developer", "content": word}, user("Hi")], "metadata": {"session_id": "s"}, "max_tokens": 1}
            answer = await bench.client.post(CHAT, json=body)
            assert "x-headrace-ignored" not in answer.headers
        assert "alpha" not in prompt_of(bench)
        assert prompt_of(bench).count("Hi") == 2
        assert [m["content"] for m in await history(bench, "s") if m["role"] == "system"] == ["beta"]


async def test_tool_calls_are_kept_and_reasoning_is_not(text: TextModel) -> None:
    async with open_bench(text) as bench:
        await turn(bench, "s", "one", max_tokens=1)
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hidden thoughts"},
            {"role": "tool", "content": "noon", "tool_call_id": "c1"},
        ]
        answer = await bench.client.post(CHAT, json={"messages": messages, "max_tokens": 1}, headers={"x-session-id": "s"})
        kept = await history(bench, "s") if answer.status_code == 200 else None
        if kept is None:  # the fox's template shows no tools
            assert "tool_calls" in answer.json()["error"]["message"]
            return
        assert kept[2]["tool_calls"] == [call]
        assert "hidden" not in str(kept)


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"n": 2}, {"x-session-id": "s"}, "n"),
        (
            {"messages": [assistant("The")], "continue_final_message": True, "add_generation_prompt": False},
            {"x-session-id": "s"},
            "continue_final_message",
        ),
        ({}, {"x-session-id": "a b"}, "x-session-id"),
        ({}, {"x-session-id": ""}, "x-session-id"),
        ({"metadata": {"session_id": "x" * 129}}, {}, "metadata.session_id"),
        ({"metadata": {"session_id": "s"}}, {"x-session-id": "t"}, "metadata.session_id"),
    ],
)
async def test_what_a_session_cannot_be_is_refused(text: TextModel, fields: dict[str, Any], headers: dict[str, str], param: str) -> None:
    async with open_bench(text) as bench:
        refused = await bench.client.post(CHAT, json={"messages": [user("Hi")], **fields}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert not bench.replica.requests


async def test_a_server_without_sessions_refuses_them_by_name(text: TextModel) -> None:
    async with open_bench(text, sessions={"ttl_s": 0}) as bench:
        refused = [await turn(bench, "s", "Hi"), await bench.client.get("/v1/sessions/s")]
        assert [answer.status_code for answer in refused] == [400, 400]
        assert all("sessions.ttl_s" in answer.json()["error"]["message"] for answer in refused)
        assert (await bench.chat(max_tokens=1)).status_code == 200


async def test_another_tenants_session_is_like_none(text: TextModel, store: dict[str, Any]) -> None:
    keys = [{"key": "key-of-one", "tenant": "one"}, {"key": "key-of-two", "tenant": "two"}]
    async with open_bench(text, **store, api_keys=keys) as bench:
        await turn(bench, "s", "a secret of one", key="key-of-one", max_tokens=2)
        await turn(bench, "s", "hello", key="key-of-two", max_tokens=2)
        assert "secret" not in prompt_of(bench)
        theirs = {"authorization": "Bearer key-of-two"}
        await turn(bench, "only-one", "x", key="key-of-one", max_tokens=1)
        for method in ("GET", "DELETE"):
            found = [await bench.client.request(method, f"/v1/sessions/{name}", headers=theirs) for name in ("only-one", "nobody")]
            bodies = [answer.text.replace("only-one", "nobody") for answer in found]
            assert [answer.status_code for answer in found] == [404, 404]
            assert bodies[0] == bodies[1]
        await idle(bench)
        mine = {"authorization": "Bearer key-of-one"}
        assert (await bench.client.delete("/v1/sessions/s", headers=mine)).json() == {
            "id": "s",
            "object": "session.deleted",
            "deleted": True,
        }
        await idle(bench)
        assert (await bench.client.get("/v1/sessions/s", headers=mine)).status_code == 404
        assert (await bench.client.get("/v1/sessions/s", headers=theirs)).status_code == 200


async def test_a_session_is_over_after_its_time(text: TextModel, store: dict[str, Any]) -> None:
    async with open_bench(text, **store, sessions={"ttl_s": 0.2}) as bench:
        await turn(bench, "s", "one", max_tokens=2)
        await asyncio.sleep(0.25)
        await turn(bench, "s", "two", max_tokens=2)
        assert "one" not in prompt_of(bench)


async def test_a_session_that_is_too_long_is_refused_before_it_is_answered(text: TextModel) -> None:
    async with open_bench(text, sessions={"max_session_bytes": 400}) as bench:
        assert (await turn(bench, "s", "x" * 200, max_tokens=2)).status_code == 200
        refused = await turn(bench, "s", "y" * 200, max_tokens=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert "sessions.max_session_bytes" in refused.json()["error"]["message"]
        assert len(bench.replica.requests) == 1
    async with open_bench(text, limits={"max_messages": 3}) as bench:
        assert (await turn(bench, "s", "one", max_tokens=1)).status_code == 200
        refused = await turn(bench, "s", "two", "three", max_tokens=1)
        assert "at most 3 messages with those of the session" in refused.json()["error"]["message"]


async def test_a_store_that_is_down_slow_or_read_only_means_503_in_time_and_heals(
    text: TextModel, redis_server: RedisServer, use_shipped_patience: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    async with open_bench(text, store={"url": redis_server.url}) as bench:
        assert (await turn(bench, "s", "one", max_tokens=2)).status_code == 200
        await idle(bench)
        use_shipped_patience()

        async def timed(session: str, said: str) -> httpx2.Response:
            with machine_lateness() as lateness:
                began = loop.time()
                answer = await turn(bench, session, said, max_tokens=2)
                took_s = loop.time() - began
            assert took_s < REQUEST_WAIT_S + 0.5 + lateness.late_s
            return answer

        async def refused() -> None:
            answer = await timed("s", "two")
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"] == "1"
            assert (await turn(bench, "none", "x")).status_code == 503
            assert (await bench.chat(max_tokens=1)).status_code == 200, "a request without a session is served"

        async def changed(*command: str) -> None:
            await bench.gateway.service.sessions.store.store._client.execute_command(*command)  # type: ignore[attr-defined]

        redis_server.hang()
        await refused()
        redis_server.go_on()
        await changed("CONFIG", "SET", "maxmemory", "1")
        full = await timed("full", "x")
        assert full.status_code in (200, 503), "the store's scripts remove before they write, which Redis may let go on"
        await changed("CONFIG", "SET", "maxmemory", "0")
        await changed("REPLICAOF", "127.0.0.1", "1")
        await refused()
        await changed("REPLICAOF", "NO", "ONE")
        redis_server.stop()
        await refused()
        assert metric(bench.gateway, "headrace_session_turns_total", outcome="failed") >= 4
        redis_server.start()
        async with asyncio.timeout(20):
            while (await turn(bench, "s", "two", max_tokens=2)).status_code != 200:  # a busy machine may take it for a failure at first
                await asyncio.sleep(0.1)


async def test_a_turn_that_cannot_be_stored_ends_in_an_error(text: TextModel, redis_server: RedisServer) -> None:
    async with open_bench(text, store={"url": redis_server.url}) as bench:
        for stream in (False, True):
            bench.replica.go.clear()
            asked = asyncio.create_task(turn(bench, "s", "one", max_tokens=2, stream=stream))
            await eventually(lambda: bool(bench.replica.streams))
            redis_server.stop()
            bench.replica.go.set()
            answer = await asked
            assert answer.status_code == (200 if stream else 503)
            assert '"code":"unavailable"' in answer.text
            assert "[DONE]" not in answer.text
            redis_server.start()


async def test_what_a_stream_that_is_continued_adds_is_one_turn(text: TextModel) -> None:
    """The stream was stored whole, and its client lost the end."""
    body = {"messages": [user("one")], "stream": True, "max_tokens": 4, "ignore_eos": True}
    async with open_bench(text, timeouts={"stream_resume_s": 60}) as bench:
        await turn(bench, "s", "zero", max_tokens=2)
        headers = {"x-session-id": "s", "last-event-id": "0"}
        first = await bench.client.post(CHAT, json=body, headers=headers)
        await eventually(lambda: bench.gateway.service.kept_streams.num_writing == 0)
        second = await bench.client.post(CHAT, json=body, headers={**headers, "last-event-id": f"{first.headers['x-request-id']}/2"})
        assert second.status_code == 200, second.text
        assert first.text.endswith(second.text)
        assert [m["content"] for m in await history(bench, "s") if m["role"] == "user"] == ["zero", "one"]


async def test_the_bench_engine_ends_as_the_tests_assume(text: TextModel) -> None:
    async with open_bench(text) as bench:
        answer = await turn(bench, "s", "x")
        assert answer.json()["choices"][0]["finish_reason"] == FinishReason.STOP
        assert answer.json()["usage"]["prompt_tokens"] < MAX_MODEL_LEN
