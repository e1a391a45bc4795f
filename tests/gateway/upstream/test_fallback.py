"""Tests a model with replicas and foreign servers: ours first, theirs where none of ours takes a request, and never both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from foreign_kit import DONE, ScriptedServer, head, listening, said
from gateway_kit import (
    MAX_MODEL_LEN,
    MODEL,
    SAID,
    FakeReplica,
    TestBench,
    chat_body,
    events_of,
    eventually,
    gateway_config,
    metric,
    open_bench,
    some_replicas,
)
from virtual_time import virtual_loop

from headrace.core.errors import ConfigError, Overloaded, RequestTooLarge, Unavailable
from headrace.core.request import EngineRequest
from headrace.gateway.upstream.fallback import FallbackUpstream
from headrace.gateway.upstream.foreign.facts import ListedModel
from headrace.gateway.upstream.foreign.upstream import HttpUpstream
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

THEIRS = head() + said("theirs", "stop") + DONE


def both_models(*ports: int, num_replicas: int = 2, **fields: Any) -> list[dict[str, Any]]:
    (model,) = some_replicas(num_replicas)
    upstreams = [{"url": f"http://127.0.0.1:{port}/v1", "model": "far", **fields, "order": order} for order, port in enumerate(ports)]
    return [model | {"upstreams": upstreams}]


@asynccontextmanager
async def both(text: TextModel, *servers: ScriptedServer, num_replicas: int = 2, **changes: Any) -> AsyncIterator[TestBench]:
    async with listening(*servers) as ports, open_bench(text, models=both_models(*ports, num_replicas=num_replicas), **changes) as bench:
        yield bench


def full(request: EngineRequest, stream: ReplicaStream) -> None:
    stream.reject(Overloaded("full", retry_after_s=1))


def lost(request: EngineRequest, stream: ReplicaStream) -> None:
    stream.fail(Unavailable("gone"))


async def content(bench: TestBench, **fields: Any) -> str:
    response = await bench.chat(**fields)
    assert response.status_code == 200, response.text
    said_there = response.json()["choices"][0]["message"]["content"]
    assert isinstance(said_there, str)
    return said_there


def silence(bench: TestBench) -> None:
    for replica in bench.replicas.values():
        replica.state = ConnectionState.DOWN


async def test_replicas_answer_as_long_as_one_takes_the_request(text: TextModel) -> None:
    server = ScriptedServer(THEIRS)
    async with both(text, server) as bench:
        first, second = bench.replicas.values()
        first.on_submit = full
        assert [await content(bench) for _ in range(6)] == [SAID] * 6
        assert len(second.requests) == 6
        assert not server.bodies


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_what_every_replica_rejects_is_answered_by_a_foreign_server(text: TextModel, tmp_path: Path, is_streaming: bool) -> None:
    server, log = ScriptedServer(THEIRS), tmp_path / "requests.log"
    async with both(text, server, request_log=str(log)) as bench:
        for replica in bench.replicas.values():
            replica.on_submit = full
        response = await bench.chat(stream=is_streaming, temperature=0.5)
        assert response.status_code == 200
        if is_streaming:
            assert (
                "".join(each["choices"][0]["delta"].get("content") or "" for each in events_of(response.text) if each["choices"])
                == "theirs"
            )
        else:
            assert response.json()["choices"][0]["message"]["content"] == "theirs"
        assert sum(len(replica.requests) for replica in bench.replicas.values()) == 2
        assert (server.bodies[0]["model"], server.bodies[0]["temperature"]) == ("far", 0.5)
        assert metric(bench.gateway, "headrace_requests_total", model=MODEL, replica="foreign-0", outcome="stop") == 1
        assert metric(bench.gateway, "headrace_upstream_attempts_total", model=MODEL, replica="foreign-0", result="ok") == 1
        await eventually(lambda: log.exists() and bool(log.read_text()))
    (line,) = [json.loads(each) for each in log.read_text().splitlines()]
    assert (line["outcome"], line["replica"]) == ("completed", "foreign-0")


async def test_with_no_replica_ready_the_foreign_servers_answer_in_their_order(text: TextModel) -> None:
    first, second = ScriptedServer(THEIRS), ScriptedServer(head() + said("second", "stop") + DONE)
    async with both(text, first, second) as bench:
        silence(bench)
        assert await content(bench) == "theirs"
        first.pieces = (head("500 Internal Server Error", "text/plain"),)
        assert await content(bench) == "second"
        for replica in bench.replicas.values():
            replica.state = ConnectionState.CONNECTED
        assert await content(bench) == SAID


async def test_before_any_replica_has_connected_the_foreign_servers_answer(text: TextModel) -> None:
    async with both(text, ScriptedServer(THEIRS), num_replicas=1) as bench:
        bench.replica.info, bench.replica.state = None, ConnectionState.DOWN
        assert await content(bench) == "theirs"


async def test_a_request_lost_before_its_first_token_falls_back_at_once(text: TextModel) -> None:
    """It does not wait for the replica to be started again, as it would without foreign servers."""
    async with both(text, ScriptedServer(THEIRS), num_replicas=1, timeouts={"failover_s": 60}) as bench:
        bench.replica.on_submit = lost
        bench.replica.state = ConnectionState.CONNECTED
        began = virtual_loop().time()
        assert await content(bench) == "theirs"
        assert virtual_loop().time() == began


async def test_a_request_lost_before_its_first_token_goes_to_another_replica_first(text: TextModel) -> None:
    server = ScriptedServer(THEIRS)
    async with both(text, server, timeouts={"failover_s": 60}) as bench:
        for replica in bench.replicas.values():
            replica.on_submit = lambda request, stream, replica=replica: lose_once(replica, stream)
        assert await content(bench) == SAID
        assert not server.bodies


def lose_once(replica: FakeReplica, stream: ReplicaStream) -> None:
    replica.on_submit = None
    stream.fail(Unavailable("gone"))


async def test_a_stream_that_has_begun_never_falls_back(text: TextModel) -> None:
    """Text of another model cannot follow ours: the stream ends in a retryable error."""
    server = ScriptedServer(THEIRS)
    async with both(text, server, num_replicas=1, timeouts={"failover_s": 0.2}) as bench:
        replica = bench.replica
        replica.token_delay_s = 0.02
        asking = asyncio.create_task(bench.client.post("/v1/chat/completions", json=chat_body(stream=True)))
        await eventually(lambda: bool(replica.requests))
        await asyncio.sleep(0.1)
        replica.die()
        events = events_of((await asking).text)
        assert events[-1]["error"]["code"]
        assert not server.bodies
        assert "theirs" not in str(events)


async def test_when_the_foreign_servers_fail_too_the_client_gets_a_retryable_error(text: TextModel) -> None:
    server = ScriptedServer(head("500 Internal Server Error", "text/plain"))
    async with both(text, server, num_replicas=1) as bench:
        bench.replica.on_submit = full
        assert (await bench.chat()).status_code == 503


async def test_what_a_foreign_server_cannot_take_keeps_our_own_answer(text: TextModel) -> None:
    server = ScriptedServer(THEIRS)
    async with both(text, server, num_replicas=1) as bench:
        bench.replica.on_submit = full
        assert (await bench.complete(prompt_logprobs=1, max_tokens=1)).status_code == 429
        bench.replica.on_submit = lambda request, stream: stream.reject(RequestTooLarge("max_tokens", "blocks", 5))
        assert (await bench.chat()).status_code == 413
        assert not server.bodies


@pytest.mark.parametrize("length", [MAX_MODEL_LEN + 1, 16, None])
async def test_what_is_too_long_for_the_replicas_goes_where_the_context_is_longer(text: TextModel, length: int | None) -> None:
    """length: what the foreign server's list says of its context; None: nothing"""
    server = ScriptedServer(THEIRS)
    async with both(text, server, num_replicas=1) as bench:
        upstream = bench.gateway.service.models.get(MODEL).upstream
        assert isinstance(upstream, FallbackUpstream)
        assert isinstance(upstream.foreign, HttpUpstream)
        upstream.foreign.servers[0].listed = ListedModel(True, length)
        is_longer = length is not None and length > MAX_MODEL_LEN
        assert upstream.max_model_len == (length if is_longer else MAX_MODEL_LEN)
        long = await bench.chat(messages=[{"role": "user", "content": "x y z " * MAX_MODEL_LEN}])
        bench.replica.on_submit = lambda request, stream: stream.reject(RequestTooLarge("max_tokens", "blocks", 5))
        large = await bench.chat()
        assert [long.status_code, large.status_code] == ([200, 200] if is_longer else [400, 413])
        assert len(server.bodies) == (2 if is_longer else 0)
        assert not bench.replica.num_open


