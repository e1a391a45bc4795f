"""Tests sessions over HTTP: what the model reads, what is kept, what is refused; on a file and on a real Redis, two gateways with one
store.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MAX_MODEL_LEN, eventually, metric, open_bench
from scripted_store import script_sessions
from session_kit import CHAT, assistant, benches, history, idle, prompt_of, text_of, turn, user

from headrace.core.update import FinishReason
from headrace.gateway.generation.stages import session as stage
from headrace.gateway.sessions import sessions
from headrace.gateway.sessions.sessions import CLAIM_CHECK_S, CLAIM_WAIT_S, LEASE_S
from headrace.gateway.stores.guard import MAX_UNANSWERED, REQUEST_WAIT_S, RETRY_S
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop


@pytest.fixture(params=["file", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "file":
        return {"state": str(tmp_path)}
    return {"store": {"url": request.getfixturevalue("redis_url")}}


@pytest.mark.socket
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


@pytest.mark.socket
async def test_a_session_outlives_its_gateway(text: TextModel, store: dict[str, Any]) -> None:
    for said in ("one", "two"):
        async with open_bench(text, **store) as bench:
            await turn(bench, "s", said, max_tokens=2)
            assert len(await history(bench, "s")) == (2 if said == "one" else 4)


@pytest.mark.socket
async def test_no_turn_is_lost_where_two_gateways_are_asked_at_once(text: TextModel, store: dict[str, Any]) -> None:
    async with benches(text, store) as opened:
        asked = [turn(opened[number % 2], "s", f"say {number}", max_tokens=2) for number in range(6)]
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} <= {200, 409}
        kept = [message["content"] for message in await history(opened[0], "s") if message["role"] == "user"]
        assert sorted(kept) == [f"say {number}" for number, answer in enumerate(answers) if answer.status_code == 200]


async def test_a_turn_that_waits_half_a_second_for_another_is_refused(text: TextModel, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with benches(text, {"state": str(tmp_path)}) as (one, other):
        one.replica.go.clear()
        first = asyncio.create_task(turn(one, "s", "slow", max_tokens=2))
        await eventually(lambda: bool(one.replica.requests))
        for asked in (turn(other, "s", "fast"), other.client.delete("/v1/sessions/s")):
            began = loop.time()
            refused = await asked
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_conflict")
            assert refused.headers["retry-after"] == "1"
            assert CLAIM_WAIT_S <= loop.time() - began < CLAIM_WAIT_S + CLAIM_CHECK_S
        waiting = asyncio.create_task(turn(other, "s", "fast", max_tokens=2))
        await asyncio.sleep(CLAIM_WAIT_S / 2)
        one.replica.go.set()
        assert (await first).status_code == 200
        assert (await waiting).status_code == 200, "one that ends meanwhile is followed"
        assert [m["content"] for m in await history(one, "s") if m["role"] == "user"] == ["slow", "fast"]


async def test_the_turn_of_a_gateway_that_died_is_over_after_its_lease(text: TextModel, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with benches(text, {"state": str(tmp_path)}) as (one, other):
        one.replica.go.clear()
        began = loop.time()
        first = asyncio.create_task(turn(one, "s", "first", max_tokens=2))
        await asyncio.sleep(3 * LEASE_S)
        assert (await turn(other, "s", "second")).status_code == 409, "a living gateway renews its claim"
        await asyncio.sleep(began + 4 * LEASE_S - loop.time() + 0.001)  # just renewed
        store = script_sessions(one)
        store.hang()  # as a dead one writes nothing
        await asyncio.sleep(LEASE_S - CLAIM_WAIT_S - 0.1)
        assert (await turn(other, "s", "second")).status_code == 409
        await asyncio.sleep(0.1)
        assert (await turn(other, "s", "second", max_tokens=2)).status_code == 200
        store.go_on()
        one.replica.go.set()
        assert "session_conflict" in (await first).text
        assert [m["content"] for m in await history(other, "s") if m["role"] == "user"] == ["second"]


@pytest.mark.socket
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


async def test_two_turns_that_both_hold_the_claim_end_with_one_stored(text: TextModel, tmp_path: Path) -> None:
    """A store that was emptied has lost the claim."""
    async with benches(text, {"state": str(tmp_path)}) as (one, other):
        for bench in (one, other):
            bench.replica.go.clear()
        first = asyncio.create_task(turn(one, "s", "first", max_tokens=2))
        await eventually(lambda: bool(one.replica.requests))
        assert await one.gateway.service.stages.sessions.store.store.purge("default") == 1
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


@pytest.mark.socket
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


async def test_a_session_is_over_after_its_time(text: TextModel) -> None:
    async with open_bench(text, sessions={"ttl_s": 60}) as bench:
        await turn(bench, "s", "one", max_tokens=2)
        await asyncio.sleep(59)
        await turn(bench, "s", "two", max_tokens=2)
        assert "one" in prompt_of(bench)
        await asyncio.sleep(59)
        assert (await bench.client.get("/v1/sessions/s")).status_code == 200, "the last turn counts"
        await asyncio.sleep(1)
        await turn(bench, "s", "three", max_tokens=2)
        assert "one" not in prompt_of(bench)


async def test_a_session_that_is_too_long_is_refused_before_it_is_answered(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sessions, stage):
        monkeypatch.setattr(module, "MAX_SESSION_BYTES", 400)
    async with open_bench(text) as bench:
        assert (await turn(bench, "s", "x" * 200, max_tokens=2)).status_code == 200
        refused = await turn(bench, "s", "y" * 200, max_tokens=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert "a session of at most 400 bytes" in refused.json()["error"]["message"]
        assert len(bench.replica.requests) == 1
    monkeypatch.setattr(stage, "MAX_MESSAGES", 3)
    async with open_bench(text) as bench:
        assert (await turn(bench, "s", "one", max_tokens=1)).status_code == 200
        refused = await turn(bench, "s", "two", "three", max_tokens=1)
        assert "at most 3 messages with those of the session" in refused.json()["error"]["message"]


async def test_a_store_that_hangs_fails_or_takes_no_writes_means_503_in_time_and_heals(text: TextModel) -> None:
    loop = asyncio.get_running_loop()
    async with open_bench(text) as bench:
        assert (await turn(bench, "s", "one", max_tokens=2)).status_code == 200
        await idle(bench)
        store = script_sessions(bench)

        async def refused(seconds: float) -> None:
            began = loop.time()
            answer = await turn(bench, "s", "two", max_tokens=2)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
            assert loop.time() - began == pytest.approx(seconds)
            assert (await bench.chat(max_tokens=1)).status_code == 200, "a request without a session is served"

        store.hang()
        for number in range(MAX_UNANSWERED + 2):
            await refused(REQUEST_WAIT_S if number < MAX_UNANSWERED else 0.0)
        store.go_on()
        await asyncio.sleep(RETRY_S)
        store.write_failure = "READONLY"
        await refused(0.0)
        store.failure = "down"
        await refused(0.0)
        assert (await bench.client.get("/v1/sessions/s")).status_code == 503
        assert metric(bench.gateway, "headrace_session_turns_total", outcome="failed") == MAX_UNANSWERED + 5
        store.go_on()
        assert (await turn(bench, "s", "two", max_tokens=2)).status_code == 200


async def test_a_turn_that_cannot_be_stored_ends_in_an_error_and_costs_nothing(text: TextModel, tmp_path: Path) -> None:
    log, tiers = tmp_path / "log", {"standard": {"daily_tokens": 100_000}}
    async with open_bench(text, request_log=str(log), tiers=tiers) as bench:
        store = script_sessions(bench)
        for stream in (False, True):
            bench.replica.go.clear()
            asked = asyncio.create_task(turn(bench, "s", "one", max_tokens=2, stream=stream))
            await eventually(lambda: bool(bench.replica.streams))
            store.failure = "down"
            bench.replica.go.set()
            answer = await asked
            assert answer.status_code == (200 if stream else 503)
            assert '"code":"unavailable"' in answer.text
            assert "[DONE]" not in answer.text
            store.go_on()
            await idle(bench)
        assert (await bench.client.get("/v1/sessions/s")).status_code == 404
        stored = await turn(bench, "s", "one", max_tokens=2)
        assert int(stored.headers["x-ratelimit-remaining-tokens"]) == 100_000 - stored.json()["usage"]["prompt_tokens"] - 2
    counted = [json.loads(line).get("completion_tokens") for line in log.read_text().splitlines() if CHAT in line]
    assert counted == [0, 0, 2]


async def test_what_a_stream_that_is_continued_adds_is_one_turn(text: TextModel) -> None:
    """The stream was stored whole, and its client lost the end."""
    body = {"messages": [user("one")], "stream": True, "max_tokens": 4, "ignore_eos": True}
    async with open_bench(text) as bench:
        await turn(bench, "s", "zero", max_tokens=2)
        headers = {"x-session-id": "s", "last-event-id": "0"}
        first = await bench.client.post(CHAT, json=body, headers=headers)
        await eventually(lambda: bench.gateway.service.stages.kept_streams.num_writing == 0)
        second = await bench.client.post(CHAT, json=body, headers={**headers, "last-event-id": f"{first.headers['x-request-id']}/2"})
        assert second.status_code == 200, second.text
        assert first.text.endswith(second.text)
        assert [m["content"] for m in await history(bench, "s") if m["role"] == "user"] == ["zero", "one"]


async def test_the_bench_engine_ends_as_the_tests_assume(text: TextModel) -> None:
    async with open_bench(text) as bench:
        answer = await turn(bench, "s", "x")
        assert answer.json()["choices"][0]["finish_reason"] == FinishReason.STOP
        assert answer.json()["usage"]["prompt_tokens"] < MAX_MODEL_LEN
