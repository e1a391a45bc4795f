"""Tests that a fallback answers where its model cannot: until the first output, by name and at its own price. Never after it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
import pytest
from foreign_kit import DONE, ScriptedServer, event, head, listening, said
from gateway_kit import MODEL, FakeReplica, TestBench, events_of, eventually, gateway_config, metric, model_info, open_bench, snapshot, used
from local_workers import HeldWorkers
from virtual_time import virtual_loop

from headrace.core.errors import InvalidRequest, Overloaded, RequestTooLarge, Unavailable
from headrace.core.request import EngineRequest
from headrace.gateway.access.principal import Principal
from headrace.gateway.text_host import TextContext
from headrace.gateway.upstream.served_models import fallback_chain
from headrace.policy.limits.price import Price
from headrace.policy.routing.wishes import RoutingWishes
from headrace.text.folder import TextModel
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

KEY = "sk-fallbacks-0123456789"
FOX, CUB, DEN = MODEL, "cub", "den"
BUDGET = 1000.0
PRICES = {FOX: {"input": 1.0, "output": 2.0}, CUB: {"input": 0.25, "output": 0.5}, DEN: {"input": 8.0, "output": 16.0}}
COUNTED = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3}) + DONE


def lost(request: EngineRequest, stream: ReplicaStream) -> None:
    stream.fail(Unavailable("gone"))


def full(request: EngineRequest, stream: ReplicaStream) -> None:
    stream.reject(Overloaded("The queue is full.", retry_after_s=1))


def too_large(request: EngineRequest, stream: ReplicaStream) -> None:
    stream.reject(RequestTooLarge("max_tokens", "blocks", 5))


def own(name: str, **fallbacks: list[str]) -> dict[str, Any]:
    return {"name": name, "folder": "/nowhere", "replicas": [{"name": f"of-{name}", "address": "unix:/nowhere"}], "fallbacks": fallbacks}


def bench_of(text: TextModel, *models: dict[str, Any], **changes: Any) -> Any:
    keys = [{"key": KEY, "tenant": "acme", "tier": "some"}]
    tiers = {"some": {"monthly_budget": BUDGET, **changes.pop("tier", {})}}
    prices = {each["name"]: PRICES[each["name"]] for each in models if each["name"] in PRICES}
    return open_bench(text, models=list(models), api_keys=keys, tiers=tiers, **{"prices": prices, **changes})


async def ask(bench: TestBench, model: str = FOX, headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, **fields}
    return await bench.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}", **(headers or {})})


async def explained(bench: TestBench, response: httpx2.Response) -> dict[str, Any]:
    shown = f"/v1/requests/{response.headers['x-request-id']}/explain"
    answer = await bench.client.get(shown, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_fallback_answers_by_its_name_and_at_its_price(text: TextModel, is_streaming: bool) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB)) as bench:
        bench.replicas["of-fox"].on_submit = lost
        response = await ask(bench, stream=is_streaming, stream_options={"include_usage": True} if is_streaming else None)
        assert response.status_code == 200, response.text
        assert (response.headers["x-headrace-model"], response.headers["x-headrace-reason"]) == (CUB, "fallback")
        bodies = events_of(response.text) if is_streaming else [response.json()]
        assert {body["model"] for body in bodies} == {CUB}
        usage, told = bodies[-1]["usage"], await explained(bench, response)
        cost = Price(input=0.25, output=0.5).cost_nanos(
            prompt_tokens=usage["prompt_tokens"], cached_tokens=0, completion_tokens=usage["completion_tokens"]
        )
        assert await used(bench, "monthly_budget", KEY) == cost == round(told["cost"] * 1e9)
        assert (told["model"], [(each["model"], each.get("is_chosen", False)) for each in told["route"]["models"]]) == (
            CUB,
            [(FOX, True), (FOX, False), (CUB, True)],
        )
        assert [attempt["replica"] for attempt in told["route"]["attempts"]] == ["of-fox", "of-cub"]
        assert metric(bench.gateway, "headrace_fallbacks_total", model=FOX, to=CUB, reason="failed") == 1
        assert metric(bench.gateway, "headrace_requests_total", model=CUB, replica="of-cub", outcome="length") == 1
        models = bench.gateway.service.models
        assert [models.get(name).users.num_users for name in (FOX, CUB)] == [0, 0]


async def test_a_stream_whose_headers_are_sent_names_the_fallback_in_its_body(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB)) as bench:
        bench.gateway.service.pipeline.watch.ping_s = 0.5
        fox = bench.replicas["of-fox"]
        fox.go.clear()
        asking = asyncio.create_task(ask(bench, stream=True))
        await eventually(lambda: bool(fox.requests))
        await asyncio.sleep(2)
        fox.die()
        response = await asking
        assert response.headers["x-headrace-model"] == FOX, "it was sent before the model failed"
        assert {body["model"] for body in events_of(response.text)} == {CUB}


async def test_no_fallback_follows_output(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB)) as bench:
        fox = bench.replicas["of-fox"]
        fox.token_delay_s = 0.1
        asking = asyncio.create_task(ask(bench, stream=True))
        await eventually(lambda: bool(fox.requests))
        await asyncio.sleep(0.25)
        fox.die()
        events = events_of((await asking).text)
        assert [events[0]["model"], events[-1]["error"]["code"]] == [FOX, "unavailable"]
        assert not bench.replicas["of-cub"].requests


@pytest.mark.parametrize("is_known", [False, True])
async def test_what_is_too_long_goes_to_a_model_of_a_longer_context(text: TextModel, is_known: bool) -> None:
    """is_known: the output alone is longer, so that no prompt is read for the shorter context"""
    async with bench_of(text, own(FOX, context_window=[DEN], failed=[CUB]), own(CUB), own(DEN)) as bench:
        den = bench.replicas["of-den"]
        assert den.info is not None
        den.info = replace(den.info, model=model_info(text, max_model_len=4096))
        long = {"max_tokens": 600} if is_known else {"messages": [{"role": "user", "content": "x y z " * 600}]}
        response = await ask(bench, **long)
        assert (response.status_code, response.json()["model"]) == (200, DEN)
        steps = (await explained(bench, response))["route"]["models"]
        assert [each["model"] for each in steps] == ([FOX, DEN] if is_known else [FOX, FOX, DEN])
        bench.replicas["of-fox"].on_submit = too_large
        assert (await ask(bench)).json()["model"] == DEN


async def test_what_the_tier_forbids_is_forbidden_by_all_models(text: TextModel) -> None:
    async with bench_of(text, own(FOX, context_window=[DEN]), own(DEN), tier={"max_context_tokens": 16}) as bench:
        response = await ask(bench, max_tokens=100)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert not metric(bench.gateway, "headrace_fallbacks_total", model=FOX, to=DEN, reason="context_window")


REFUSED = head("400 Bad Request", "application/json") + b'{"error": {"code": "content_filter", "message": "no"}}'


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("answer", [REFUSED, head() + said("", "content_filter") + DONE])
async def test_what_a_content_filter_refuses_or_empties_goes_on(text: TextModel, answer: bytes, is_streaming: bool) -> None:
    async with listening(ScriptedServer(answer)) as (port,):
        foreign = {"name": FOX, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}], "fallbacks": {"content_policy": [CUB]}}
        async with bench_of(text, foreign, own(CUB)) as bench:
            response = await ask(bench, stream=is_streaming)
            assert (response.status_code, response.headers["x-headrace-model"]) == (200, CUB), response.text
            bench.replicas["of-cub"].on_submit = full
            assert (await ask(bench)).json()["error"]["code"] == "content_filter"
        foreign["fallbacks"] = {"failed": [CUB]}
        async with bench_of(text, foreign, own(CUB)) as bench:
            alone = await ask(bench)
            assert alone.status_code == (400 if answer is REFUSED else 200)
            assert (alone.headers["x-headrace-model"], len(bench.replicas["of-cub"].requests)) == (FOX, 0)
            assert answer is REFUSED or alone.json()["choices"][0]["finish_reason"] == "content_filter"


async def test_when_all_fail_the_error_is_that_of_the_asked_model_and_names_the_others(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB, DEN]), own(CUB), own(DEN)) as bench:
        bench.replicas["of-fox"].on_submit = lost
        bench.replicas["of-cub"].on_submit = full
        bench.replicas["of-den"].on_submit = lost
        response = await ask(bench)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "unavailable")
        assert error["message"].endswith("Its fallbacks cub, den did not answer either.")
        assert (response.headers["x-headrace-model"], response.headers["x-headrace-reason"]) == (FOX, "refused")
        assert await used(bench, "monthly_budget", KEY) == 0


async def test_a_model_without_a_replica_is_no_choice_and_is_asked_after_the_others(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB)) as bench:
        fox = bench.replicas["of-fox"]
        fox.die()
        response = await ask(bench)
        assert (response.json()["model"], len(fox.requests)) == (CUB, 0)
        bench.replicas["of-cub"].die()
        assert (await ask(bench)).json()["error"]["message"] == "No replica of fox took the request within 600 s."


async def test_the_dearest_model_is_reserved_and_the_one_that_ran_is_charged(text: TextModel) -> None:
    """A million tokens of DEN cost 24. The key may spend less than 200 of its tokens."""
    async with bench_of(text, own(FOX, failed=[DEN]), own(DEN), tier={"monthly_budget": 200 * 16e-6}) as bench:
        assert (await ask(bench, max_tokens=199)).status_code == 429
        assert (await ask(bench, max_tokens=150)).status_code == 200
        left = await used(bench, "monthly_budget", KEY)
        assert left < 200 * 3_000, "the fox's price"


async def test_an_answer_of_a_fallback_is_not_cached_and_is_replayed_under_its_name(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB), cache={"enabled": True}) as bench:
        fox = bench.replicas["of-fox"]
        fox.on_submit = lost
        first = await ask(bench, temperature=0, headers={"idempotency-key": "a"})
        again = await ask(bench, temperature=0, headers={"idempotency-key": "a"})
        assert (again.headers["idempotent-replayed"], again.json()["choices"]) == ("true", first.json()["choices"])
        assert (again.headers["x-headrace-model"], again.json()["model"]) == (CUB, CUB)
        fox.on_submit = None
        assert (await ask(bench, temperature=0)).json()["model"] == FOX


@pytest.mark.parametrize(
    "changed",
    [
        {"models": [own(CUB)], "routes": {"any": {"targets": [{"model": CUB}]}}},
        {"models": [own("vixen") | {"aliases": [FOX]}], "routes": {"any": {"targets": [{"model": "vixen"}]}}},
        {"models": [own(CUB)], "routes": {"any": {"targets": [{"model": CUB}]}, FOX: {"targets": [{"model": CUB}]}}},
    ],
    ids=["gone", "an alias now", "a route now"],
)
async def test_a_replayed_answer_has_the_name_of_the_model_that_gave_it(text: TextModel, changed: dict[str, Any]) -> None:
    async with open_bench(text, models=[own(FOX)], routes={"any": {"targets": [{"model": FOX}]}}) as bench:
        assert (await ask(bench, "any", headers={"idempotency-key": "a"})).json()["model"] == FOX
        await bench.reloader.reload(lambda: gateway_config(**changed))
        assert (await ask(bench, "any")).json()["model"] != FOX
        again = await ask(bench, "any", headers={"idempotency-key": "a"})
        assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
        assert (again.headers["x-headrace-model"], again.json()["model"]) == (FOX, FOX)
        assert (again.headers["x-headrace-reason"], again.json().get("system_fingerprint")) == ("cached_answer", None)
        assert metric(bench.gateway, "headrace_requests_total", model=FOX, replica="", outcome="length") == 1


async def test_a_full_text_queue_is_no_busy_model(text: TextModel) -> None:
    """Another model's prompts wait in the same queue: the chain ends, and the client gets the reason."""
    workers = HeldWorkers(TextContext(dict.fromkeys((FOX, CUB, DEN), text)))
    models = own(FOX, failed=[CUB], busy=[DEN]), own(CUB), own(DEN)
    async with bench_of(text, *models, workers=workers, limits={"max_text_workers": 1}) as bench:
        pool, fox = bench.gateway.service.text_pool, bench.replicas["of-fox"]
        pool.change(1)
        fox.go.clear()
        walking = asyncio.create_task(ask(bench))
        await eventually(lambda: len(workers.held) == 1)
        workers.held[0]()
        await eventually(lambda: bool(fox.requests))
        others = [asyncio.create_task(ask(bench, CUB))]
        await eventually(lambda: len(workers.held) == 2)
        others.append(asyncio.create_task(ask(bench, CUB)))
        await eventually(lambda: pool.reading().num_waiting == 1)
        first = await ask(bench)
        fox.die()
        for refused, model in ((first, FOX), (await walking, CUB)):
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.json()["error"]["message"] == "Too many requests wait for a text worker."
            assert int(refused.headers["retry-after"]) >= 1
            assert (refused.headers["x-headrace-model"], refused.headers["x-headrace-reason"]) == (model, "refused")
        assert not bench.replicas["of-den"].requests
        assert not metric(bench.gateway, "headrace_fallbacks_total", model=FOX, to=DEN, reason="busy")
        workers.held[1]()
        await eventually(lambda: len(workers.held) == 3)
        workers.held[2]()
        assert [(await other).status_code for other in others] == [200, 200]