async def test_several_prompts_fall_back_together(text: TextModel) -> None:
    answer = head() + b"".join(
        b"data: " + json.dumps({"choices": [{"index": index, "text": f"t{index}", "finish_reason": "stop"}]}).encode() + b"\n\n"
        for index in (0, 1)
    )
    async with both(text, ScriptedServer(answer + DONE)) as bench:
        for replica in bench.replicas.values():
            replica.on_submit = full
        response = await bench.complete(prompt=["a", "b"])
        assert [choice["text"] for choice in response.json()["choices"]] == ["t0", "t1"]
        assert not any(replica.num_open for replica in bench.replicas.values())


async def test_a_foreign_server_that_takes_its_time_gets_it(text: TextModel) -> None:
    """Meanwhile the client gets comment lines, and the stream is asked for events again and again."""
    server = ScriptedServer(head(), said("the"), said("irs", "stop"), DONE, pause_s=0.1)
    async with both(text, server, num_replicas=1) as bench:
        bench.gateway.service.pipeline.watch.ping_s = 0.02
        bench.replica.on_submit = full
        events = events_of((await bench.chat(stream=True)).text)
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"]) == "theirs"


async def test_a_client_that_leaves_during_the_fallback_leaves_nothing_open(text: TextModel) -> None:
    server = ScriptedServer(head(), hangs=True)
    async with both(text, server, num_replicas=1) as bench:
        bench.replica.on_submit = full
        asking = asyncio.create_task(bench.chat(stream=True))
        await eventually(lambda: bool(server.bodies))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)


