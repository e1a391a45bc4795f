"""Tests that a request's wishes of models and servers hold at the running gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from foreign_kit import DONE, FAR, HELLO, ScriptedServer, head, listening, said, scripted
from gateway_kit import MODEL, SAID, TestBench, eventually, open_bench, snapshot, some_replicas

from headrace.core.errors import ConfigError, Overloaded
from headrace.core.request import EngineRequest, PriorityClass
from headrace.gateway.config import config_from
from headrace.gateway.generation.stages.model_choice import wished_queue
from headrace.gateway.upstream.fallback import FallbackUpstream
from headrace.gateway.upstream.foreign.facts import ListedModel
from headrace.gateway.upstream.foreign.upstream import HttpUpstream
from headrace.gateway.upstream.own.upstream import TokenUpstream
from headrace.policy.routing.wishes import RoutingWishes
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

OTHER = "cub"
WORDS = "The quick brown fox jumps over the lazy dog. " * 2
BROKEN = head("500 Internal Server Error", "text/plain")


def saying(word: str) -> ScriptedServer:
    return ScriptedServer(head() + said(word, "stop") + DONE)


async def ask(bench: TestBench, model: str, **fields: Any) -> httpx2.Response:
    return await bench.client.post("/v1/chat/completions", json={"model": model, "messages": HELLO, **fields})


async def answer(bench: TestBench, model: str, **provider: Any) -> str:
    response = await ask(bench, model, provider=provider)
    assert response.status_code == 200, response.text
    content = response.json()["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


# ---------------------------------------------------------------------------------------------------------------- a model's servers


async def test_the_named_servers_answer_in_the_named_order(text: TextModel) -> None:
    servers = saying("zero"), saying("one"), saying("two")
    async with scripted(text, *servers) as bench:
        assert {await answer(bench, FAR, order=["foreign-2", "foreign-0"]) for _ in range(8)} == {"two"}
        assert {await answer(bench, FAR, only=["foreign-1"]) for _ in range(8)} == {"one"}
        assert {await answer(bench, FAR, ignore=["foreign-0", "foreign-1"]) for _ in range(8)} == {"two"}
        assert {await answer(bench, FAR, only=["foreign-0", "foreign-1"], ignore=["foreign-0"]) for _ in range(8)} == {"one"}
        bodies = [body for server in servers for body in server.bodies]
        assert all("provider" not in body for body in bodies)
        servers[2].pieces = (BROKEN,)
        assert await answer(bench, FAR, order=["foreign-2", "foreign-0"]) == "zero"
        servers[0].pieces = (BROKEN,)
        assert await answer(bench, FAR, order=["foreign-2", "foreign-0"]) == "one", "those beside the order are asked last"
        num_before = len(servers[1].bodies)
        refused = await ask(bench, FAR, provider={"order": ["foreign-2", "foreign-0"], "allow_fallbacks": False})
        assert (refused.status_code, len(servers[1].bodies)) == (503, num_before)


async def test_without_order_and_fallbacks_one_server_is_asked(text: TextModel) -> None:
    servers = ScriptedServer(BROKEN), ScriptedServer(BROKEN)
    async with scripted(text, *servers) as bench:
        assert (await ask(bench, FAR, provider={"allow_fallbacks": False})).status_code == 503
        assert sorted(bool(server.bodies) for server in servers) == [False, True]


@pytest.mark.parametrize(
    ("provider", "param", "named"),
    [
        ({"order": ["openai"]}, "provider.order", "foreign-0, foreign-1"),
        ({"ignore": ["foreign-0", "headrace"]}, "provider.ignore", "foreign-0, foreign-1"),
        ({"ignore": ["foreign-0", "foreign-1"]}, "provider.ignore", "at least one server"),
        ({"only": ["foreign-0"], "ignore": ["foreign-0"]}, "provider.only", "at least one server"),
    ],
)
async def test_a_server_that_there_is_not_is_refused(text: TextModel, provider: dict[str, Any], param: str, named: str) -> None:
    servers = saying("zero"), saying("one")
    async with scripted(text, *servers) as bench:
        error = (refused := await ask(bench, FAR, provider=provider)).json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert named in error["message"]
        assert not any(server.bodies for server in servers)


def full(request: EngineRequest, stream: ReplicaStream) -> None:
    stream.reject(Overloaded("full", retry_after_s=1))


async def test_foreign_servers_may_be_asked_before_our_engines_or_not_at_all(text: TextModel) -> None:
    servers = saying("zero"), saying("one")
    async with listening(*servers) as ports:
        (model,) = some_replicas(1)
        upstreams = [{"url": f"http://127.0.0.1:{port}/v1", "order": order} for order, port in enumerate(ports)]
        async with open_bench(text, models=[{**model, "upstreams": upstreams}]) as bench:
            assert await answer(bench, MODEL) == SAID
            assert await answer(bench, MODEL, order=["foreign-1"]) == "one"
            assert await answer(bench, MODEL, ignore=["headrace"]) == "zero"
            assert await answer(bench, MODEL, order=["headrace", "foreign-1"]) == SAID
            assert len(bench.replica.requests) == 2
            servers[1].pieces = (BROKEN,)
            assert await answer(bench, MODEL, order=["foreign-1", "headrace"]) == SAID
            assert await answer(bench, MODEL, order=["foreign-1", "foreign-0"], allow_fallbacks=False) == "zero"
            bench.replica.on_submit = full
            assert await answer(bench, MODEL) == "zero"
            assert await answer(bench, MODEL, order=["foreign-1", "headrace"]) == "zero", "those beside the order follow our engines"
            for provider in ({"only": ["headrace"]}, {"allow_fallbacks": False}, {"order": ["headrace"], "allow_fallbacks": False}):
                assert (await ask(bench, MODEL, provider=provider)).status_code == 429


async def test_a_full_queue_of_ours_refuses_no_request_for_foreign_servers(text: TextModel) -> None:
    async with listening(saying("zero")) as (port,):
        (model,) = some_replicas(1)
        models = [{**model, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]
        async with open_bench(text, models=models, admission={"max_wait_s": 5.0}) as bench:
            load_of(bench)
            assert (await ask(bench, MODEL)).status_code == 429
            assert await answer(bench, MODEL, ignore=["headrace"]) == "zero"
            assert await answer(bench, MODEL, order=["foreign-0"]) == "zero"


FAR_FIRST: dict[str, Any] = {"provider": {"order": ["foreign-0", "headrace"]}}


@asynccontextmanager
async def both(text: TextModel, server: ScriptedServer, **changes: Any) -> AsyncIterator[TestBench]:
    """One model with a replica and a foreign server, and one with a replica."""
    async with listening(server) as (port,):
        fox, cub = two_models()
        models = [fox | {"upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}], **changes}, cub]
        async with open_bench(text, models=models, admission={"max_wait_s": 5.0}) as bench:
            yield bench


@pytest.mark.parametrize("stream", [False, True])
async def test_our_queue_refuses_a_request_whose_foreign_servers_failed(text: TextModel, stream: bool) -> None:
    server = ScriptedServer(BROKEN)
    async with both(text, server) as bench:
        load_of(bench)
        refused = await ask(bench, MODEL, stream=stream, **FAR_FIRST)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert (refused.headers["retry-after"], refused.headers["x-headrace-reason"]) == ("19", "refused")
        assert server.bodies
        assert not bench.replica.requests


async def test_our_queue_refuses_a_request_that_no_foreign_server_takes(text: TextModel) -> None:
    """Before its prompt is read."""
    server = saying("zero")
    async with both(text, server) as bench:
        load_of(bench)
        form = {"prompt_logprobs": 1, "max_tokens": 1, **FAR_FIRST}
        pool = bench.gateway.service.text_pool
        before = pool.reading()
        assert (await bench.complete(**form)).status_code == 429
        upstream = bench.gateway.service.models.get(MODEL).upstream
        assert isinstance(upstream, FallbackUpstream)
        assert isinstance(upstream.foreign, HttpUpstream)
        upstream.foreign.servers[0].is_reachable = False
        assert (await ask(bench, MODEL, **FAR_FIRST)).status_code == 429
        assert (await ask(bench, MODEL, provider={"ignore": ["headrace"]})).status_code == 200, "our engines never answer it"
        upstream.foreign.servers[0].is_reachable = True
        assert (pool.reading(), bench.replica.requests) == (before, [])
        assert await answer(bench, MODEL, **FAR_FIRST["provider"]) == "zero"


async def test_whether_a_foreign_server_is_alive_is_asked_of_no_replica(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with both(text, saying("zero")) as bench:
        model = bench.gateway.service.models.get(MODEL)
        call: Any = SimpleNamespace(parsed=SimpleNamespace(routing=RoutingWishes(order=("foreign-0", "headrace"))))
        with monkeypatch.context() as patched:
            patched.delattr(TokenUpstream, "replicas")
            assert wished_queue(call, model) is None


async def test_after_foreign_servers_a_busy_model_has_its_fallback_or_lets_the_request_wait(text: TextModel) -> None:
    for fallbacks, reason, model in (({}, "queued", MODEL), ({"busy": [OTHER]}, "fallback", OTHER)):
        async with both(text, ScriptedServer(BROKEN), fallbacks=fallbacks) as bench:
            load_of(bench, num_running=4, num_waiting=11)
            answered = await ask(bench, MODEL, **FAR_FIRST)
            assert (answered.status_code, answered.json()["model"]) == (200, model), answered.text
            assert (answered.headers["x-headrace-model"], answered.headers["x-headrace-reason"]) == (model, reason)


async def test_a_request_that_left_a_busy_model_for_a_fallback_in_vain_is_not_told_of_a_full_queue(text: TextModel) -> None:
    async with both(text, ScriptedServer(BROKEN), fallbacks={"busy": [OTHER]}) as bench:
        load_of(bench, num_running=4, num_waiting=11)
        bench.replicas[f"of-{OTHER}"].on_submit = full
        refused = await ask(bench, MODEL, **FAR_FIRST)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        message = "The queue of the model fox is long; try again later. Its fallback cub did not answer either."
        assert refused.json()["error"]["message"] == message


async def test_after_foreign_servers_a_request_waits_for_our_engines_until_it_is_sent(text: TextModel) -> None:
    seen: list[int] = []
    async with both(text, ScriptedServer(BROKEN)) as bench:
        unsent = bench.gateway.service.models.get(MODEL).unsent
        bench.replica.on_submit = lambda request, stream: seen.append(unsent.num_requests(PriorityClass.BATCH))
        assert await answer(bench, MODEL, **FAR_FIRST["provider"]) == SAID
        assert (seen, unsent.num_requests(PriorityClass.BATCH)) == ([1], 0)


async def test_our_queue_does_not_judge_a_request_that_only_foreign_servers_can_take(text: TextModel) -> None:
    """It is too long for our engines, and the server beside the order answers in their place."""
    seen: list[int] = []

    def answered(body: dict[str, Any]) -> bytes:
        seen.append(bench.gateway.service.models.get(MODEL).unsent.num_requests(PriorityClass.BATCH))
        return head() + said("one", "stop") + DONE

    async with listening(ScriptedServer(BROKEN), ScriptedServer(answer=answered)) as ports:
        (model,) = some_replicas(1)
        upstreams = [{"url": f"http://127.0.0.1:{port}/v1"} for port in ports]
        async with open_bench(text, models=[{**model, "upstreams": upstreams}], admission={"max_wait_s": 5.0}) as bench:
            upstream = bench.gateway.service.models.get(MODEL).upstream
            assert isinstance(upstream, FallbackUpstream)
            assert isinstance(upstream.foreign, HttpUpstream)
            upstream.foreign.servers[1].listed = ListedModel(True, 10_000)
            for queue in ({}, {"num_running": 0}):
                load_of(bench, **queue)
                too_long = {"messages": [{"role": "user", "content": WORDS * 40}]}
                assert (await ask(bench, MODEL, **too_long, **FAR_FIRST)).status_code == 200
    assert seen == [0, 0]


@pytest.mark.parametrize("provider", [{"ignore": ["headrace"]}, {"order": ["foreign-0"]}])
async def test_a_request_at_a_foreign_server_does_not_wait_for_our_engines(text: TextModel, provider: dict[str, Any]) -> None:
    seen: list[int] = []

    def answered(body: dict[str, Any]) -> bytes:
        seen.append(bench.gateway.service.models.get(MODEL).unsent.num_requests(PriorityClass.BATCH))
        return head() + said("zero", "stop") + DONE

    async with listening(ScriptedServer(answer=answered)) as (port,):
        (model,) = some_replicas(1)
        async with open_bench(text, models=[{**model, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]) as bench:
            assert await answer(bench, MODEL, **provider) == "zero"
    assert seen == [0]


SUMMARISED: dict[str, Any] = {
    "messages": [{"role": "user", "content": f"Turn {number}: {WORDS}"} for number in range(40)],
    "max_tokens": 20,
    "context_fitting": "summary",
}


async def test_a_summary_is_made_by_the_servers_that_the_request_allows(text: TextModel) -> None:
    server = saying("zero")
    async with listening(server) as (port,):
        (model,) = some_replicas(1)
        async with open_bench(text, models=[{**model, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]) as bench:
            bench.replica.on_submit = full
            assert (await ask(bench, MODEL, **SUMMARISED, provider={"only": ["headrace"]})).status_code == 429
            assert bench.replica.requests
            assert not server.bodies


async def test_our_queue_refuses_a_summary_whose_foreign_servers_failed(text: TextModel) -> None:
    server = ScriptedServer(BROKEN)
    async with both(text, server) as bench:
        load_of(bench)
        assert (await ask(bench, MODEL, **SUMMARISED, **FAR_FIRST)).status_code == 429
        assert server.bodies
        assert not bench.replica.requests


async def test_a_summary_and_its_answer_wait_for_our_engines_until_each_is_sent(text: TextModel) -> None:
    seen: list[int] = []
    async with open_bench(text) as bench:
        unsent = bench.gateway.service.models.get(MODEL).unsent
        bench.replica.on_submit = lambda request, stream: seen.append(unsent.num_requests(PriorityClass.BATCH))
        bench.replica.go.clear()
        asking = asyncio.create_task(ask(bench, MODEL, **SUMMARISED))
        await eventually(lambda: bench.replica.num_open == 1)
        assert unsent.num_requests(PriorityClass.BATCH) == 0
        bench.replica.go.set()
        assert (await asking).status_code == 200
        assert (seen[0], seen[-1], unsent.num_requests(PriorityClass.BATCH)) == (1, 1, 0)
        assert len(seen) > 1


async def test_a_request_that_falls_to_a_foreign_server_waits_for_no_engine(text: TextModel) -> None:
    seen: list[int] = []

    def answered(body: dict[str, Any]) -> bytes:
        seen.append(bench.gateway.service.models.get(MODEL).unsent.num_requests(PriorityClass.BATCH))
        return head() + said("zero", "stop") + DONE

    async with listening(ScriptedServer(answer=answered)) as (port,):
        (model,) = some_replicas(1)
        async with open_bench(text, models=[{**model, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]) as bench:
            bench.replica.state = ConnectionState.DOWN
            assert await answer(bench, MODEL) == "zero"
    assert seen == [0]


def load_of(bench: TestBench, **queue: int) -> None:
    """Of the first replica, whose queue takes twenty seconds by default."""
    assert bench.replica.snapshot is not None
    room = {"max_num_seqs": 4, "kv_blocks_free": 5000, "kv_blocks_total": 5001}
    long = {"num_queued_tokens": 20_000, "step_fixed_s": 0.01, "step_token_s": 0.001}
    bench.replica.snapshot = replace(bench.replica.snapshot, load=snapshot(**room, **(queue or long)))


async def test_a_kept_answer_is_of_the_servers_that_the_request_wishes_for(text: TextModel) -> None:
    server = saying("zero")
    async with listening(server) as (port,):
        (model,) = some_replicas(1)
        models = [{**model, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}]
        async with open_bench(text, models=models, cache={"enabled": True}) as bench:
            for _ in range(2):
                for provider, said_there in (({}, SAID), ({"only": ["foreign-0"]}, "zero"), ({"sort": "price"}, SAID)):
                    response = await ask(bench, MODEL, seed=1, provider=provider)
                    assert response.json()["choices"][0]["message"]["content"] == said_there
            assert (len(bench.replica.requests), len(server.bodies)) == (1, 1)


@pytest.mark.pure
def test_our_engines_name_is_no_servers() -> None:
    with pytest.raises(ConfigError, match="our own engines"):
        config_from({"models": [{"name": FAR, "upstreams": [{"url": "http://127.0.0.1:1/v1", "name": "headrace"}]}]})


# -------------------------------------------------------------------------------------------------------------------------- models


def two_models() -> list[dict[str, Any]]:
    replica = {"address": "unix:/nowhere"}
    return [{"name": name, "folder": "/nowhere", "replicas": [{"name": f"of-{name}", **replica}]} for name in (MODEL, OTHER)]


PRICES = {MODEL: {"input": 1.0, "output": 2.0, "cached_input": 0.1}, OTHER: {"input": 0.5, "output": 1.0}}


async def answered_by(bench: TestBench, **fields: Any) -> str:
    response = await ask(bench, MODEL, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-headrace-model"] == response.json()["model"]
    return str(response.json()["model"])


async def test_a_model_that_costs_too_much_never_answers(text: TextModel) -> None:
    async with open_bench(text, models=two_models(), prices=PRICES) as bench:
        assert await answered_by(bench, provider={"max_price": {"prompt": 1}}) == MODEL
        assert await answered_by(bench, fallbacks=[OTHER], provider={"max_price": {"prompt": 0.9}}) == OTHER
        assert await answered_by(bench, fallbacks=[OTHER], provider={"max_price": {"completion": 1}}) == OTHER
        refused = await ask(bench, MODEL, provider={"max_price": {"prompt": 0.9}})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "provider.max_price")
        assert "at least 1 for prompts and 2 for completions, what fox costs" in error["message"]
        refused = await ask(bench, MODEL, fallbacks=[OTHER], provider={"max_price": {"prompt": 0.4}})
        assert "at least 0.5 for prompts and 1 for completions, what cub costs" in refused.json()["error"]["message"]


async def test_found_prefixes_lower_no_price_that_a_request_limits(text: TextModel) -> None:
    async with open_bench(text, models=two_models(), prices=PRICES) as bench:
        replica, limit = bench.replicas[f"of-{MODEL}"], {"max_price": {"prompt": 0.9}}
        assert (await ask(bench, MODEL, provider=limit)).status_code == 400
        replica.cached_tokens = len((await ask(bench, MODEL)).json() and replica.requests[0].prompt_ids)
        await ask(bench, MODEL)
        assert bench.gateway.service.models.get(MODEL).means.hit_rate == pytest.approx(1 / 1.98)
        assert (await ask(bench, MODEL, provider=limit)).status_code == 400


async def test_models_are_sorted_by_price_or_by_their_measured_speed(text: TextModel) -> None:
    async with open_bench(text, models=two_models(), prices=PRICES) as bench:
        speeds = {MODEL: 10.0, OTHER: 40.0}
        for name, speed in speeds.items():
            bench.replicas[f"of-{name}"].token_delay_s = 1.0 / speed
        assert await answered_by(bench, fallbacks=[OTHER]) == MODEL
        assert await answered_by(bench, fallbacks=[OTHER], provider={"sort": "price"}) == OTHER
        bench.replicas[f"of-{OTHER}"].on_submit = full
        assert await answered_by(bench, fallbacks=[OTHER], provider={"sort": "price"}) == MODEL, "the asked model is a fallback then"
        bench.replicas[f"of-{OTHER}"].on_submit = None
        means = [bench.gateway.service.models.get(name).means for name in speeds]
        assert [each.tokens_per_s for each in means] == [pytest.approx(speed) for speed in speeds.values()]
        assert await answered_by(bench, fallbacks=[OTHER], provider={"sort": "throughput"}) == OTHER
        assert await answered_by(bench, fallbacks=[OTHER], provider={"preferred_min_throughput": 20}) == OTHER
        assert await answered_by(bench, fallbacks=[OTHER], provider={"preferred_min_throughput": {"p50": 50}}) == MODEL
        assert await answered_by(bench, provider={"preferred_min_throughput": 20}) == MODEL, "a slow model is asked last, but it is asked"


async def test_an_explanation_says_why_a_model_was_passed_over(text: TextModel) -> None:
    async with open_bench(text, models=two_models(), prices=PRICES) as bench:
        for provider, why in (
            ({"sort": "price"}, "By provider.sort: what its tokens cost, with the measured share of cached ones."),
            ({"max_price": {"prompt": 0.9}}, "A million prompt tokens cost 1, and provider.max_price.prompt is 0.9."),
        ):
            answered = await ask(bench, MODEL, fallbacks=[OTHER], provider=provider)
            told = (await bench.client.get(f"/v1/requests/{answered.headers['x-request-id']}/explain")).json()
            assert [(step["model"], step.get("is_chosen", False)) for step in told["route"]["models"]] == [(MODEL, False), (OTHER, True)]
            assert told["route"]["models"][0]["reason"] == why


async def test_a_fallback_is_a_model_that_the_key_may_use(text: TextModel) -> None:
    keys = [{"key": "key-standard", "tenant": "second", "tier": "one"}]
    async with open_bench(text, models=two_models(), api_keys=keys, tiers={"one": {"models": [MODEL]}}) as bench:
        for field in ("models", "fallbacks"):
            body = {"model": MODEL, "messages": HELLO, field: [OTHER]}
            refused = await bench.client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer key-standard"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            assert OTHER not in refused.json()["error"]["message"].partition(", got")[0]


async def test_a_configured_fallback_costs_no_more_than_the_request_allows(text: TextModel) -> None:
    models = two_models()
    models[0]["fallbacks"] = {"busy": [OTHER]}
    async with open_bench(text, models=models, prices={**PRICES, OTHER: {"output": 9.0}}) as bench:
        load_of(bench)
        assert await answered_by(bench) == OTHER
        refused = await ask(bench, MODEL, provider={"max_price": {"completion": 5}})
        assert refused.status_code == 429
