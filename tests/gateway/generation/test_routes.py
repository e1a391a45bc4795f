"""Tests routes: one name for several models, what stays with which, continued streams, and copies that no client notices."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from foreign_kit import DONE, ScriptedServer, head, listening, said
from gateway_kit import TestBench, chat_body, eventually, follow, gateway_config, metric, model_info, open_bench, snapshot, used
from resume_kit import CHAT, answer_of, equal, kept, send, streaming_body
from session_kit import user

from headrace.core.errors import ConfigError
from headrace.core.request import EngineRequest, PriorityClass
from headrace.gateway.generation.shadows import MAX_COPIES, ShadowResult
from headrace.gateway.ledger.usage_query import UsageQuery
from headrace.policy.routing.routes import Sender, SizeHint
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, SeenLoad
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

ONE, TWO, LARGE, SHADOW = "small-1", "small-2", "large-1", "small-3"
SHARED: list[dict[str, Any]] = [
    {"model": ONE, "size": "small", "version": "1", "weight": 1},
    {"model": TWO, "size": "small", "version": "2", "weight": 1},
    {"model": LARGE, "size": "large"},
]
KEYS = [
    {"key": "key-of-acme", "tenant": "acme", "tier": "routed"},
    {"key": "key-of-globex", "tenant": "globex"},
]
TIERS = {"routed": {"models": ["assistant"], "daily_tokens": 100_000}}


def served(*names: str) -> list[dict[str, Any]]:
    """Each with a replica of its name, less the size."""
    replicas = [[{"name": name.partition(":")[0], "address": "unix:/nowhere"}] for name in names]
    return [{"name": name, "folder": "/nowhere", "replicas": each} for name, each in zip(names, replicas, strict=True)]


def routed(targets: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """Of a configuration: four models and one route."""
    route = {"targets": SHARED if targets is None else targets, "sticky": "tenant", **more}
    return {"models": served(ONE, TWO, LARGE, SHADOW), "routes": {"assistant": route}}


def of_version(weight: float, sticky: str = "request") -> dict[str, Any]:
    """Version 2 gets this weight of 100."""
    return routed([{"model": ONE, "version": "1", "weight": 100 - weight}, {"model": TWO, "version": "2", "weight": weight}], sticky=sticky)


async def ask(bench: TestBench, name: str = "assistant", key: str = "", session: str = "", **fields: Any) -> httpx2.Response:
    headers = ({"authorization": f"Bearer {key}"} if key else {}) | ({"x-session-id": session} if session else {})
    return await bench.client.post(CHAT, json=chat_body(**{"model": name, "max_tokens": 2, **fields}), headers=headers)


async def answered_by(bench: TestBench, name: str = "assistant", key: str = "", session: str = "") -> str:
    response = await ask(bench, name, key, session)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == response.headers["x-headrace-model"]
    return response.headers["x-headrace-model"]


async def apply(bench: TestBench, config: Mapping[str, Any]) -> None:
    changed = gateway_config(**config)
    await bench.reloader.reload(lambda: changed)


async def test_a_name_leads_to_the_target_of_its_size_and_version(text: TextModel) -> None:
    async with open_bench(text, **routed()) as bench:
        for name, model in {"assistant:large": LARGE, "assistant@2": TWO, "assistant:small@1": ONE, SHADOW: SHADOW}.items():
            assert await answered_by(bench, name) == model
        assert await answered_by(bench) in (ONE, TWO), "a greeting"
        for name in ("assistant:huge", "assistant@3", "assistant:large@1"):
            missing = await ask(bench, name)
            assert missing.status_code == 404
            assert "assistant:small, assistant:large, assistant@1, assistant@2" in missing.text


CODE = "Why does this loop never end?\n\nwhile (i < n) {\n    if (a[i] == 0) continue;\n    i++;\n}\n"
TEXT = [{"type": "text", "text": "Fix the bug:"}, {"type": "text", "text": CODE}]


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ([user("Hello")], "small"),
        ([user(CODE)], "large"),
        ([user("Hello"), {"role": "assistant", "content": CODE}, {"role": "user", "content": TEXT}], "large"),
        ([user(CODE), {"role": "assistant", "content": "Here you are."}, user("Thank you!")], "small"),
        ([{"role": "system", "content": "word " * 4000}, user("Hello")], "large"),
    ],
)
async def test_the_size_is_what_the_users_last_message_and_the_prompts_length_want(text: TextModel, asked: Any, size: str) -> None:
    targets = [{"model": ONE, "size": "small"}, {"model": LARGE, "size": "large"}]
    async with open_bench(text, **routed(targets)) as bench:
        response = await ask(bench, messages=asked)
        assert response.headers["x-headrace-model"] == (LARGE if size == "large" else ONE), response.text


async def test_a_completions_first_prompt_is_read(text: TextModel) -> None:
    async with open_bench(text, **routed([{"model": ONE, "size": "small"}, {"model": LARGE, "size": "large"}])) as bench:
        for prompt, model in ((CODE, LARGE), ([CODE, "Hello"], LARGE), ("Hello", ONE)):
            answer = await bench.complete(model="assistant", prompt=prompt, max_tokens=1)
            assert answer.json()["model"] == model
        assert (await bench.complete(model="assistant", prompt=[1, 2, 3], max_tokens=1)).status_code == 200


def never() -> SizeHint:
    raise AssertionError("the size is not open")


async def test_a_served_name_comes_before_a_routes_size(text: TextModel) -> None:
    config = {**routed(), "models": [*served(ONE, TWO, LARGE), *served("assistant:small")]}
    async with open_bench(text, **config) as bench:
        assert await answered_by(bench, "assistant:small") == "assistant:small"


async def test_a_route_is_listed_with_what_all_of_its_targets_can_do(text: TextModel) -> None:
    async with open_bench(text, **routed()) as bench:
        for number, name in enumerate((ONE, TWO, LARGE)):
            bench.replicas[name].info = replace(bench.replicas[name].info, model=model_info(text, max_model_len=400 - number))  # type: ignore[type-var]
        listed = (await bench.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == [ONE, TWO, LARGE, SHADOW, "assistant"]
        assert (listed[-1]["root"], listed[-1]["max_model_len"], listed[-1]["status"]) == ("assistant", 398, "ready")
        assert (await bench.client.get("/v1/models/assistant")).json() == listed[-1]
        assert (await bench.client.get("/v1/models/assistant:small")).json()["max_model_len"] == 399
        counted = await bench.client.post("/tokenize", json={"model": "assistant", "prompt": "Hello"})
        assert counted.json()["max_model_len"] == 400, "the first target's tokenizer"
        read = await bench.client.post("/detokenize", json={"model": "assistant", "tokens": counted.json()["tokens"]})
        assert "Hello" in read.json()["prompt"]


async def test_a_route_is_ready_while_a_target_is_that_a_request_may_get(text: TextModel) -> None:
    targets = [SHARED[0], {**SHARED[1], "weight": 0}, SHARED[2]]
    names = ("assistant", "assistant:small", "assistant@2", "assistant:large", "assistant:huge", "strict&model=assistant")
    async with open_bench(text, **routed(targets)) as bench:

        async def statuses() -> list[int]:
            return [(await bench.client.get(f"/ready?{'' if '=' in name else 'model='}{name}")).status_code for name in names]

        assert await statuses() == [200, 200, 200, 200, 404, 200]
        unknown = (await bench.client.get("/ready?model=unknown")).json()["error"]["message"]
        assert ONE in unknown
        assert "assistant" not in unknown
        bench.replicas[ONE].die()
        assert await statuses() == [200, 503, 200, 200, 404, 503]
        bench.replicas[LARGE].die()
        assert await statuses() == [503, 503, 200, 503, 404, 503]
        assert (await bench.client.get("/ready")).status_code == 200


async def test_a_key_for_a_route_uses_its_targets_through_it_alone(text: TextModel) -> None:
    async with open_bench(text, **routed(), api_keys=KEYS, tiers=TIERS) as bench:
        acme = {"authorization": "Bearer key-of-acme"}
        assert [card["id"] for card in (await bench.client.get("/v1/models", headers=acme)).json()["data"]] == ["assistant"]
        assert await answered_by(bench, "assistant:large", "key-of-acme") == LARGE
        assert (await ask(bench, LARGE, "key-of-acme")).status_code == 404
        assert await answered_by(bench, LARGE, "key-of-globex") == LARGE


async def test_a_key_for_a_route_falls_back_to_another_target(text: TextModel) -> None:
    """And to no model that only others may use."""
    config = routed()
    config["models"][2]["fallbacks"] = {"failed": [SHADOW, ONE]}
    async with open_bench(text, **config, api_keys=KEYS, tiers=TIERS) as bench:
        bench.replicas[LARGE].state = ConnectionState.DOWN
        answer = await ask(bench, "assistant:large", "key-of-acme")
        assert (answer.status_code, answer.json()["model"]) == (200, ONE)
        assert (await ask(bench, "assistant:large", "key-of-globex")).json()["model"] == SHADOW


async def test_a_target_of_a_route_is_no_fallback_for_who_asks_for_another_model(text: TextModel) -> None:
    config = routed([{"model": LARGE}])
    config["models"][0]["fallbacks"] = {"failed": [LARGE]}
    tiers = {"routed": {"models": [ONE, "assistant"]}}
    async with open_bench(text, **config, api_keys=KEYS, tiers=tiers) as bench:
        bench.replicas[ONE].state = ConnectionState.DOWN
        assert (await ask(bench, ONE, "key-of-acme")).status_code == 503
        assert (await ask(bench, ONE, "key-of-globex")).json()["model"] == LARGE
        refused = await ask(bench, ONE, "key-of-acme", fallbacks=["assistant"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "fallbacks")


async def test_a_tenant_or_a_session_stays_with_its_version_and_a_request_does_not(text: TextModel) -> None:
    async with open_bench(text, **of_version(50, "tenant")) as bench:
        assert len({await answered_by(bench) for _ in range(12)}) == 1
        for sticky in ("session", "request"):
            await apply(bench, of_version(50, sticky))
            of_sessions = [{await answered_by(bench, session=f"s-{number}") for _ in range(3)} for number in range(8)]
            assert {len(models) for models in of_sessions} == {1}, "a session's turns have one cached prefix"
            assert set().union(*of_sessions) == {ONE, TWO}
        assert {await answered_by(bench) for _ in range(40)} == {ONE, TWO}


async def test_a_reload_changes_routes(text: TextModel) -> None:
    async with open_bench(text, **of_version(0)) as bench:
        assert {await answered_by(bench) for _ in range(8)} == {ONE}
        await apply(bench, of_version(100))
        assert {await answered_by(bench) for _ in range(8)} == {TWO}
        await apply(bench, {"models": served(ONE)})
        assert (await ask(bench)).status_code == 404


async def test_the_choice_has_a_reason(text: TextModel) -> None:
    async with open_bench(text, **of_version(100)) as bench:
        (step,) = bench.gateway.service.models.choose("assistant", lambda: Sender("t", "", "r"), never).steps
        assert (step.model, step.is_chosen) == (TWO, True)
        assert step.reason == "assistant leads to it, by its weight of 100 in 100 for each request"


async def test_the_line_and_the_record_name_what_was_asked_for_beside_who_answered(text: TextModel, tmp_path: Path) -> None:
    log, names = tmp_path / "log", ["assistant:large", ONE]
    async with open_bench(text, **routed(), request_log=str(log), state=str(tmp_path)) as bench:
        written = follow(bench)
        assert [await answered_by(bench, name) for name in names] == [LARGE, ONE]
        await bench.client.post("/tokenize", json={"model": names[0], "prompt": "Hello"})
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["requested_model"], line["model"]) for line in lines] == [(names[0], LARGE), (ONE, ONE), (names[0], LARGE)]
    assert [(record.requested_model, record.model) for record in written] == [(names[0], LARGE), (ONE, ONE)]


async def test_a_continued_stream_stays_with_its_model_whatever_the_weights_are_then(text: TextModel) -> None:
    body = streaming_body(CHAT, model="assistant", max_tokens=12, ignore_eos=True)
    async with open_bench(text, **of_version(0)) as bench:
        for replica in bench.replicas.values():
            equal(replica)
        whole: dict[Any, Any] = answer_of((await send(bench.gateway, CHAT, body)).events)
        first = (await send(bench.gateway, CHAT, body, leave_after=4)).events
        await kept(bench)
        await apply(bench, {**of_version(100)})
        rest = await send(bench.gateway, CHAT, body, last_event=first[-1].id)
        assert rest.status == 200, rest.body
        made: dict[Any, Any] = answer_of([*first, *rest.events])
        assert made[0] == whole[0]
        assert made["constants"]["model"] == ONE
        assert not bench.replicas[TWO].requests
        again = (await send(bench.gateway, CHAT, body, leave_after=4)).events
        await kept(bench)
        left = {"models": served(ONE), "routes": {"assistant": {"targets": [{"model": ONE}]}}}
        await apply(bench, {**left})
        refused = await send(bench.gateway, CHAT, body, last_event=again[-1].id)
        assert (refused.status, "not served any more" in refused.error["message"]) == (409, True)


async def test_another_key_of_the_tenant_continues_no_stream_of_a_model_that_it_may_not_use(text: TextModel) -> None:
    keys = [{"key": f"key-of-{name}", "tenant": "acme", "tier": name} for name in ("large", "small")]
    tiers = {"large": {"models": [LARGE]}, "small": {"models": [ONE]}}
    body = streaming_body(CHAT, model=None, max_tokens=12, ignore_eos=True)
    config: dict[str, Any] = {"models": served(ONE, LARGE), "api_keys": keys, "tiers": tiers}
    async with open_bench(text, **config) as bench:
        for replica in bench.replicas.values():
            equal(replica)
        first = (await send(bench.gateway, CHAT, body, key="key-of-large", leave_after=4)).events
        await kept(bench)
        refused = await send(bench.gateway, CHAT, body, key="key-of-small", last_event=first[-1].id)
        assert refused.status == 409
        assert (await send(bench.gateway, CHAT, body, key="key-of-large", last_event=first[-1].id)).status == 200


def copied(share: float = 1.0) -> dict[str, Any]:
    return routed([{"model": ONE}], shadow={"model": SHADOW, "share": share})


def num_copies(bench: TestBench, result: ShadowResult) -> float:
    return metric(bench.gateway, "headrace_shadow_requests_total", model=SHADOW, result=result)


def without_ids(response: httpx2.Response) -> tuple[bytes, dict[str, str]]:
    """Body and headers without what the time makes of them."""
    body = re.sub(rb"[0-9a-f]{24}|\"created\":\d+", b"", response.content)
    return body, {name: value for name, value in response.headers.items() if name not in ("x-request-id", "x-ratelimit-reset-tokens")}


@pytest.mark.parametrize("fields", [{}, {"stream": True, "stream_options": {"include_usage": True}}, {"logprobs": True, "n": 2}])
async def test_a_copy_changes_no_byte_and_costs_nothing(text: TextModel, tmp_path: Path, fields: dict[str, Any]) -> None:
    answers, figures = [], []
    for name, config in (("plain", routed([{"model": ONE}])), ("copied", copied())):
        (tmp_path / name).mkdir()
        more: dict[str, Any] = {"api_keys": KEYS, "tiers": TIERS, "prices": {SHADOW: {"output": 5.0}}, "state": str(tmp_path / name)}
        async with open_bench(text, **config, **more) as bench:
            bench.replicas[SHADOW].said = "Another answer."
            answers.append(without_ids(await ask(bench, key="key-of-acme", max_tokens=8, seed=1, **fields)))
            await eventually(lambda bench=bench, name=name: num_copies(bench, ShadowResult.ANSWERED) == (name == "copied"))  # type: ignore[misc]
            ledger = bench.gateway.service.explanations.ledger
            assert ledger is not None
            rows: list[Any] = []
            while not rows:
                rows = list(await ledger.rows(UsageQuery(by=["model"])))
                await asyncio.sleep(0.01)
            figures.append((rows, await used(bench, "daily_tokens", "key-of-acme")))
            sent = bench.replicas[SHADOW].requests
        assert len(bench.replicas[ONE].requests) == 1
    assert answers[0] == answers[1]
    assert figures[0] == figures[1]
    assert [row["model"] for row in figures[0][0]] == [ONE]
    (copy,) = sent
    assert copy.priority is PriorityClass.BATCH
    (real,) = bench.replicas[ONE].requests
    assert copy.prompt_ids == real.prompt_ids
    assert copy.salt != real.salt, "no request finds what a copy cached"
    assert (copy.params.n, copy.params.logprobs) == (fields.get("n", 1), None)


async def test_a_share_of_the_requests_is_copied(text: TextModel) -> None:
    async with open_bench(text, **copied(0.5)) as bench:
        for _ in range(40):
            await answered_by(bench)
        await eventually(lambda: num_copies(bench, ShadowResult.ANSWERED) == len(bench.replicas[SHADOW].requests))
        assert 5 < len(bench.replicas[SHADOW].requests) < 35


async def test_no_copy_goes_to_a_server_that_its_client_forbids(text: TextModel) -> None:
    server = ScriptedServer(head() + said("copied", "stop") + DONE)
    async with listening(server) as (port,):
        shadow = {"name": SHADOW, "upstreams": [{"url": f"http://127.0.0.1:{port}/v1"}]}
        async with open_bench(text, **{**copied(), "models": [*served(ONE), shadow]}) as bench:
            assert (await ask(bench, provider={"only": ["headrace"]})).status_code == 200
            assert (num_copies(bench, ShadowResult.SKIPPED), server.bodies) == (1, [])
            assert (await ask(bench)).status_code == 200
            await eventually(lambda: num_copies(bench, ShadowResult.ANSWERED) == 1)
            assert len(server.bodies) == 1


async def test_a_shadow_that_fails_is_counted_and_not_noticed(text: TextModel) -> None:
    def refuse(_request: EngineRequest, _stream: ReplicaStream) -> None:
        raise RuntimeError("a fault")

    async with open_bench(text, **copied()) as bench:
        bench.replicas[SHADOW].on_submit = refuse
        assert await answered_by(bench) == ONE
        await eventually(lambda: num_copies(bench, ShadowResult.FAILED) == 1)


async def test_a_busy_shadow_gets_no_copy(text: TextModel) -> None:
    async with open_bench(text, **copied()) as bench:
        shadow = bench.replicas[SHADOW]
        assert shadow.snapshot is not None
        shadow.snapshot = SeenLoad(snapshot(num_running=4, num_waiting=3, max_num_seqs=4), shadow.snapshot.received_s)
        assert await answered_by(bench) == ONE
        assert num_copies(bench, ShadowResult.SKIPPED) == 1
        assert not shadow.requests


async def test_few_copies_run_at_once_and_a_shutdown_ends_them(text: TextModel) -> None:
    async with open_bench(text, **copied()) as bench:
        shadow = bench.replicas[SHADOW]
        shadow.go.clear()
        for _ in range(MAX_COPIES + 2):
            assert await answered_by(bench) == ONE
        await eventually(lambda: len(shadow.requests) == MAX_COPIES)
        assert num_copies(bench, ShadowResult.SKIPPED) == 2
        memory = bench.gateway.service.memory
        assert memory.prompts.held > 0, "copies are charged"
        memory.check()
        await bench.gateway.service.pipeline.shadows.close()
        assert len(shadow.cancelled) == MAX_COPIES
        assert memory.held == 0
        assert not bench.gateway.service.models.get(SHADOW).users.num_users


async def test_a_removed_shadow_stays_open_until_its_copy_has_ended(text: TextModel) -> None:
    async with open_bench(text, **copied()) as bench:
        shadow = bench.replicas[SHADOW]
        shadow.go.clear()
        await answered_by(bench)
        await eventually(lambda: len(shadow.requests) == 1)
        await apply(bench, {"models": served(ONE)})
        assert not shadow.is_closed
        shadow.go.set()
        await eventually(lambda: shadow.is_closed)
        assert not shadow.cancelled


async def test_neither_a_caches_answer_nor_the_shadows_own_is_copied(text: TextModel) -> None:
    config = routed([{"model": ONE, "size": "a"}, {"model": SHADOW, "size": "b"}], shadow={"model": SHADOW})
    async with open_bench(text, **config, cache={"enabled": True}) as bench:
        assert await answered_by(bench, "assistant:b") == SHADOW
        for _ in range(2):
            assert (await ask(bench, "assistant:a", temperature=0)).status_code == 200
        await eventually(lambda: num_copies(bench, ShadowResult.ANSWERED) == 1)
        assert len(bench.replicas[ONE].requests) == 1
        assert len(bench.replicas[SHADOW].requests) == 2


@pytest.mark.parametrize(
    ("route", "where", "reason"),
    [
        ({"targets": []}, "targets", "is empty"),
        ({"targets": [{"model": "nobody"}]}, "targets[0].model", "is not a model's name"),
        ({"targets": [{"model": ONE}, {"model": ONE}]}, "targets[1].model", "is a target twice"),
        ({"targets": [{"model": ONE, "size": "s"}, {"model": TWO}]}, "targets[1].size", "is given to some targets alone"),
        ({"targets": [{"model": ONE, "size": "a:b"}]}, "targets[0].size", "is not one word"),
        ({"targets": [{"model": ONE, "version": "a@b"}]}, "targets[0].version", "is not one word"),
        ({"targets": [{"model": ONE, "weight": 0}]}, "targets[0].weight", "is 0, as is that of all targets of its size"),
        ({"targets": [{"model": ONE, "weight": -1}]}, "targets[0].weight", "is outside"),
        ({"targets": [{"model": ONE}], "sticky": "user"}, "sticky", "is not one of request, session, tenant"),
        ({"targets": [{"model": ONE}], "shadow": {"model": "assistant"}}, "shadow.model", "is not a model's name"),
        ({"targets": [{"model": ONE}], "shadow": {"model": TWO, "share": 0}}, "shadow.share", "is outside"),
    ],
)
def test_a_wrong_route_is_refused_by_its_key(route: dict[str, Any], where: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gateway_config(models=served(ONE, TWO), routes={"assistant": route})
    assert caught.value.where == f"routes.assistant.{where}"
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"), [(ONE, "is served twice"), ("a:b", "has a : or @"), ("a@2", "has a : or @"), ("a b", "not a model name")]
)
def test_a_routes_name_is_a_models_name_without_size_and_version(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        gateway_config(models=served(ONE, TWO), routes={name: {"targets": [{"model": ONE}]}})
