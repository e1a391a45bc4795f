"""Tests turns of a session whose answer is given again, from the response cache or under an Idempotency-Key: each is stored once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from gateway_kit import TestBench, chat_body, dial, eventually, open_bench, post, serving
from session_kit import CHAT, history, idle, prompt_of, turn, user

from headrace.core.errors import Unavailable
from headrace.gateway.cache.replays import LEASE_S
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

LAST: dict[str, Any] = {"max_tokens": 3}


async def keyed(bench: TestBench, said: str, key: str, *, session: str = "s", **fields: Any) -> httpx2.Response:
    """A turn under an Idempotency-Key."""
    headers = {"x-session-id": session, "idempotency-key": key}
    answer = await bench.client.post(CHAT, json=chat_body(messages=[user(said)], **LAST) | fields, headers=headers)
    await written(bench)
    return answer


async def written(bench: TestBench) -> None:
    """Until every answer and every claim is in its store."""
    await idle(bench)
    await eventually(
        lambda: not bench.gateway.service.stages.replays.claims and not bench.gateway.service.stages.answer_cache.num_computing
    )


async def asked(bench: TestBench, session: str = "s") -> list[str]:
    """What the user said in the session."""
    return [message["content"] for message in await history(bench, session) if message["role"] == "user"]


def is_replay(answer: httpx2.Response) -> bool:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("idempotent-replayed") == "true"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replay_stores_no_second_turn(text: TextModel, stream: bool) -> None:
    async with open_bench(text) as bench:
        answers = [await keyed(bench, "one", "a", stream=stream) for _ in range(3)]
        assert [is_replay(answer) for answer in answers] == [False, True, True]
        assert not is_replay(await keyed(bench, "two", "b", stream=stream))
        assert is_replay(await keyed(bench, "one", "a", stream=stream)), "a turn that others have followed"
        assert await asked(bench) == ["one", "two"]
        assert prompt_of(bench).count("one") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_goes_on_without_its_client_is_a_turn(text: TextModel, stream: bool) -> None:
    """Its retry is a replay, which stores nothing: the turn has to be there by then."""
    async with open_bench(text) as bench, serving(bench.gateway) as port:
        bench.replica.token_delay_s = 0.02
        body = chat_body(messages=[user("one")], **{**LAST, "max_tokens": 8}, stream=stream)
        async with dial(port) as (reader, writer):
            writer.write(post(CHAT, body, "idempotency-key: a", "x-session-id: s"))
            await eventually(lambda: bool(bench.replica.requests))
            if stream:
                await reader.readuntil(b"data: ")
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)
        await written(bench)
        retry = await keyed(bench, "one", "a", max_tokens=8, stream=stream)
        assert is_replay(retry)
        assert (len(bench.replica.requests), await asked(bench)) == (1, ["one"])
        said = (await history(bench, "s"))[1]["content"]
        if not stream:
            assert said == retry.json()["choices"][0]["message"]["content"]
        await keyed(bench, "two", "b")
        assert said in prompt_of(bench)


async def test_an_answer_whose_turn_could_not_be_stored_is_computed_again(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bench(text, cache={"enabled": True}) as bench:
        keep = bench.gateway.service.stages.sessions.keep

        async def fail(*_: object) -> None:
            raise Unavailable("gone")

        for said, temperature in (("one", 1), ("two", 0)):  # the second time the response cache has the answer
            monkeypatch.setattr(bench.gateway.service.stages.sessions, "keep", fail)
            assert (await keyed(bench, said, said, temperature=temperature)).status_code == 503
            monkeypatch.setattr(bench.gateway.service.stages.sessions, "keep", keep)
            assert not is_replay(await keyed(bench, said, said, temperature=temperature))
            assert is_replay(await keyed(bench, said, said, temperature=temperature))
        assert await asked(bench) == ["one", "two"]
        assert len(bench.replica.requests) == 3


async def test_a_retry_whose_first_answer_was_lost_is_the_same_turn(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that dies behind the turn's storing and before the answer's, or whose store of answers fails."""
    async with open_bench(text) as bench:
        await keyed(bench, "zero", "z")
        with monkeypatch.context() as lost:
            lost.setattr("headrace.gateway.stores.lease.EntryLease.replace", lambda *_, ttl_s: asyncio.sleep(0))
            assert not is_replay(await keyed(bench, "one", "a"))
        await asyncio.sleep(LEASE_S)
        assert await asked(bench) == ["zero", "one"]
        assert not is_replay(await keyed(bench, "one", "a"))
        assert prompt_of(bench).count("one") == 1
        assert await asked(bench) == ["zero", "one"]
        assert not is_replay(await keyed(bench, "one", "b"))
        assert await asked(bench) == ["zero", "one", "one"], "another key is another turn"


async def test_a_key_is_of_one_session(text: TextModel) -> None:
    async with open_bench(text) as bench:
        await keyed(bench, "one", "a")
        for session in ("t", "s"):
            refused = await keyed(bench, "one", "a", session=session)
            assert refused.status_code == (422 if session == "t" else 200), refused.text
        assert (await bench.client.get("/v1/sessions/t")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cached_answer_is_a_turn_too(text: TextModel, stream: bool) -> None:
    async with open_bench(text, cache={"enabled": True}) as bench:
        found = []
        for session in ("s", "t"):
            answer = await turn(bench, session, "one", temperature=0, stream=stream, **LAST)
            await written(bench)
            found.append(answer.headers["x-headrace-cache"])
        assert found == ["miss", "hit"]
        assert await history(bench, "s") == await history(bench, "t")
        assert (await turn(bench, "t", "one", temperature=0, **LAST)).headers["x-headrace-cache"] == "miss", "the history is another"
        assert await asked(bench, "t") == ["one", "one"]
