"""Tests several servers of one model: which one gets a request, what follows a failure, and when a server is left alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from foreign_kit import DONE, FAR, ScriptedServer, event, far_models, head, listening, page, said, scripted
from gateway_kit import MODEL, TestBench, chat_body, events_of, eventually, metric, open_bench, serving
from virtual_time import virtual_loop

from headrace.gateway.upstream.foreign import session as foreign_session
from headrace.gateway.upstream.foreign import stream as foreign_stream
from headrace.gateway.upstream.foreign import upstream as foreign_upstream
from headrace.gateway.upstream.foreign.server import ForeignServer
from headrace.gateway.upstream.foreign.upstream import HttpUpstream
from headrace.policy.routing.failures import BreakerLimits, CircuitBreaker, CircuitState
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

GOOD = head() + said("good", "stop") + DONE
ERROR_500 = head("500 Internal Server Error", "text/plain")
CLOSED_PORT = 1


def upstream_of(bench: TestBench) -> HttpUpstream:
    upstream = bench.gateway.service.models.get(FAR).upstream
    assert isinstance(upstream, HttpUpstream)
    return upstream


def servers_of(bench: TestBench) -> tuple[ForeignServer, ...]:
    return upstream_of(bench).servers


def in_order(*ports: int, **fields: Any) -> list[dict[str, Any]]:
    """A model whose later servers are asked only when no earlier one takes a request."""
    (model,) = far_models(*ports, **fields)
    for order, upstream in enumerate(model["upstreams"]):
        upstream["order"] = order
    return [model]


def all_limits_known(servers: Sequence[ForeignServer]) -> bool:
    return all(server.max_model_len is not None for server in servers)


async def ask(bench: TestBench, **fields: Any) -> Any:
    return await bench.client.post("/v1/chat/completions", json=chat_body(model=FAR, **fields))


async def said_by(bench: TestBench) -> str:
    response = await ask(bench)
    assert response.status_code == 200, response.text
    content = response.json()["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


FAILURES = {
    "status 500": (ERROR_500, "server_error"),
    "no key": (head("401 Unauthorized", "text/plain"), "refused"),
    "no such model": (head("404 Not Found", "text/plain"), "refused"),
    "moderation": (head("403 Forbidden", "text/plain"), "forbidden"),
    "redirect": (head("307 Temporary Redirect", "text/plain", "location: /elsewhere"), "refused"),
    "rate limit": (head("429 Too Many Requests", "text/plain", "retry-after: 30"), "rate_limited"),
    "closed before the status": (b"", "connect"),
    "no event stream": (head("200 OK", "application/json") + b"{}", "lost"),
    "broken": (head() + b"data: garbage\n\n", "lost"),
    "an error": (head() + event(error={"message": "x"}), "lost"),
    "ended": (head() + DONE, "lost"),
    "a role, and lost": (head() + said("", role="assistant"), "lost"),
}


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("name", FAILURES)
async def test_a_request_that_one_server_fails_before_its_first_token_is_answered_by_the_next(
    text: TextModel, name: str, is_streaming: bool
) -> None:
    sent, result = FAILURES[name]
    bad, good = ScriptedServer(sent), ScriptedServer(GOOD)
    async with listening(bad, good) as ports, open_bench(text, models=in_order(*ports)) as near:
        response = await ask(near, stream=is_streaming)
        assert response.status_code == 200
        if is_streaming:
            deltas = [each["choices"][0]["delta"].get("content", "") for each in events_of(response.text)]
            assert ("".join(deltas), response.text.count("[DONE]")) == ("good", 1)
        else:
            assert response.json()["choices"][0]["message"]["content"] == "good"
        assert (len(bad.heads), len(good.heads)) == (1, 1)
        assert metric(near.gateway, "headrace_upstream_attempts_total", model=FAR, replica="foreign-0", result=result) == 1
        assert metric(near.gateway, "headrace_upstream_attempts_total", model=FAR, replica="foreign-1", result="ok") == 1
        assert metric(near.gateway, "headrace_requests_total", model=FAR, replica="foreign-1", outcome="stop") == 1


async def test_a_server_that_is_not_there_is_left_for_the_next(text: TextModel) -> None:
    good = ScriptedServer(GOOD)
    async with listening(good) as ports, open_bench(text, models=in_order(CLOSED_PORT, *ports)) as near:
        assert await said_by(near) == "good"
        first, _ = servers_of(near)
        assert not first.is_reachable
        assert await said_by(near) == "good"
        assert first.num_sent <= 1, "a server that cannot be reached is asked last"
        states = (await near.client.get("/ready")).json()
        assert states["ok"]
        assert [(each["replica"], each["ok"], each["reason"]) for each in states["replicas"]] == [
            ("foreign-0", False, "cannot be reached"),
            ("foreign-1", True, ""),
        ]


async def test_a_server_that_is_silent_before_its_first_token_is_left_for_the_next(text: TextModel) -> None:
    for pieces in ((), (head(), b": ping\n\n"), (head(), said("", role="assistant"))):
        silent, good = ScriptedServer(*pieces, hangs=True), ScriptedServer(GOOD)
        async with listening(silent, good) as ports:
            models = in_order(*ports)
            models[0]["upstreams"][0]["silence_s"] = 0.2
            async with open_bench(text, models=models) as near:
                began = virtual_loop().time()
                assert await said_by(near) == "good"
                assert virtual_loop().time() - began == pytest.approx(0.2)
                assert metric(near.gateway, "headrace_upstream_attempts_total", model=FAR, replica="foreign-0", result="lost") == 1


LIFE = {
    "nothing": b"",
    "comments": b": ping\n\n",
    "pings": b"event: ping\ndata: {}\n\n",
    "empty chunks": said(""),
    "half an event": b" ",
}


@pytest.mark.parametrize("name", LIFE)
@pytest.mark.parametrize(("silence", "limit_s"), [({}, 120.0), ({"silence_s": 7.0}, 7.0)])
async def test_a_server_may_be_silent_as_long_as_its_entry_says_and_five_times_as_long_with_signs_of_life(
    text: TextModel, name: str, silence: dict[str, float], limit_s: float
) -> None:
    server = ScriptedServer(head() + said("one "), repeat=LIFE[name], pause_s=limit_s / 10, hangs=True)
    async with scripted(text, server, **silence) as near:
        began = virtual_loop().time()
        *_, last = events_of((await ask(near, stream=True)).text)
        assert last["error"]["code"] == "unavailable"
        assert virtual_loop().time() - began == pytest.approx(limit_s * (5 if LIFE[name] else 1), rel=0.01)


async def test_a_pause_within_the_limit_breaks_no_answer_and_every_token_begins_it_anew(text: TextModel) -> None:
    quiet = ScriptedServer(head() + said("one "), *[said("and ")] * 3, said("two", "stop") + DONE, pause_s=110.0)
    alive = ScriptedServer(head() + said("one "), *[b": still here\n\n"] * 50, said("two", "stop") + DONE, pause_s=10.0)
    for server, words in ((quiet, "one and and and two"), (alive, "one two")):
        async with scripted(text, server) as near:
            assert await said_by(near) == words


async def test_no_other_server_is_asked_after_the_first_token(text: TextModel) -> None:
    broken, good = ScriptedServer(head() + said("one "), b"data: garbage\n\n"), ScriptedServer(GOOD)
    async with listening(broken, good) as ports, open_bench(text, models=in_order(*ports)) as near:
        response = await ask(near, stream=True)
        *begin, last = events_of(response.text)
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in begin) == "one "
        assert last["error"]["code"] == "unavailable"
        assert "[DONE]" not in response.text
        assert good.heads == []


async def test_what_the_client_did_wrong_is_not_asked_of_another_server(text: TextModel) -> None:
    for status in ("400 Bad Request", "413 Payload Too Large", "422 Unprocessable Entity"):
        bad, good = ScriptedServer(head(status, "application/json")), ScriptedServer(GOOD)
        async with listening(bad, good) as ports, open_bench(text, models=in_order(*ports)) as near:
            assert ((await ask(near)).status_code, good.heads) == (400, [])
            assert servers_of(near)[0].breaker.num_failures == 0


async def test_a_prompt_too_long_goes_to_a_server_with_a_longer_context_alone(text: TextModel) -> None:
    def listing(max_model_len: int) -> dict[str, bytes]:
        return {"/v1/models": page(json.dumps({"data": [{"id": MODEL, "max_model_len": max_model_len}]}).encode())}

    body = json.dumps({"error": {"type": "exceed_context_size_error", "code": 400}}).encode()
    overflow = head("400 Bad Request", "application/json") + body
    for longer, answers in ((100, False), (101, True)):
        short, long = ScriptedServer(overflow, pages=listing(100)), ScriptedServer(GOOD, pages=listing(longer))
        async with listening(short, long) as ports, open_bench(text, models=in_order(*ports)) as near:
            servers = servers_of(near)
            await eventually(partial(all_limits_known, servers))
            assert upstream_of(near).max_model_len == longer
            response = await ask(near, max_tokens=5)
            assert (response.status_code, len(long.heads)) == ((200, 1) if answers else (400, 0))
            if answers:
                assert (await ask(near, max_tokens=100)).status_code == 200
                assert len(short.heads) == 1, "so many output tokens do not fit there"
            else:
                assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_each_server_is_asked_for_its_own_name_of_the_model(text: TextModel) -> None:
    first, second = ScriptedServer(ERROR_500), ScriptedServer(GOOD)
    async with listening(first, second) as ports:
        models = in_order(*ports)
        models[0]["upstreams"][1] |= {"model": "other-name", "cache_salt": False}
        async with open_bench(text, models=models) as near:
            assert await said_by(near) == "good"
    ((asked,), (then,)) = first.bodies, second.bodies
    assert (asked.pop("model"), then.pop("model")) == (MODEL, "other-name")
    assert len(asked.pop("cache_salt")) == 32
    assert asked == then


# ---------------------------------------------------------------------------------------------------------------- the same server again


async def test_a_failure_that_may_pass_is_tried_again_at_the_only_server(text: TextModel) -> None:
    server = ScriptedServer(GOOD, before=(ERROR_500, b""))
    async with scripted(text, server) as near:
        assert await said_by(near) == "good"
        assert len(server.heads) == foreign_stream.MAX_ATTEMPTS == 3
        assert servers_of(near)[0].breaker.num_failures == 0


async def test_a_silent_server_is_not_asked_the_same_again(text: TextModel) -> None:
    server = ScriptedServer(head(), hangs=True)
    async with scripted(text, server, silence_s=0.1) as near:
        assert ((await ask(near)).status_code, len(server.heads)) == (503, 1)


async def test_a_short_retry_after_is_waited_for_and_a_long_one_is_passed_on(text: TextModel) -> None:
    limited = head("429 Too Many Requests", "text/plain", "retry-after-ms: 300")
    server = ScriptedServer(GOOD, before=(limited,))
    async with scripted(text, server) as near:
        began = virtual_loop().time()
        assert await said_by(near) == "good"
        assert 0.299 < virtual_loop().time() - began < 0.376, "up to a quarter is added at random"
    server = ScriptedServer(GOOD, before=(head("429 Too Many Requests", "text/plain", "retry-after: 30"),))
    async with scripted(text, server) as near:
        for _ in range(2):
            response = await ask(near)
            assert response.status_code == 429
            assert response.headers["retry-after"] in ("30", "31"), "rounded up"
        assert len(server.heads) == 1, "the second request was not sent: the limit is in force"
        assert metric(near.gateway, "headrace_upstream_rate_limit_seconds", model=FAR, replica="foreign-0") > 25
        assert (await near.client.get("/ready")).json()["replicas"][0]["ok"], "a rate limit is no fault"


async def test_a_provider_whose_counters_are_used_up_is_left_until_they_are_reset(text: TextModel) -> None:
    used_up = head("200 OK", "text/event-stream", "x-ratelimit-remaining-requests: 0", "x-ratelimit-reset-requests: 1m30s")
    first, second = ScriptedServer(used_up + said("first", "stop") + DONE), ScriptedServer(GOOD)
    async with listening(first, second) as ports, open_bench(text, models=in_order(*ports)) as near:
        assert [await said_by(near) for _ in range(3)] == ["first", "good", "good"]
        assert 80 < servers_of(near)[0].held_s(near.gateway.clock()) <= 90


async def test_retries_end_with_their_budget(text: TextModel) -> None:
    server = ScriptedServer(ERROR_500)
    async with scripted(text, server) as near:
        upstream_of(near)._budget.tokens = 0.0
        assert ((await ask(near)).status_code, len(server.heads)) == (503, 1)


async def test_a_client_that_leaves_during_a_pause_ends_the_attempts(text: TextModel) -> None:
    server = ScriptedServer(ERROR_500)
    async with scripted(text, server) as near:
        asking = asyncio.create_task(ask(near))
        await eventually(lambda: len(server.heads) == 1)
        asking.cancel()
        await eventually(lambda: near.gateway.service.open_requests.num_open == 0)
        await asyncio.sleep(0.6)
        assert len(server.heads) == 1
        assert servers_of(near)[0].num_open == 0


# --------------------------------------------------------------------------------------------------------------------------- the circuit


def with_short_cooldown(server: ForeignServer) -> CircuitBreaker:
    server.breaker = CircuitBreaker(BreakerLimits(max_failures=2, cooldown_s=0.3))
    return server.breaker


async def test_a_server_that_fails_several_requests_is_left_alone_and_probed_after_its_cooldown(text: TextModel) -> None:
    server = ScriptedServer(GOOD, before=(head("404 Not Found", "text/plain"),) * 2)
    async with scripted(text, server) as near:
        breaker = with_short_cooldown(servers_of(near)[0])
        assert [(await ask(near)).status_code for _ in range(3)] == [503, 503, 503]
        assert len(server.heads) == 2, "the third request was refused here"
        ready = await near.client.get("/ready")
        (state,) = ready.json()["replicas"]
        assert (ready.status_code, state["ok"], state["reason"]) == (200, False, "failed several requests in a row")
        assert metric(near.gateway, "headrace_replica_ready", model=FAR, replica="foreign-0") == 0
        assert (await near.client.get("/health")).status_code == 200
        assert metric(near.gateway, "headrace_upstream_circuit_open", model=FAR, replica="foreign-0") == 1
        await asyncio.sleep(0.35)
        assert await said_by(near) == "good"
        assert breaker.state is CircuitState.CLOSED
        assert metric(near.gateway, "headrace_replica_ready", model=FAR, replica="foreign-0") == 1


async def test_one_request_tried_again_and_again_does_not_open_the_circuit(text: TextModel) -> None:
    server = ScriptedServer(GOOD, before=(ERROR_500,) * 3)
    async with scripted(text, server) as near:
        breaker = with_short_cooldown(servers_of(near)[0])
        assert (await ask(near)).status_code == 503
        assert (len(server.heads), breaker.num_failures) == (3, 1)
        assert await said_by(near) == "good"


@pytest.mark.parametrize(
    ("answer", "status"),
    [(head("403 Forbidden", "text/plain"), 503), (head() + event(error={"message": "no", "code": 400}) + DONE, 400)],
    ids=["a provider forbids", "a server refuses in its stream"],
)
async def test_prompts_alone_do_not_open_a_circuit(text: TextModel, answer: bytes, status: int) -> None:
    server = ScriptedServer(GOOD, before=(answer,) * 5)
    async with scripted(text, server) as near:
        with_short_cooldown(servers_of(near)[0])
        assert [(await ask(near)).status_code for _ in range(5)] == [status] * 5
        assert await said_by(near) == "good"


async def test_a_probe_whose_client_leaves_lets_the_next_request_be_the_probe(text: TextModel) -> None:
    server = ScriptedServer(head(), hangs=True)
    async with scripted(text, server) as near:
        breaker = with_short_cooldown(servers_of(near)[0])
        for _ in range(2):
            breaker.fail(breaker.send(0.0), 0.0)
        asking = asyncio.create_task(ask(near))
        await eventually(lambda: len(server.heads) == 1)
        assert breaker.state is CircuitState.HALF_OPEN
        assert (await ask(near)).status_code == 503, "one probe at a time"
        asking.cancel()
        await eventually(lambda: breaker.can_send(near.gateway.clock()))
        assert len(server.heads) == 1


# ------------------------------------------------------------------------------------------------------------------- limits and load


async def test_limits_and_a_missing_model_are_learned_from_the_list_of_models(text: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    listed = {"data": [{"id": "another"}, {"id": MODEL, "meta": {"n_ctx": 4096}}]}
    server = ScriptedServer(GOOD, pages={"/v1/models": page(json.dumps(listed).encode())})
    async with scripted(text, server) as near:
        await eventually(lambda: upstream_of(near).max_model_len == 4096)
        (card,) = (await near.client.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == 4096
    server.pages["/v1/models"] = page(b'{"data": [{"id": "another"}]}')
    async with scripted(text, server) as near:
        await eventually(lambda: "does not list the model" in caplog.text)
        assert await said_by(near) == "good"
        assert (await near.client.get("/ready")).json()["replicas"][0]["ok"]


@pytest.mark.parametrize(
    "answer", [page(b"<html>"), page(b"[" * 10_000), page(b'{"data": [{"id": 5}]}'), head("401 Unauthorized"), b"", b"\x00\r\n\r\n"]
)
async def test_a_list_of_models_that_is_none_is_not_fatal(text: TextModel, answer: bytes) -> None:
    server = ScriptedServer(GOOD, pages={"/v1/models": answer})
    async with scripted(text, server) as near:
        await eventually(lambda: bool(server.gets))
        assert await said_by(near) == "good"
        assert upstream_of(near).max_model_len is None


async def test_a_server_that_comes_back_is_found_without_a_request(text: TextModel) -> None:
    server = ScriptedServer(GOOD)
    async with open_bench(text, models=far_models(CLOSED_PORT)) as near:
        await eventually(lambda: not servers_of(near)[0].is_reachable)
        assert not (await near.client.get("/ready")).json()["replicas"][0]["ok"]
        async with await asyncio.start_server(server, "127.0.0.1", CLOSED_PORT):
            await eventually(lambda: servers_of(near)[0].is_reachable, within_s=1.5 * foreign_upstream.UNREACHABLE_S)
            assert (await near.client.get("/ready")).json()["replicas"][0]["ok"]
            assert server.heads == []


async def test_requests_go_where_the_servers_own_metrics_say_that_less_is_waiting(text: TextModel) -> None:
    def metrics(running: int, waiting: int) -> dict[str, bytes]:
        names = ("vllm:num_requests_running", running), ("vllm:num_requests_waiting", waiting)
        lines = "".join([f'{name}{{engine="0",model_name="{MODEL}"}} {value}.0\n' for name, value in names])
        return {"/metrics": page(lines.encode(), "text/plain")}

    busy, idle = ScriptedServer(GOOD, pages=metrics(4, 9)), ScriptedServer(GOOD, pages=metrics(1, 0))
    async with scripted(text, busy, idle) as near:
        first, second = servers_of(near)
        await eventually(lambda: first.outstanding(near.gateway.clock()) == 13)
        await eventually(lambda: second.outstanding(near.gateway.clock()) == 1)
        for _ in range(6):
            await said_by(near)
        assert (len(busy.heads), len(idle.heads)) == (0, 6)
        assert metric(near.gateway, "headrace_upstream_reported_requests", model=FAR, replica="foreign-0", state="waiting") == 9


async def test_a_server_without_known_metrics_is_not_asked_for_them_again_before_its_next_list_of_models(text: TextModel) -> None:
    without, other = ScriptedServer(GOOD), ScriptedServer(GOOD, pages={"/metrics": page(b"process_cpu_seconds_total 3\n", "text/plain")})
    async with scripted(text, without, other):
        await eventually(lambda: "/metrics" in without.gets and "/metrics" in other.gets)
        await asyncio.sleep(foreign_upstream.MODELS_S - 5.0)
    for server in (without, other):
        assert (server.gets.count("/v1/models"), server.gets.count("/metrics")) == (1, 1)
    alone = ScriptedServer(GOOD)
    async with scripted(text, alone):
        await eventually(lambda: bool(alone.gets))
        await asyncio.sleep(10 * foreign_upstream.LOAD_S)
    assert alone.gets == ["/v1/models"], "load decides among several servers only"


async def test_servers_of_one_order_share_the_requests(text: TextModel) -> None:
    one, two = ScriptedServer(head(), hangs=True), ScriptedServer(head(), hangs=True)
    async with scripted(text, one, two) as near:
        asking = [asyncio.create_task(ask(near)) for _ in range(8)]
        await eventually(lambda: len(one.heads) + len(two.heads) == 8)
        assert (len(one.heads), len(two.heads)) == (4, 4)
        for each in asking:
            each.cancel()
        await eventually(lambda: near.gateway.service.open_requests.num_open == 0)


async def test_a_server_that_refuses_its_key_is_named_in_the_log_once(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAR_KEY", "key-of-the-server")
    server = ScriptedServer(GOOD, pages={"/v1/models": head("401 Unauthorized", "text/plain")})
    async with scripted(text, server, api_key_env="FAR_KEY"):
        await asyncio.sleep(3.5 * foreign_upstream.MODELS_S)
    assert len(server.gets) == 4
    assert caplog.text.count("is its key right?") == 1
    assert all(b"authorization: bearer key-of-the-server" in asked.lower() for asked in server.polls)
    assert "key-of-the-server" not in caplog.text


async def test_a_server_that_is_slow_to_list_its_models_still_counts_as_reachable(text: TextModel) -> None:
    server = ScriptedServer(GOOD, pages={"/v1/models": b""}, pause_get_s=3 * foreign_session.FACTS_S)
    async with scripted(text, server) as near:
        await asyncio.sleep(2 * foreign_session.FACTS_S)
        assert server.gets
        assert servers_of(near)[0].is_reachable


# ---------------------------------------------------------------------------------------------------------------------- addresses


async def test_a_name_with_a_link_local_address_is_not_connected_to(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign_session, "is_link_local", lambda host: host == "127.0.0.1")
    server = ScriptedServer(GOOD)
    async with scripted(text, server) as near:
        assert (await ask(near)).status_code == 503
        assert "link-local" in caplog.text
    assert (server.heads, server.gets) == ([], [])


# ---------------------------------------------------------------------------------------------------------------- real servers


async def test_a_draining_server_of_ours_is_left_for_the_other(text: TextModel) -> None:
    async with (
        open_bench(text) as one,
        open_bench(text) as two,
        serving(one.gateway) as first,
        serving(two.gateway) as second,
        open_bench(text, models=in_order(first, second)) as near,
    ):
        expected = await said_by(near)
        assert (len(one.replica.requests), len(two.replica.requests)) == (1, 0)
        one.gateway.service.open_requests.drain()
        assert [await said_by(near) for _ in range(3)] == [expected] * 3
        assert (len(one.replica.requests), len(two.replica.requests)) == (1, 3)
        await eventually(lambda: all(server.reported(near.gateway.clock()) is not None for server in servers_of(near)))


async def test_many_requests_over_servers_that_fail_at_random_are_answered_by_one_server_each_or_end_in_an_error(text: TextModel) -> None:
    """Whatever happens, no answer mixes two servers' tokens, and nothing is left under way."""
    draw = random.Random(11)

    def any_answers(name: str, count: int) -> tuple[bytes, ...]:
        whole = head() + b"".join([said(f"{name} ") for _ in range(3)])
        kinds = (whole + said("end", "stop") + DONE, whole, whole + b"data: garbage\n\n", ERROR_500, b"", head() + DONE)
        limited = head("429 Too Many Requests", "text/plain", "retry-after-ms: 20")
        return tuple(draw.choices((*kinds, limited), weights=(12, 1, 1, 1, 1, 1, 1), k=count))

    servers = [ScriptedServer(GOOD, before=any_answers(name, 400)) for name in ("a", "b", "c")]
    async with scripted(text, *servers) as near:
        outcomes: Counter[str] = Counter()

        async def one(number: int) -> None:
            await asyncio.sleep(number / 100)
            response = await ask(near, stream=True)
            if response.status_code != 200:
                outcomes["refused"] += 1
                assert response.status_code in (429, 503)
                return
            *events, last = events_of(response.text)
            given = "".join([each["choices"][0]["delta"].get("content", "") for each in [*events, last] if "choices" in each])
            assert len(set(given.removesuffix("end").split())) <= 1, given
            outcomes["broken" if "error" in last else "whole"] += 1
            assert ("error" in last) != given.endswith("end")
            assert ("error" in last) != ("[DONE]" in response.text)

        await asyncio.gather(*[one(number) for number in range(300)])
        assert outcomes.total() == 300
        assert outcomes["whole"] > 200
        assert outcomes["broken"] > 0
        for server in servers_of(near):
            assert server.num_open == 0
            assert server.results.total() == server.num_sent
            server.breaker.check()
        upstream_of(near)._budget.check()
