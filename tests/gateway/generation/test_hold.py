"""Tests requests for a model without a replica that takes them: they wait, in order and within bounds, until one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, events_of, gateway_config, metric, open_bench, snapshot
from virtual_time import virtual_loop

from headrace.core.errors import ConfigError, Unavailable
from headrace.core.request import EngineRequest
from headrace.gateway.http.sse import PING_S
from headrace.gateway.upstream.own.holding import HOLD_S
from headrace.gateway.upstream.own.upstream import TokenUpstream
from headrace.gateway.upstream.seam import Prepared
from headrace.policy import holding
from headrace.policy.admission import BUSY_DEPTH
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, ReplicaInfo, SeenLoad
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

FAR_S = 1e6
ASLEEP = {"name": MODEL, "folder": "/nowhere", "replicas": [], "starts_on_demand": True}
AWAKE = {**ASLEEP, "replicas": [{"name": "r0", "address": "unix:/nowhere"}]}
UPSTREAM = {"upstreams": [{"name": "u", "url": "http://127.0.0.1:9/v1", "model": "m"}]}
KEYS = [
    {"key": "sk-ant-0123456789", "tenant": "ant"},
    {"key": "sk-bee-0123456789", "tenant": "bee"},
    {"key": "sk-premium-0123456789", "tenant": "cat", "tier": "premium"},
    {"key": "sk-batch-0123456789", "tenant": "dog", "tier": "batch"},
]
ANT, BEE, PREMIUM, BATCH = range(4)


def lose(bench: TestBench, state: ConnectionState = ConnectionState.DOWN) -> ReplicaInfo:
    """As a replica that has not started, or one that is gone."""
    replica, info = bench.replica, bench.replica.info
    assert info is not None
    replica.state, replica.info, replica.snapshot = state, None, None
    return info


def start(bench: TestBench, info: ReplicaInfo, **load: Any) -> None:
    bench.replica.state, bench.replica.info = ConnectionState.CONNECTED, info
    bench.replica.snapshot = SeenLoad(snapshot(**load), virtual_loop().time() + FAR_S)


def held(bench: TestBench) -> float:
    return metric(bench.gateway, "headrace_requests_held", model=MODEL)


def post(bench: TestBench, key: int) -> asyncio.Task[Any]:
    authorization = {"authorization": f"Bearer {KEYS[key]['key']}"}
    return asyncio.create_task(bench.client.post("/v1/chat/completions", json=chat_body(max_tokens=3), headers=authorization))


async def apply(bench: TestBench, model: dict[str, Any]) -> None:
    await bench.reloader.reload(lambda: gateway_config(models=[model]))


def order(bench: TestBench, of: Callable[[EngineRequest], Any]) -> list[Any]:
    return [of(request) for request in bench.replica.requests]


async def test_a_request_waits_for_an_engine_that_sleeps_and_the_supervisor_sees_it(text: TextModel) -> None:
    async with open_bench(text) as bench:
        assert bench.replica.info is not None
        start(bench, bench.replica.info, is_asleep=True)
        asking = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(120.0)
        assert not bench.replica.requests
        status = bench.reloader.status()[MODEL]
        assert (status.num_held, status.replicas["r0"].reason) == (1, "asleep")
        start(bench, bench.replica.info)
        assert (await asking).status_code == 200
        assert bench.reloader.status()[MODEL].num_held == 0


async def test_a_request_waits_for_the_first_replica_and_its_explanation_says_so(text: TextModel) -> None:
    async with open_bench(text) as bench:
        info = lose(bench)
        asking = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(120.0)
        assert (held(bench), asking.done()) == (1, False)
        start(bench, info)
        answer = await asking
        assert (answer.status_code, answer.headers["x-headrace-reason"], held(bench)) == (200, "queued", 0)
        request_id = answer.headers["x-request-id"]
        stages = (await bench.client.get(f"/v1/requests/{request_id}/explain")).json()["stages"]
        assert [each["seconds"] for each in stages if each["name"] == "hold"] == [pytest.approx(120.0, abs=0.2)]


async def test_a_model_that_sleeps_is_ready_and_its_requests_wait_until_one_is_listed(text: TextModel) -> None:
    async with open_bench(text, models=[ASLEEP]) as bench:
        assert [(await bench.client.get(path)).status_code for path in ("/ready", "/health", "/v1/models")] == [200] * 3
        asking = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(1.0)
        assert held(bench) == 1
        await apply(bench, AWAKE)
        assert (await asking).status_code == 200


async def test_requests_wait_for_a_first_replica_that_is_not_listed_yet_and_probes_say_so(text: TextModel) -> None:
    async with open_bench(text, models=[{**ASLEEP, "num_wanted": 1}]) as bench:
        assert [(await bench.client.get(path)).status_code for path in ("/ready", "/health")] == [503, 503]
        asking = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(60.0)
        assert held(bench) == 1
        await apply(bench, {**AWAKE, "starts_on_demand": False, "num_wanted": 1})
        assert (await asking).status_code == 200


async def test_without_an_hour_left_requests_are_refused_until_the_day_ends_and_the_gateway_stays_ready(text: TextModel) -> None:
    unix_time = virtual_loop().unix_time
    async with open_bench(text, models=[ASLEEP]) as bench:
        waiting = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(1.0)
        await apply(bench, {**ASLEEP, "num_wanted": 0, "closed_until": unix_time() + 3600.0})
        for answer in (await waiting, await bench.chat(max_tokens=3)):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "3600")
            assert "The hours of its replicas are used up until midnight UTC" in answer.text
        assert [(await bench.client.get(path)).status_code for path in ("/ready", "/health", "/v1/models")] == [200] * 3
        await asyncio.sleep(3600.0)
        asking = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(1.0)
        assert held(bench) == 1
        await apply(bench, AWAKE)
        assert (await asking).status_code == 200


async def test_the_number_of_pods_that_are_wanted_is_on_the_metrics_page_and_changes_no_probe(text: TextModel) -> None:
    async with open_bench(text, models=[{**ASLEEP, "num_pods": 3}]) as bench:
        assert metric(bench.gateway, "headrace_replicas_wanted", model=MODEL) == 3
        assert (await bench.client.get("/ready")).status_code == 200, "pods load elsewhere"
        await apply(bench, ASLEEP)
        assert "headrace_replicas_wanted{" not in (await bench.client.get("/metrics")).text


async def test_what_waits_is_refused_once_the_model_cannot_be_served(text: TextModel) -> None:
    async with open_bench(text, models=[ASLEEP]) as bench:
        asking = asyncio.create_task(bench.chat())
        await asyncio.sleep(1.0)
        await apply(bench, {**ASLEEP, "unavailable": "Its engine refused its weights."})
        answer = await asking
        assert (answer.status_code, "refused its weights" in answer.text) == (503, True)
        began = virtual_loop().time()
        assert ((await bench.chat()).status_code, virtual_loop().time() - began) == (503, 0.0), "at once"


@pytest.mark.parametrize("model", [ASLEEP, AWAKE], ids=["none listed", "one starting"])
async def test_what_waits_is_refused_at_once_when_its_model_is_removed(text: TextModel, model: dict[str, Any]) -> None:
    owl = {"name": "owl", "folder": "/nowhere", "replicas": [{"name": "of-owl", "address": "unix:/nowhere"}]}
    async with open_bench(text, models=[model, owl]) as bench:
        if model is AWAKE:
            replica = bench.replicas["r0"]
            replica.state, replica.info, replica.snapshot = ConnectionState.DOWN, None, None
        asking = asyncio.create_task(bench.chat())
        await asyncio.sleep(1.0)
        assert held(bench) == 1
        began = virtual_loop().time()
        await apply(bench, owl)
        assert (await asking).status_code == 503
        assert virtual_loop().time() - began < 0.1


async def test_what_waits_for_no_replica_is_refused_when_its_model_is_opened_again(text: TextModel) -> None:
    async with open_bench(text, models=[ASLEEP]) as bench:
        asking = asyncio.create_task(bench.chat())
        await asyncio.sleep(1.0)
        began = virtual_loop().time()
        await apply(bench, {**ASLEEP, **UPSTREAM})
        answer = await asking
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert virtual_loop().time() - began < 0.1
        assert held(bench) == 0


async def test_what_waits_for_a_listed_replica_waits_on_when_its_model_is_opened_again(text: TextModel) -> None:
    async with open_bench(text) as bench:
        info = lose(bench)
        before = bench.replica
        asking = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(1.0)
        given = gateway_config().models[0]
        listed = [{"name": replica.name, "address": replica.address} for replica in given.replicas]
        await apply(bench, {"name": MODEL, "folder": given.folder, "replicas": listed, **UPSTREAM})
        await asyncio.sleep(1.0)
        assert bench.replica is not before
        assert (held(bench), bench.reloader.status()[MODEL].num_held) == (1, 1), "an engine that sleeps is woken for it"
        before.state, before.info = ConnectionState.CONNECTED, info
        before.snapshot = SeenLoad(snapshot(), virtual_loop().time() + FAR_S)
        assert (await asking).status_code == 200


async def test_premium_requests_go_first_and_tenants_take_turns(text: TextModel) -> None:
    async with open_bench(text, api_keys=KEYS) as bench:
        info = lose(bench)
        asked = [post(bench, key) for key in (BATCH, ANT, ANT, ANT, BEE, PREMIUM)]
        await asyncio.sleep(1.0)
        assert held(bench) == len(asked)
        start(bench, info, num_waiting=BUSY_DEPTH - 1)  # one begins after another
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * len(asked)
        assert order(bench, lambda request: request.priority.name) == ["PREMIUM", *["STANDARD"] * 4, "BATCH"]
        ant, bee, *rest = order(bench, lambda request: request.tenant)[1:5]
        assert ant != bee, "the second one of a tenant waits for the other's first"
        assert rest == [ant, ant]


async def test_no_more_begin_than_the_queue_of_the_replica_takes(text: TextModel) -> None:
    async with open_bench(text) as bench:
        info = lose(bench)
        asked = [asyncio.create_task(bench.chat(max_tokens=3)) for _ in range(40)]
        await asyncio.sleep(1.0)
        bench.replica.go.clear()
        start(bench, info, num_waiting=BUSY_DEPTH - 4)
        bench.replica.on_submit = lambda _request, _stream: start(bench, info, num_waiting=BUSY_DEPTH - 4 + bench.replica.num_open)
        await asyncio.sleep(1.0)
        assert (bench.replica.num_open, held(bench)) == (4, 36)
        late = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(1.0)
        assert held(bench) == 37, "nothing overtakes those that wait"
        bench.replica.go.set()
        bench.replica.on_submit = None
        start(bench, info)
        assert {answer.status_code for answer in await asyncio.gather(*asked, late)} == {200}


async def test_what_is_held_is_not_starved_by_another_gateway(text: TextModel) -> None:
    full = {"num_running": 256, "max_num_seqs": 256, "step_fixed_s": 0.02, "step_token_s": 1e-5, "num_queued_tokens": 1200}
    async with open_bench(text) as other, open_bench(text) as bench:
        info = lose(bench)
        asked = [asyncio.create_task(bench.chat(max_tokens=3)) for _ in range(30)]
        await asyncio.sleep(1.0)
        start(bench, info, num_waiting=BUSY_DEPTH + 2, **full)
        other.replica.snapshot = bench.replica.snapshot
        assert (await other.chat(max_tokens=3)).status_code == 200, "admission lets it join"
        await asyncio.sleep(1.0)
        assert held(bench) == 30
        await asyncio.sleep(2.0)
        assert 5 <= held(bench) < 30, "they go one by one"
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_what_is_held_does_not_join_a_queue_that_admission_refuses(text: TextModel) -> None:
    full = {"num_running": 4, "max_num_seqs": 4, "step_fixed_s": 1.0, "step_token_s": 0.1, "num_queued_tokens": 10**6}
    async with open_bench(text) as bench:
        info = lose(bench)
        asking = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(1.0)
        start(bench, info, num_waiting=1000, **full)
        await asyncio.sleep(10.0)
        assert held(bench) == 1
        start(bench, info)
        assert (await asking).status_code == 200


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_wait_ends_with_503_and_a_deadline_with_504(text: TextModel, is_streaming: bool) -> None:
    for request_s, wait_s, code in ((None, HOLD_S, "unavailable"), (40.0, 40.0, "deadline_exceeded")):
        async with open_bench(text, timeouts={"request_s": request_s}) as bench:
            lose(bench)
            began = virtual_loop().time()
            answer = await bench.chat(stream=is_streaming)
            assert virtual_loop().time() - began == pytest.approx(wait_s)
            error = events_of(answer.text)[-1] if is_streaming else answer.json()
            assert error["error"]["code"] == code
            assert answer.status_code == (200 if is_streaming else 503 if request_s is None else 504)
            assert is_streaming or request_s or answer.headers["retry-after"] == "10"


async def test_a_replica_that_was_lost_is_waited_for_as_long_as_running_requests_wait(text: TextModel) -> None:
    async with open_bench(text, timeouts={"failover_s": 30}) as bench:
        await asyncio.sleep(1.0)
        lose(bench)
        began = virtual_loop().time()
        assert (await bench.chat()).status_code == 503
        assert virtual_loop().time() - began == pytest.approx(30.0)


async def test_a_stream_has_comments_while_it_waits_and_is_the_same_then(text: TextModel) -> None:
    async with open_bench(text, timeouts={"failover_s": 6 * PING_S}) as bench:
        plain = await bench.chat(stream=True, seed=1)
        info = lose(bench)
        asking = asyncio.create_task(bench.chat(stream=True, seed=1))
        await asyncio.sleep(5 * PING_S)
        start(bench, info)
        answer = await asking
        assert answer.text.count(": ping") >= 3
        texts = [[event["choices"] for event in events_of(each.text)] for each in (answer, plain)]
        assert texts[0] == texts[1]
        assert answer.headers["x-headrace-model"] == MODEL


async def test_a_held_stream_has_only_the_headers_that_are_known_when_it_begins(text: TextModel) -> None:
    async with open_bench(text, timeouts={"failover_s": 60}) as bench:
        assert bench.replica.info is not None
        model = replace(bench.replica.info.model, queue_policy="fcfs")
        bench.replica.info = replace(bench.replica.info, model=model)
        ignored = []
        for wait_s in (0.5 * PING_S, 3 * PING_S):
            await asyncio.sleep(1.0)
            info = lose(bench)
            asking = asyncio.create_task(bench.chat(stream=True, max_tokens=3, priority="batch", metadata={"a": "b"}))
            await asyncio.sleep(wait_s)
            start(bench, info)
            ignored.append((await asking).headers.get("x-headrace-ignored", ""))
        assert ignored == ["metadata, priority", "metadata"]


async def test_a_client_that_leaves_gives_its_place_back(text: TextModel) -> None:
    async with open_bench(text) as bench:
        info = lose(bench)
        leaving, staying = (asyncio.create_task(bench.chat(stream=True)) for _ in range(2))
        await asyncio.sleep(3 * PING_S)
        leaving.cancel()
        await asyncio.sleep(0.1)
        assert held(bench) == 1
        start(bench, info)
        assert (await staying).status_code == 200
        assert len(bench.replica.requests) == 1


async def test_beyond_the_bound_requests_are_refused_and_a_large_tenant_gives_way(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "MAX_HELD", 3)
    async with open_bench(text, api_keys=KEYS) as bench:
        info = lose(bench)
        asked = [post(bench, ANT) for _ in range(3)]
        await asyncio.sleep(1.0)
        refused = await post(bench, ANT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        other = post(bench, BEE)
        assert (await asked[2]).status_code == 503, "its newest leaves"
        start(bench, info)
        assert [answer.status_code for answer in await asyncio.gather(*asked[:2], other)] == [200] * 3


async def test_a_live_fallback_answers_at_once(text: TextModel) -> None:
    fox = {**AWAKE, "fallbacks": {"failed": ["cub"]}}
    cub = {"name": "cub", "folder": "/nowhere", "replicas": [{"name": "of-cub", "address": "unix:/nowhere"}]}
    async with open_bench(text, models=[fox, cub]) as bench:
        lose(bench)
        began = virtual_loop().time()
        assert (await bench.chat()).json()["model"] == "cub"
        assert virtual_loop().time() == began


async def test_a_fallbacks_answer_shows_that_the_model_is_wanted(text: TextModel) -> None:
    cub = {"name": "cub", "folder": "/nowhere", "replicas": [{"name": "of-cub", "address": "unix:/nowhere"}]}
    async with open_bench(text, models=[{**ASLEEP, "fallbacks": {"failed": ["cub"]}}, cub]) as bench:
        assert ((await bench.chat()).json()["model"], held(bench)) == ("cub", 1)
        await asyncio.sleep(31.0)
        assert held(bench) == 0


async def test_a_fallback_answers_for_a_model_without_an_hour_left(text: TextModel) -> None:
    cub = {"name": "cub", "folder": "/nowhere", "replicas": [{"name": "of-cub", "address": "unix:/nowhere"}]}
    closed = {**ASLEEP, "closed_until": virtual_loop().unix_time() + 3600.0, "fallbacks": {"failed": ["cub"]}}
    async with open_bench(text, models=[closed, cub]) as bench:
        assert (await bench.chat()).json()["model"] == "cub"


@asynccontextmanager
async def between_hold_and_submission(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, happens: Callable[[TestBench], Awaitable[None]], **changes: Any
) -> AsyncIterator[TestBench]:
    async with open_bench(text, **changes) as bench:
        await asyncio.sleep(1.0)
        prepare = TokenUpstream.prepare

        async def prepared(*args: Any) -> Prepared:
            made = await prepare(*args)
            await happens(bench)
            return made

        monkeypatch.setattr(TokenUpstream, "prepare", prepared)
        yield bench


async def falls_asleep(bench: TestBench) -> None:
    assert bench.replica.info is not None
    start(bench, bench.replica.info, is_asleep=True)


async def is_lost(bench: TestBench) -> None:
    lose(bench)


async def goes_to_zero(bench: TestBench) -> None:
    await apply(bench, ASLEEP)


async def comes_back(bench: TestBench, info: ReplicaInfo) -> None:
    await apply(bench, AWAKE)
    start(bench, info)


@pytest.mark.parametrize("happens", [falls_asleep, is_lost, goes_to_zero])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}], ids=["whole", "choices", "stream"])
async def test_a_request_waits_again_where_its_replica_leaves_before_it_is_sent(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, happens: Callable[[TestBench], Awaitable[None]], fields: dict[str, Any]
) -> None:
    async with between_hold_and_submission(text, monkeypatch, happens, models=[AWAKE], timeouts={"failover_s": 30}) as bench:
        info = bench.replica.info
        assert info is not None
        asking = asyncio.create_task(bench.chat(max_tokens=3, **fields))
        await asyncio.sleep(5.0)
        assert (held(bench), asking.done()) == (1, False), "the supervisor sees it"
        await comes_back(bench, info)
        answer = await asking
        assert (answer.status_code, held(bench), "error" in answer.text) == (200, 0, False)


@pytest.mark.parametrize(
    ("timeouts", "code"), [({"failover_s": 0}, 503), ({"failover_s": 30}, 503), ({"failover_s": 30, "request_s": 20}, 504)]
)
async def test_a_second_wait_ends_like_the_first(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, timeouts: dict[str, float], code: int
) -> None:
    async with between_hold_and_submission(text, monkeypatch, is_lost, timeouts=timeouts) as bench:
        began = virtual_loop().time()
        assert (await bench.chat()).status_code == code
        assert virtual_loop().time() - began == pytest.approx(min(timeouts.values()) if code == 503 else 20.0, abs=1.5)
        assert held(bench) == 0


async def test_a_second_wait_is_refused_once_the_model_cannot_be_served(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with between_hold_and_submission(text, monkeypatch, goes_to_zero, models=[AWAKE]) as bench:
        asking = asyncio.create_task(bench.chat())
        await asyncio.sleep(5.0)
        await apply(bench, {**ASLEEP, "unavailable": "Its engine refused its weights."})
        answer = await asking
        assert (answer.status_code, "refused its weights" in answer.text) == (503, True)


async def test_a_client_that_leaves_in_its_second_wait_gives_its_place_back(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async with between_hold_and_submission(text, monkeypatch, falls_asleep) as bench:
        leaving = asyncio.create_task(bench.chat(stream=True))
        await asyncio.sleep(3 * PING_S)
        assert held(bench) == 1
        leaving.cancel()
        assert bench.replica.info is not None
        start(bench, bench.replica.info)
        await asyncio.sleep(0.5)
        assert (held(bench), bench.replica.requests) == (0, [])


async def test_a_request_that_an_engine_refuses_because_it_fell_asleep_waits_for_it(text: TextModel) -> None:
    async with open_bench(text) as bench:
        await asyncio.sleep(1.0)
        info = bench.replica.info
        assert info is not None

        def refuse(_request: EngineRequest, stream: ReplicaStream) -> None:
            bench.replica.on_submit = None
            start(bench, info, is_asleep=True)
            stream.reject(Unavailable("this replica is asleep"))

        bench.replica.on_submit = refuse
        asking = asyncio.create_task(bench.chat(max_tokens=3))
        await asyncio.sleep(20.0)
        assert held(bench) == 1
        start(bench, info)
        assert (await asking).status_code == 200
        assert len(bench.replica.requests) == 2


async def test_a_request_that_no_open_replica_fits_does_not_wait(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def shrinks(bench: TestBench) -> None:
        info = bench.replica.info
        assert info is not None
        bench.replica.info = replace(info, model=replace(info.model, max_model_len=1))

    async with between_hold_and_submission(text, monkeypatch, shrinks) as bench:
        began = virtual_loop().time()
        assert ((await bench.chat()).status_code, virtual_loop().time() - began) == (503, 0.0)


async def test_an_engine_that_sleeps_is_wanted_where_something_else_answers(text: TextModel) -> None:
    cub = {"name": "cub", "folder": "/nowhere", "replicas": [{"name": "of-cub", "address": "unix:/nowhere"}]}
    async with open_bench(text, models=[{**AWAKE, "fallbacks": {"failed": ["cub"]}}, cub]) as bench:
        await asyncio.sleep(1.0)
        replica = bench.replicas["r0"]
        assert ((await bench.chat(max_tokens=3)).json()["model"], held(bench)) == (MODEL, 0)
        replica.snapshot = SeenLoad(snapshot(is_asleep=True), virtual_loop().time() + FAR_S)
        assert held(bench) == 0, "what an engine answered before it slept does not wake it"
        assert (await bench.chat(max_tokens=3)).json()["model"] == "cub"
        assert bench.reloader.status()[MODEL].num_held == 1
        replica.snapshot = SeenLoad(snapshot(), virtual_loop().time() + FAR_S)
        assert ((await bench.chat(max_tokens=3)).json()["model"], held(bench)) == (MODEL, 0)


def test_a_model_without_replicas_needs_a_reason() -> None:
    with pytest.raises(ConfigError, match="starts_on_demand"):
        gateway_config(models=[{**ASLEEP, "starts_on_demand": False}])