async def test_a_session_and_a_stream_with_ids_know_who_answered(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB)) as bench:
        bench.replicas["of-fox"].on_submit = lost
        assert (await ask(bench, headers={"x-session-id": "s"})).json()["model"] == CUB
        assert (await ask(bench, CUB, headers={"x-session-id": "s"})).status_code == 200
        response = await ask(bench, stream=True, headers={"last-event-id": ""})
        assert "id: " not in response.text, "another model may answer the next time"


async def test_a_deadline_holds_for_the_whole_chain(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB), timeouts={"request_s": 3.0}) as bench:
        fox, began = bench.replicas["of-fox"], virtual_loop().time()
        fox.go.clear()
        bench.replicas["of-cub"].go.clear()
        asking = asyncio.create_task(ask(bench))
        await eventually(lambda: bool(fox.requests))
        await asyncio.sleep(2)
        fox.die()
        assert (await asking).status_code == 504
        assert virtual_loop().time() - began < 4.0


async def test_a_client_that_leaves_between_two_models_leaves_nothing_open(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB)) as bench:
        fox, cub = bench.replicas["of-fox"], bench.replicas["of-cub"]
        fox.on_submit = lost
        cub.go.clear()
        asking = asyncio.create_task(ask(bench, stream=True))
        await eventually(lambda: bool(cub.requests))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)


