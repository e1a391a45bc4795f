"""Tests adapters as models: which are served, to whom, at which replicas, and that other files under a name are noticed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, FakeReplica, TestBench, chat_body, eventually, metric, open_bench, snapshot, two_replicas
from resume_kit import CHAT, NUMERICS, equal, kept, send, streaming_body
from virtual_time import virtual_loop
from wire_kit import connected, request, served

from headrace.core.adapters import AdapterSource
from headrace.core.errors import Unavailable
from headrace.core.request import EngineRequest
from headrace.engine.config import EngineConfig
from headrace.gateway.upstream.own.attempts import CallAttempts, PromptCall
from headrace.gateway.upstream.own.replica_health import Replica
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.gateway.upstream.served_models import MAX_LOGGED
from headrace.lab.fake_adapters import save_fake_adapter
from headrace.lab.fake_runner import fake_answer
from headrace.policy.routing.choice import ReplicaId
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, SeenLoad
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

ADAPTER = "acme/sql"
FIRST, SECOND = {ADAPTER: "aa"}, {ADAPTER: "cc"}


def give(replica: FakeReplica, adapters: dict[str, str]) -> None:
    """The replica announces these and no others."""
    assert replica.info is not None
    replica.info = replace(replica.info, model=replace(replica.info.model.with_adapters(adapters), numerics=NUMERICS))


async def listed(bench: TestBench, key: str = "") -> list[str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await bench.client.get("/v1/models", headers=headers)
    return [card["id"] for card in answer.json()["data"]]


async def status(bench: TestBench, model: str = ADAPTER, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return (await bench.client.post(CHAT, json={**chat_body(max_tokens=2), "model": model}, headers=headers)).status_code


def asked(replica: FakeReplica) -> list[tuple[str | None, str]]:
    return [(request.adapter, request.adapter_digest) for request in replica.requests]


async def test_an_adapter_is_a_model_beside_its_base(text: TextModel) -> None:
    async with open_bench(text) as bench:
        give(bench.replica, FIRST)
        assert await listed(bench) == [MODEL, "gpt-4o", ADAPTER]
        base, card = [(await bench.client.get(f"/v1/models/{name}")).json() for name in (MODEL, ADAPTER)]
        assert card == {**base, "id": ADAPTER, "root": ADAPTER, "parent": MODEL}
        assert base["parent"] is None
        answer = await bench.chat(model=ADAPTER)
        assert (answer.status_code, answer.json()["model"], answer.headers["x-headrace-model"]) == (200, ADAPTER, ADAPTER)
        assert (await bench.chat()).json()["model"] == MODEL
        assert asked(bench.replica) == [(ADAPTER, "aa"), (None, "")]
        assert answer.json()["system_fingerprint"] == f"{(await bench.chat()).json()['system_fingerprint']}_aa"
        counted = await bench.client.post("/v1/tokenize", json={"model": ADAPTER, "prompt": "Hello"})
        assert counted.json() == (await bench.client.post("/v1/tokenize", json={"model": MODEL, "prompt": "Hello"})).json()
        probed = await bench.client.get(f"/ready?model={ADAPTER}")  # which sends no key
        other = await bench.client.get("/ready?model=nope")
        assert (probed.status_code, other.status_code) == (404, 404)
        assert ADAPTER not in other.text


async def test_a_name_that_may_be_an_adapters_can_be_tried_again_while_the_base_is_starting(text: TextModel) -> None:
    async with open_bench(text) as bench:
        connected = bench.replica.info
        bench.replica.info = None
        answer = await bench.chat(model=ADAPTER)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert "may be an adapter of one that is still starting" in answer.json()["error"]["message"]
        bench.replica.info = connected
        assert await status(bench) == 404
        bench.replica.info = None  # it starts again: what it had is known
        assert await status(bench) == 404


async def test_an_adapter_is_served_by_the_replicas_that_have_it(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        give(first, {**FIRST, "b": "bb"})
        give(second, FIRST)
        assert await listed(bench) == [MODEL, ADAPTER, "b"]
        assert [await status(bench, "b") for _ in range(4)] == [200] * 4
        assert (len(asked(first)), asked(second)) == (4, [])
        unknown = await bench.chat(model="c")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        first.state = ConnectionState.SILENT
        assert (await listed(bench), await status(bench, "b"), await status(bench)) == ([MODEL, ADAPTER, "b"], 503, 200)
        first.die()
        assert (await listed(bench), await status(bench, "b")) == ([MODEL, ADAPTER], 404)
        second.die()
        assert (await listed(bench), await status(bench)) == ([MODEL, ADAPTER], 503), "the last known ones"


async def test_while_digests_differ_requests_go_where_most_ready_replicas_agree(text: TextModel) -> None:
    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        give(first, SECOND)
        give(second, FIRST)
        assert [await status(bench) for _ in range(4)] == [200] * 4
        assert len({digest for _, digest in asked(first) + asked(second)}) == 1
        assert not (asked(first) and asked(second))
        first.state = ConnectionState.DRAINING
        assert await status(bench) == 200
        assert asked(second)[-1] == (ADAPTER, "aa"), "those that are not ready do not count"


async def test_a_running_answer_ends_with_the_files_that_it_began_with(text: TextModel) -> None:
    async with open_bench(text) as bench:
        give(bench.replica, FIRST)
        bench.replica.go.clear()
        running = asyncio.create_task(bench.chat(model=ADAPTER))
        await eventually(lambda: bool(bench.replica.requests))
        give(bench.replica, SECOND)
        bench.replica.go.set()
        assert (await running).status_code == 200
        assert await status(bench) == 200
        assert asked(bench.replica) == [(ADAPTER, "aa"), (ADAPTER, "cc")]


async def test_a_replica_whose_files_have_just_changed_is_not_the_last_word(text: TextModel) -> None:
    """Its engine knows before the gateway does: the request goes to the other replica, and without one it may be sent again."""

    def refuse(_request: EngineRequest, stream: ReplicaStream) -> None:
        stream.reject(Unavailable("other files"))

    async with open_bench(text, models=two_replicas()) as bench:
        first, second = bench.replicas.values()
        for replica in (first, second):
            give(replica, FIRST)
        first.on_submit = refuse
        second.snapshot = SeenLoad(snapshot(num_running=5), virtual_loop().time() + 1e6)
        assert (await status(bench), len(first.requests), len(second.requests)) == (200, 1, 1)
        second.state = ConnectionState.DRAINING
        refused = await bench.chat(model=ADAPTER)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


@pytest.mark.socket
@pytest.mark.parametrize("is_unloaded", [True, False])
async def test_a_request_that_an_engine_refuses_for_its_new_files_is_answered_by_another_engine(tmp_path: Path, is_unloaded: bool) -> None:
    """Real engines. The first one's adapters change, and the gateway does not know it yet."""
    folders = [save_fake_adapter(tmp_path / name, b"weights") for name in ("first", "second")]
    sources = [AdapterSource(name=ADAPTER, path=str(folder)) for folder in folders]
    configs = [EngineConfig(model="fake", enable_lora=True, lora_modules=(source,)) for source in sources]
    async with served(config=configs[0]) as first, served(config=configs[1]) as second, connected(first) as near, connected(second) as far:
        pool = ReplicaPool(MODEL, [Replica(ReplicaId("near"), near), Replica(ReplicaId("far"), far)], random=random.Random(3))
        digest = second.engine.info.adapters[ADAPTER]
        save_fake_adapter(folders[0], b"other weights")
        first.engine.set_adapters([] if is_unloaded else sources[:1])
        assert pool.adapter_digest(ADAPTER) == digest
        whole = request("r", adapter=ADAPTER, adapter_digest=digest)
        attempts = CallAttempts(pool, PromptCall(request=whole, max_output_tokens=8))
        while updates := await attempts.batch():
            for update in updates:
                attempts.keep(update.index, update.token_ids)
                if update.finish is not None:
                    attempts.end(update.index, update.finish)
        assert (attempts.replicas, attempts.epoch) == (["far"], 1), "the first attempt went to the engine that refused it"
        assert list(attempts.output_ids[0]) == fake_answer(whole, 0, 8, second.options)
        await attempts.close()