async def test_both_are_listed_and_either_makes_the_model_ready(text: TextModel) -> None:
    async with both(text, ScriptedServer(THEIRS)) as bench:
        silence(bench)
        ready = await bench.client.get("/ready", params={"model": MODEL})
        assert (ready.status_code, [row["replica"] for row in ready.json()["replicas"]]) == (200, ["r0", "r1", "foreign-0"])
        tokens = await bench.client.post("/tokenize", json={"model": MODEL, "prompt": "Hello"})
        assert tokens.json()["count"] > 0


async def test_foreign_servers_stay_behind_replicas_that_change(text: TextModel) -> None:
    """An alias is another value for later requests; so are other foreign servers, which open the model anew."""
    server, other = ScriptedServer(THEIRS), ScriptedServer(head() + said("other", "stop") + DONE)
    async with listening(server, other) as (port, other_port), open_bench(text, models=both_models(port)) as bench:
        for changed, answer in ((both_models(port)[0] | {"aliases": ["b"]}, "theirs"), (both_models(other_port)[0], "other")):
            await bench.reloader.reload(partial(gateway_config, models=[changed]))
            bench.reloader.check()
            assert await content(bench) == SAID
            silence(bench)
            assert await content(bench) == answer
            assert metric(bench.gateway, "headrace_upstream_attempts_total", model=MODEL, replica="foreign-0", result="ok") == 1
            for replica in bench.replicas.values():
                replica.state = ConnectionState.CONNECTED


@pytest.mark.pure
def test_replicas_and_foreign_servers_have_different_names() -> None:
    with pytest.raises(ConfigError, match=r"upstreams\[0\]\.name: 'r1' is the name of one of this model's replicas"):
        gateway_config(models=both_models(9, name="r1"))
    with pytest.raises(ConfigError, match=r"models\[0\]\.folder"):
        gateway_config(models=[both_models(9)[0] | {"folder": ""}])