async def test_a_client_names_fallbacks_of_its_own_among_the_models_of_its_key(text: TextModel) -> None:
    async with bench_of(text, own(FOX, busy=[CUB]), own(CUB), own(DEN), tier={"models": [FOX, DEN]}) as bench:
        bench.replicas["of-fox"].on_submit = full
        assert (await ask(bench)).status_code == 429
        assert (await ask(bench, fallbacks=[FOX, DEN])).json()["model"] == DEN
        error = (await ask(bench, fallbacks=[CUB])).json()["error"]
        assert (error["param"], error["code"]) == ("fallbacks", "invalid_value")
        assert "cub" not in error["message"].replace('"cub"', ""), "only what the client wrote"


async def test_the_clients_fallbacks_come_first_and_none_twice_for_one_reason(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB, DEN]), own(CUB), own(DEN)) as bench:
        models = bench.gateway.service.models
        chain = fallback_chain(models.get(FOX), RoutingWishes(fallbacks=(DEN,)), models, Principal(tenant="acme"), by=FOX)
        assert [(reason, model.name) for reason, model in chain] == [(None, DEN), ("failed", CUB), ("failed", DEN)]
        with pytest.raises(InvalidRequest, match="fallbacks: expected names of models"):
            fallback_chain(models.get(FOX), RoutingWishes(fallbacks=("wolf",)), models, Principal(tenant="acme"), by=FOX)


