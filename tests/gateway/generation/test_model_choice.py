"""Tests that a busy model's requests go to the smaller one, wait, or are refused, and that every answer says which."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from gateway_kit import MODEL, FakeReplica, TestBench, open_bench, snapshot

from headrace.core.errors import ConfigError, Overloaded
from headrace.core.ids import RequestId
from headrace.core.load import ClassLoad
from headrace.core.request import PriorityClass
from headrace.gateway.config import config_from
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState

pytestmark = pytest.mark.loop

SMALL = "cub"


def two_models(**more: Any) -> list[dict[str, Any]]:
    replica = {"address": "unix:/nowhere"}
    big = {"name": MODEL, "folder": "/nowhere", "replicas": [{"name": "big", **replica}], "fallbacks": {"busy": [SMALL]}}
    return [{**big, **more}, {"name": SMALL, "folder": "/nowhere", "replicas": [{"name": "small", **replica}]}]


KEYS = [
    {"key": "key-premium-0", "tenant": "first", "tier": "premium"},
    {"key": "key-standard", "tenant": "second"},
    {"key": "key-batch-000", "tenant": "third", "tier": "batch"},
]


def load_of(replica: FakeReplica, **changes: Any) -> None:
    assert replica.snapshot is not None
    replica.snapshot = replace(
        replica.snapshot, load=replace(snapshot(), max_num_seqs=4, kv_blocks_free=5000, kv_blocks_total=5001, **changes)
    )


async def post(bench: TestBench, key: str) -> httpx2.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    return await bench.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})


async def asked(bench: TestBench, key: str) -> tuple[int, str, str, str]:
    """Status, model of the body, and both headers."""
    response = await post(bench, key)
    body = response.json()
    return response.status_code, body.get("model", ""), response.headers["x-headrace-model"], response.headers["x-headrace-reason"]


async def test_a_busy_models_requests_go_to_the_smaller_one_unless_they_are_premium(text: TextModel) -> None:
    async with open_bench(text, models=two_models(), api_keys=KEYS) as bench:
        big, small = bench.replicas["big"], bench.replicas["small"]
        assert await asked(bench, "key-standard") == (200, MODEL, MODEL, "served")
        load_of(big, num_running=4, num_waiting=11)
        assert await asked(bench, "key-premium-0") == (200, MODEL, MODEL, "queued")
        assert await asked(bench, "key-standard") == (200, SMALL, SMALL, "fallback")
        assert await asked(bench, "key-batch-000") == (200, SMALL, SMALL, "fallback")
        load_of(small, num_running=4, num_waiting=11)
        assert await asked(bench, "key-standard") == (200, MODEL, MODEL, "queued")
        assert (len(big.requests), len(small.requests)) == (3, 2)


async def test_a_queue_longer_than_the_wait_is_refused_before_a_prompt_is_read(text: TextModel) -> None:
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS, admission={"max_wait_s": 5.0}) as bench:
        load_of(bench.replicas["big"], num_queued_tokens=20_000, step_fixed_s=0.01, step_token_s=0.001)
        jobs = bench.gateway.service.text_pool.reading()
        response = await post(bench, "key-standard")
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"] == "19", "a second's wait is left then"
        assert (response.headers["x-headrace-model"], response.headers["x-headrace-reason"]) == (MODEL, "refused")
        assert bench.gateway.service.text_pool.reading() == jobs, "nothing was tokenized"
        assert not bench.replicas["big"].requests


async def test_each_class_waits_for_itself_and_the_classes_above_it(text: TextModel) -> None:
    """A flood of batch requests refuses itself, with the time that it takes, and neither standard nor premium ones."""
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS, admission={"max_wait_s": 5.0}) as bench:
        big = bench.replicas["big"]
        assert big.info is not None
        big.info = replace(big.info, model=replace(big.info.model, queue_policy="priority"))
        flood = ClassLoad(num_waiting=500, num_queued_tokens=20_000)
        speed = {"step_fixed_s": 0.01, "step_token_s": 0.001}
        load_of(big, num_waiting=500, num_queued_tokens=20_000, classes=(ClassLoad(), ClassLoad(), flood), **speed)
        assert (await asked(bench, "key-premium-0"))[::3] == (200, "served")
        assert (await asked(bench, "key-standard"))[::3] == (200, "served")
        refused = await post(bench, "key-batch-000")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 15
        load_of(big, classes=(ClassLoad(),) * 3, **speed)
        big.sent = {PriorityClass.STANDARD: [20_000]}
        assert (await asked(bench, "key-premium-0"))[::3] == (200, "served")
        assert (await asked(bench, "key-standard"))[0] == 429, "what this gateway sent since the report counts by class, too"


async def test_a_tenant_with_few_requests_is_not_refused_for_the_flood_of_another(text: TextModel) -> None:
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS, admission={"max_wait_s": 5.0}) as bench:
        big = bench.replicas["big"]
        assert big.info is not None
        big.info = replace(big.info, model=replace(big.info.model, queue_policy="fair"))
        load_of(big, num_waiting=500, num_queued_tokens=20_000, step_fixed_s=0.01, step_token_s=0.001)
        for _ in range(100):
            bench.gateway.service.models.get(MODEL).users.enter("second")
        assert (await asked(bench, "key-batch-000"))[0] == 200
        assert (await asked(bench, "key-standard"))[0] == 429


async def test_open_requests_of_another_model_excuse_no_flood(text: TextModel) -> None:
    """Half of its queue would be within the bound."""
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS, admission={"max_wait_s": 5.0}) as bench:
        big, service = bench.replicas["big"], bench.gateway.service
        assert big.info is not None
        big.info = replace(big.info, model=replace(big.info.model, queue_policy="fair"))
        load_of(big, num_waiting=8, num_queued_tokens=5_000, step_fixed_s=0.01, step_token_s=0.001)
        with ExitStack() as others:
            for model, tenant, number in ((MODEL, "second", 100), (SMALL, "third", 300)):
                for each in range(number):
                    others.enter_context(service.open_requests.admit(RequestId(f"{model}-{each}"), tenant, lambda _: None))
                    service.models.get(model).users.enter(tenant)
            assert (await asked(bench, "key-standard"))[0] == 429


async def test_one_tenant_has_its_part_of_the_open_requests(text: TextModel) -> None:
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS, limits={"max_requests": 8}) as bench:
        open_requests = bench.gateway.service.open_requests
        with ExitStack() as flood:
            for number in range(2):
                flood.enter_context(open_requests.admit(RequestId(f"flood-{number}"), "second", lambda _: None))
            refused = await post(bench, "key-standard")
            assert refused.status_code == 429
            assert "2 requests of this tenant" in refused.text
            assert (await asked(bench, "key-batch-000"))[0] == 200
        assert (await asked(bench, "key-standard"))[0] == 200


async def test_an_engine_whose_order_knows_no_classes_has_one_queue_for_all(text: TextModel) -> None:
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS, admission={"max_wait_s": 5.0}) as bench:
        big = bench.replicas["big"]
        assert big.info is not None
        big.info = replace(big.info, model=replace(big.info.model, queue_policy="fcfs"))
        flood = ClassLoad(num_waiting=500, num_queued_tokens=20_000)
        load_of(
            big,
            num_waiting=500,
            num_queued_tokens=20_000,
            classes=(ClassLoad(), ClassLoad(), flood),
            step_fixed_s=0.01,
            step_token_s=0.001,
        )
        assert {(await asked(bench, key["key"]))[0] for key in KEYS} == {429}


async def test_requests_that_no_replica_was_sent_yet_are_part_of_the_queue(text: TextModel) -> None:
    """Else all that arrive while the event loop is busy would be admitted by the same short queue."""
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS, admission={"max_wait_s": 5.0}) as bench:
        load_of(bench.replicas["big"], step_fixed_s=0.01, step_token_s=0.001)
        unsent = bench.gateway.service.models.get(MODEL).unsent
        others = [unsent.add(PriorityClass.STANDARD) for _ in range(300)]
        assert (await asked(bench, "key-standard"))[0] == 429
        for other in others:
            other.uncount()
            other.uncount()
        assert unsent.num_requests(PriorityClass.BATCH) == 0, "a second uncount changes nothing"
        seen: list[int] = []
        bench.replicas["big"].on_submit = lambda request, stream: seen.append(unsent.num_requests(PriorityClass.BATCH))
        assert (await asked(bench, "key-standard"))[0] == 200
        assert seen == [1], "it was counted until it was sent"
        assert unsent.num_requests(PriorityClass.BATCH) == 0


async def test_the_queue_of_a_replica_that_is_not_ready_has_its_bound_too(text: TextModel) -> None:
    """A replica that is silent for a moment is waited for. All that arrives in that moment would be let in."""
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS) as bench:
        big = bench.replicas["big"]
        load_of(big, num_queued_tokens=20_000, step_fixed_s=0.01, step_token_s=0.001)
        big.state = ConnectionState.SILENT
        assert (await asked(bench, "key-standard"))[0] == 429
        load_of(big, step_fixed_s=0.01, step_token_s=0.001)
        unsent = bench.gateway.service.models.get(MODEL).unsent
        others = [unsent.add(PriorityClass.STANDARD) for _ in range(300)]
        assert (await asked(bench, "key-standard"))[0] == 429, "those that wait for the replica count"
        for other in others:
            other.uncount()
        big.state = ConnectionState.CONNECTED
        assert (await asked(bench, "key-standard"))[0] == 200


async def test_a_request_that_is_refused_later_joins_no_longer(text: TextModel) -> None:
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS) as bench:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 2000}]}
        response = await bench.client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer key-standard"})
        assert response.status_code == 400
        assert bench.gateway.service.models.get(MODEL).unsent.num_requests(PriorityClass.BATCH) == 0


async def test_a_tiers_goal_bounds_its_wait(text: TextModel) -> None:
    keys = [{"key": "key-hurried-0", "tenant": "hurried", "tier": "hurried"}, {"key": "key-patient-0", "tenant": "patient"}]
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=keys, tiers={"hurried": {"ttft_ms": 500.0}}) as bench:
        load_of(bench.replicas["big"], num_queued_tokens=2_000, step_fixed_s=0.01, step_token_s=0.001)
        assert (await asked(bench, "key-hurried-0"))[0] == 429
        assert (await asked(bench, "key-patient-0"))[0] == 200


async def test_a_smaller_model_that_the_key_may_not_use_is_not_used(text: TextModel) -> None:
    keys = [{"key": "key-standard", "tenant": "second", "tier": "one"}]
    async with open_bench(text, models=two_models(), api_keys=keys, tiers={"one": {"models": [MODEL]}}) as bench:
        load_of(bench.replicas["big"], num_running=4, num_waiting=11)
        assert await asked(bench, "key-standard") == (200, MODEL, MODEL, "queued")


@pytest.mark.parametrize(("num_waiting", "step"), [(0, "served"), (11, "queued")])
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_request_that_its_engine_refuses_says_so_whatever_was_decided_before(
    text: TextModel, num_waiting: int, step: str, is_streaming: bool
) -> None:
    async with open_bench(text, models=two_models(fallbacks={}), api_keys=KEYS) as bench:
        big = bench.replicas["big"]
        load_of(big, num_running=4, num_waiting=num_waiting)
        assert (await asked(bench, "key-standard"))[3] == step
        big.on_submit = lambda request, stream: stream.reject(Overloaded("The queue is full.", retry_after_s=1))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": is_streaming}
        response = await bench.client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer key-standard"})
        assert response.status_code == 429
        assert response.headers.get_list("x-headrace-reason") == ["refused"]
        assert response.headers["x-headrace-model"] == MODEL


@pytest.mark.parametrize(
    ("fallbacks", "match"),
    [
        ({"busy": [MODEL]}, r"models\[0\].fallbacks.busy: 'fox' is not the name of another model"),
        ({"failed": ["nowhere"]}, "'nowhere' is not the name of another model"),
        ({"failed": [SMALL, SMALL]}, "names 'cub' twice"),
        ({"slow": [SMALL]}, "models.0..fallbacks.slow: is not a known key"),
    ],
)
@pytest.mark.pure
def test_fallbacks_are_other_models_that_are_served(fallbacks: dict[str, list[str]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        config_from({"models": two_models(fallbacks=fallbacks)})