TIERS: dict[str, Any] = {
    "tiers": {"base": {"models": [MODEL]}, "own": {"models": [ADAPTER]}, "every": {}},
    "api_keys": [{"key": f"key-of-{tier}", "tenant": tier, "tier": tier} for tier in ("base", "own", "every")],
}


@pytest.mark.parametrize(
    ("tier", "models", "of_base", "of_adapter"),
    [("base", [MODEL, "gpt-4o"], 200, 404), ("own", [ADAPTER], 404, 200), ("every", [MODEL, "gpt-4o", ADAPTER], 200, 200)],
)
async def test_who_may_use_the_base_may_not_use_its_adapters_for_that(
    text: TextModel, tier: str, models: list[str], of_base: int, of_adapter: int
) -> None:
    async with open_bench(text, **TIERS) as bench:
        give(bench.replica, FIRST)
        key = f"key-of-{tier}"
        assert await listed(bench, key) == models
        assert (await status(bench, MODEL, key), await status(bench, ADAPTER, key)) == (of_base, of_adapter)
        unknown = await bench.client.post(CHAT, json=chat_body() | {"model": "nope"}, headers={"authorization": f"Bearer {key}"})
        assert f"one of: {', '.join(models)}, got" in unknown.json()["error"]["message"]


async def test_no_adapter_hides_a_model_that_is_configured(text: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    async with open_bench(text, **TIERS) as bench:
        give(bench.replica, {MODEL: "aa", "gpt-4o": "aa"})
        for _ in range(3):
            assert await listed(bench, "key-of-every") == [MODEL, "gpt-4o"]
        assert (await status(bench, MODEL, "key-of-every"), await status(bench, "gpt-4o", "key-of-every")) == (200, 200)
        assert await status(bench, MODEL, "key-of-own") == 404
        assert asked(bench.replica) == [(None, "")] * 2
        assert caplog.text.count("is not served") == 2
        model = bench.gateway.service.models.get(MODEL)
        for number in range(2 * MAX_LOGGED):
            model.hide_adapter(f"a{number}", model.name)
        assert len(model.hidden_adapters) == MAX_LOGGED


async def test_an_adapter_costs_what_its_base_does_and_is_counted_under_it(text: TextModel) -> None:
    prices = {MODEL: {"input": 1.0, "output": 2.0}}
    async with open_bench(text, prices=prices) as bench:
        give(bench.replica, FIRST)
        told = []
        for name in (MODEL, ADAPTER):
            answer = await bench.chat(model=name, max_tokens=4)
            told.append((await bench.client.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")).json())
        assert [(each["model"], each.get("adapter")) for each in told] == [(MODEL, None), (MODEL, ADAPTER)]
        assert told[0]["cost"] == told[1]["cost"] > 0
        assert metric(bench.gateway, "headrace_requests_total", model=MODEL, replica="r0", outcome="length") == 2
        assert metric(bench.gateway, "headrace_time_to_first_token_seconds_count", model=MODEL, replica="r0") == 2
        assert ADAPTER not in (await bench.client.get("/metrics")).text


async def test_an_answer_of_other_files_is_never_found_in_the_cache(text: TextModel) -> None:
    async with open_bench(text, cache={"enabled": True}) as bench:

        async def result(model: str) -> str:
            answer = await bench.chat(model=model, temperature=0, max_tokens=4)
            await eventually(lambda: not bench.gateway.service.stages.answer_cache.num_computing)
            return answer.headers["x-headrace-cache"]

        give(bench.replica, FIRST)
        assert [await result(name) for name in (MODEL, ADAPTER, ADAPTER)] == ["miss", "miss", "hit"]
        give(bench.replica, SECOND)
        assert [await result(name) for name in (MODEL, ADAPTER, ADAPTER)] == ["hit", "miss", "hit"]
        bench.gateway.service.stages.answer_cache.check()


@pytest.mark.parametrize(("later", "expected"), [(FIRST, 200), (SECOND, 409)])
async def test_a_stream_that_a_client_continues_needs_the_same_files(text: TextModel, later: dict[str, str], expected: int) -> None:
    async with open_bench(text) as bench:
        equal(bench.replica)
        give(bench.replica, FIRST)
        body = streaming_body(CHAT, model=ADAPTER, max_tokens=12, ignore_eos=True)
        events = (await send(bench.gateway, CHAT, body, leave_after=4)).events
        await kept(bench)
        give(bench.replica, later)
        again = await send(bench.gateway, CHAT, body, last_event=events[-1].id)
        assert again.status == expected
        if expected == 409:
            assert "other weights" in again.error["message"]


@pytest.mark.parametrize(("other", "expected"), [(FIRST, 200), (SECOND, 503)])
async def test_a_lost_stream_goes_on_only_where_the_same_files_are(text: TextModel, other: dict[str, str], expected: int) -> None:
    async with open_bench(text, models=two_replicas(), timeouts={"failover_s": 30}) as bench:
        first, second = bench.replicas.values()
        for replica in (first, second):
            equal(replica)
            give(replica, FIRST)
        second.state = ConnectionState.DRAINING
        first.token_delay_s = 0.1
        running = asyncio.create_task(bench.chat(model=ADAPTER, max_tokens=20, ignore_eos=True))
        await eventually(lambda: bool(first.requests))
        await asyncio.sleep(0.55)
        second.state = ConnectionState.CONNECTED
        give(second, other)
        first.die()
        answer = await running
        assert answer.status_code == expected
        assert [bool(request.output_ids) for request in second.requests] == ([True] if expected == 200 else [])
        told = (await bench.client.get(f"/v1/requests/{answer.headers['x-request-id']}/explain")).json()
        assert (expected == 200) or f"the adapter {ADAPTER} has other files there" in told["detail"]


@pytest.mark.parametrize(("other", "has_moved"), [(FIRST, True), (SECOND, False)])
async def test_a_hanging_replica_keeps_its_streams_where_no_other_has_its_adapters(
    text: TextModel, other: dict[str, str], has_moved: bool
) -> None:
    async with open_bench(text, models=two_replicas(), timeouts={"failover_s": 30}) as bench:
        first, second = bench.replicas.values()
        give(second, FIRST)
        give(first, FIRST)
        now = virtual_loop().time()
        second.snapshot = SeenLoad(snapshot(num_running=5), now + 1e6)
        first.token_delay_s = 0.1
        running = asyncio.create_task(bench.chat(model=ADAPTER, max_tokens=20, ignore_eos=True))
        await asyncio.sleep(0.55)
        give(second, other)
        first.go.clear()
        first.snapshot = SeenLoad(snapshot(step_age_s=5.0, step_predicted_s=0.1), virtual_loop().time())
        await asyncio.sleep(3.0)
        assert bool(second.requests) is has_moved
        first.go.set()
        assert (await running).status_code == 200


async def test_of_a_hanging_replica_the_streams_of_the_base_model_move_and_those_of_an_adapter_that_no_other_has_stay(
    text: TextModel,
) -> None:
    async with open_bench(text, models=two_replicas(), timeouts={"failover_s": 30}) as bench:
        first, second = bench.replicas.values()
        give(first, FIRST)
        give(second, {})
        second.snapshot = SeenLoad(snapshot(num_running=5), virtual_loop().time() + 1e6)
        first.token_delay_s = 0.1
        plain, adapted = [asyncio.create_task(bench.chat(model=name, max_tokens=20, ignore_eos=True)) for name in (MODEL, ADAPTER)]
        await asyncio.sleep(0.55)
        assert asked(second) == []
        first.go.clear()
        first.snapshot = SeenLoad(snapshot(step_age_s=5.0, step_predicted_s=0.1), virtual_loop().time())
        assert (await plain).status_code == 200
        [moved] = second.requests
        assert (moved.adapter, bool(moved.output_ids), adapted.done()) == (None, True, False)
        first.go.set()
        assert (await adapted).status_code == 200
        assert len(second.requests) == 1


async def test_vllms_path_names_the_command_instead(bench: TestBench) -> None:
    for path, command in (("load_lora_adapter", "load NAME PATH"), ("unload_lora_adapter", "unload NAME")):
        refused = await bench.client.post(f"/v1/{path}", json={"lora_name": "a", "lora_path": "/a"})
        assert refused.status_code == 404
        assert f"`headrace adapters {command}`" in refused.json()["error"]["message"]