async def test_the_model_that_a_route_leads_to_has_its_own_fallbacks(text: TextModel) -> None:
    async with bench_of(text, own(FOX, failed=[CUB]), own(CUB), routes={"any": {"targets": [{"model": FOX}]}}) as bench:
        bench.replicas["of-fox"].on_submit = lost
        response = await ask(bench, "any")
        assert (response.status_code, response.json()["model"]) == (200, CUB)
        steps = (await explained(bench, response))["route"]["models"]
        assert [(each["model"], each.get("is_chosen", False)) for each in steps][-3:] == [(FOX, True), (FOX, False), (CUB, True)]


# -- random chains ------------------------------------------------------------------------------------------------------------------

SERVED, LOST_LATE = "answers", "lost after output"
REASONS = {
    SERVED: (),
    "down": ("failed",),
    "lost": ("failed",),
    "full": ("busy", "failed"),
    "too large": ("context_window",),
    "short": ("context_window",),
    "long queue": ("busy", "failed"),
    "deep queue": ("busy",),
    "filtered": ("content_policy",),
    "emptied": ("content_policy",),
    "broken": ("failed",),
    LOST_LATE: (),
}
FOREIGN = {
    "filtered": REFUSED,
    "emptied": head() + said("", "content_filter") + COUNTED,
    "broken": head("500 Internal Server Error", "text/plain"),
}
THEIRS = head() + said("theirs", "stop") + COUNTED


def behave(replica: FakeReplica, how: str) -> None:
    replica.on_submit = {"lost": lost, "full": full, "too large": too_large}.get(how)
    assert replica.info is not None
    assert replica.snapshot is not None
    slow = {"step_fixed_s": 0.01, "step_token_s": 0.001, "max_num_seqs": 4, "kv_blocks_free": 5000, "kv_blocks_total": 5001}
    if how == "short":
        replica.info = replace(replica.info, model=replace(replica.info.model, max_model_len=4))
    elif how == "long queue":
        replica.snapshot = replace(replica.snapshot, load=snapshot(num_queued_tokens=20_000, **slow))
    elif how == "deep queue":
        replica.snapshot = replace(replica.snapshot, load=snapshot(num_running=4, num_waiting=11, **{**slow, "step_token_s": 0.0001}))
    elif how == "down":
        replica.die()
    elif how == LOST_LATE:
        replica.token_delay_s, replica.on_submit = 1.0, partial(_lose_late, replica)


def _lose_late(replica: FakeReplica, request: EngineRequest, stream: ReplicaStream) -> None:
    asyncio.get_running_loop().call_later(2.5, lost, request, stream)


async def asked_at_random(text: TextModel, seed: int) -> str:
    """Returns how it ended."""
    draw = random.Random(seed)
    names = [f"m{number}" for number in range(draw.randint(2, 5))]
    how = {name: draw.choice([SERVED, *REASONS]) for name in names}
    allowed = [name for name in names if name == "m0" or draw.random() < 0.8]
    prices = {name: {"input": draw.randrange(9) / 4, "output": draw.randrange(9) / 4} for name in names}
    chains = {
        reason: draw.sample(names[1:], draw.randint(0, len(names) - 1)) for reason in ("failed", "busy", "context_window", "content_policy")
    }
    wished = draw.sample(allowed, draw.choice([0, 0, 1])) if draw.random() < 0.5 else []
    is_streaming = draw.random() < 0.5
    servers = {name: ScriptedServer(FOREIGN.get(how[name], THEIRS)) for name in names if how[name] in FOREIGN or draw.random() < 0.1}
    async with listening(*servers.values()) as ports:
        urls = {name: f"http://127.0.0.1:{port}/v1" for name, port in zip(servers, ports, strict=True)}
        far = {name: {"name": name, "upstreams": [{"url": url}]} for name, url in urls.items()}
        how |= {name: SERVED for name in far if how[name] not in FOREIGN}
        models = [far.get(name, own(name)) | {"fallbacks": chains if name == "m0" else {}} for name in names]
        async with bench_of(text, *models, prices=prices, tier={"models": allowed}) as bench:
            for name in set(names) - set(far):
                behave(bench.replicas[f"of-{name}"], how[name])
            response = await ask(bench, "m0", stream=is_streaming, fallbacks=wished)
            return await checked_end(bench, response, how, prices, allowed, chains, wished)


async def checked_end(
    bench: TestBench,
    response: httpx2.Response,
    how: dict[str, str],
    prices: dict[str, dict[str, float]],
    allowed: list[str],
    chains: dict[str, list[str]],
    wished: list[str],
) -> str:
    bodies = events_of(response.text) if response.headers["content-type"].startswith("text/event-stream") else [response.json()]
    errors = [body["error"] for body in bodies if "error" in body]
    told = await explained(bench, response)
    spent, answered = await used(bench, "monthly_budget", KEY), told["model"]
    links = [(reason, name) for reason, chain in chains.items() for name in chain] + [(None, name) for name in wished]
    assert answered in allowed
    assert answered == "m0" or answered in [name for _, name in links]
    assert len(errors) <= 1
    assert spent == round(told.get("cost", 0.0) * 1e9), (how, chains, wished, response.text, told)
    tokens = told["tokens"]
    if errors:
        assert errors[0]["code"]
        assert errors[0]["message"]
        assert bool(spent) <= (how[answered] == LOST_LATE), "a model that gave nothing costs nothing"
        if how[answered] != LOST_LATE:
            usable = [name for reason, name in links if name in allowed and how[name] == SERVED and reason in (None, *REASONS[how["m0"]])]
            assert how["m0"] != SERVED
            assert not usable, f"{usable} could have answered instead of {how['m0']}"
            return "error"
        cost = tokens["prompt"], tokens["completion"]
    else:
        assert how[answered] in (SERVED, "emptied", "deep queue", LOST_LATE)
        assert {body["model"] for body in bodies} == {answered} == {response.headers["x-headrace-model"]}
        cost = (tokens["prompt"], tokens["completion"])
    price = Price(**prices[answered])
    assert spent == price.cost_nanos(prompt_tokens=cost[0], cached_tokens=0, completion_tokens=cost[1])
    return "lost" if errors else "asked" if answered == "m0" else "fallback"


async def test_each_of_random_chains_ends_with_an_allowed_model_or_one_error(text: TextModel) -> None:
    ends = [await asked_at_random(text, seed) for seed in range(100)]
    assert set(ends) == {"asked", "fallback", "error", "lost"}


@pytest.mark.slow
async def test_a_thousand_of_random_chains(text: TextModel) -> None:
    ends = [await asked_at_random(text, seed) for seed in range(1000)]
    assert ends.count("fallback") > 100
