"""Tests that a request is held to its caller's limits before it runs, and charged once, by what the engine counted."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_kit import SAID, TestBench, chat_body, eventually, gateway_config, open_bench, used
from redis_kit import RedisServer
from scripted_store import script_limits

from headrace.core.errors import ConfigError
from headrace.core.money import NANOS
from headrace.gateway.access.principal import KeyLimits, Principal
from headrace.gateway.control.models import Sources
from headrace.gateway.limits.limiter import BEAT_S
from headrace.gateway.limits.rules import ceiling_of, limits_of, rules_of
from headrace.gateway.stores.guard import MAX_UNANSWERED, REQUEST_WAIT_S, RETRY_S
from headrace.policy.limits.counters import DAY_MS
from headrace.policy.limits.price import FREE, Price
from headrace.policy.limits.tier import DeploymentBudget, Tier
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

LATER_OR_SMALLER = "Try again later, or with a smaller max_tokens."
KEY, OTHER = "hr-limits-key-one", "hr-limits-key-two"
TWO_MODELS = [{"name": name, "folder": "/nowhere", "replicas": [{"name": "r0", "address": "unix:/nowhere"}]} for name in ("fox", "owl")]
NOON_S = 20_000 * DAY_MS / 1000 + 43_200


class Clocks:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.steady_s = 120.0
        self.unix_s = NOON_S

    def sources(self) -> Sources:
        return Sources(clock=lambda: self.steady_s, unix_time=lambda: self.unix_s)

    def wait(self, seconds: float) -> None:
        self.steady_s += seconds
        self.unix_s += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


Opened = Callable[..., AbstractAsyncContextManager[TestBench]]


@pytest.fixture
def opened(text: TextModel, clocks: Clocks) -> Opened:
    """Opens a gateway whose keys have the tier `small` with the given numbers."""

    def open_with(numbers: dict[str, Any], **changes: Any) -> AbstractAsyncContextManager[TestBench]:
        keys = [{"key": KEY, "tenant": "acme", "tier": "small", "user": "ann"}, {"key": OTHER, "tenant": "other", "tier": "small"}]
        return open_bench(text, sources=clocks.sources(), **{"tiers": {"small": numbers}, "api_keys": keys, **changes})

    return open_with


async def ask(bench: TestBench, key: str = KEY, **fields: Any) -> httpx2.Response:
    return await bench.client.post("/v1/chat/completions", json=chat_body(**fields), headers={"authorization": f"Bearer {key}"})


def error_of(response: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_requests_beyond_the_minute_are_refused_until_there_is_room(opened: Opened, clocks: Clocks) -> None:
    async with opened({"requests_per_minute": 2}) as bench:
        first = await ask(bench)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "2m0s"
        assert (await ask(bench)).status_code == 200
        refused = await ask(bench)
        assert (refused.status_code, error_of(refused)["type"], error_of(refused)["code"]) == (
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
        )
        assert "requests_per_minute is 2" in error_of(refused)["message"]
        assert refused.headers["retry-after"] == "90"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(bench, OTHER)).status_code == 200, "another tenant has its own"
        clocks.wait(89.9)
        assert (await ask(bench)).status_code == 429
        clocks.wait(0.2)
        assert (await ask(bench)).status_code == 200


async def test_refusals_are_counted_and_logged_by_limit(opened: Opened, tmp_path: Path) -> None:
    log = tmp_path / "log"
    numbers = {"requests_per_minute": 2, "user_requests_per_minute": 1, "daily_tokens": 300}
    async with opened(numbers, request_log=str(log), open_metrics="all") as bench:
        assert (await ask(bench, max_tokens=400)).status_code == 429
        assert (await ask(bench)).status_code == 429
        assert (await ask(bench)).status_code == 429
        page = (await bench.client.get("/metrics")).text
    for limit, count in {"daily_tokens": 1, "user_requests_per_minute": 2}.items():
        assert f'headrace_tenant_limited_total{{limit="{limit}",tenant="acme"}} {count}.0' in page
        assert f'headrace_tier_limited_total{{limit="{limit}",tier="small"}} {count}.0' in page
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("limit") for line in lines] == ["daily_tokens", "user_requests_per_minute", "user_requests_per_minute"]


@pytest.mark.pure
def test_the_limits_of_a_key_have_labels_of_their_own() -> None:
    caller = Principal(
        tenant="acme", key_id="key-1", tier=Tier(requests_per_minute=1), limits=KeyLimits(requests_per_minute=1, monthly_budget=2.0)
    )
    assert [rule.label for rule in rules_of(caller)] == ["requests_per_minute", "key_requests_per_minute", "key_monthly_budget"]


@pytest.mark.pure
def test_what_depends_on_the_caller_alone_is_made_once_and_again_when_any_of_it_changes() -> None:
    caller = Principal(tenant="acme", key_id="key-1", tier=Tier(requests_per_minute=1, daily_tokens=50), options={"no": ["hash"]})
    limits = limits_of(caller)
    assert limits_of(replace(caller, tier=Tier(requests_per_minute=1, daily_tokens=50), options={})) is limits
    changed: list[dict[str, Any]] = [
        {"tier": Tier(requests_per_minute=1, daily_tokens=60)},
        {"tier_name": "other"},
        {"limits": KeyLimits(monthly_budget=1.0)},
        {"tenant": "other"},
        {"tenant_id": "t-1"},
        {"user": "ann"},
        {"key_id": "key-2"},
    ]
    assert len({id(limits), *(id(limits_of(replace(caller, **change))) for change in changed)}) == 1 + len(changed)
    assert limits_of(caller, DeploymentBudget(daily_budget=1.0)) is not limits
    dear = ceiling_of(limits, Price(output=5.0))
    assert (dear.total_tokens, dear.price, ceiling_of(limits, Price(output=5.0))) == (50, Price(output=5.0), dear)
    assert ceiling_of(limits, FREE).price == FREE


async def test_an_answer_to_a_body_that_cannot_be_read_has_the_headers_of_what_was_taken_before(opened: Opened) -> None:
    async with opened({"requests_per_minute": 5, "output_tokens_per_minute": 70}) as bench:
        broken = await ask(bench, max_tokens="many")
        assert (broken.status_code, broken.headers["x-ratelimit-remaining-requests"]) == (400, "4")
        assert broken.headers["x-ratelimit-remaining-tokens"] == "70"
        whole = await ask(bench, max_tokens=9)
        shown = [name for name, _ in whole.headers.multi_items() if name.startswith("x-ratelimit")]
        assert len(shown) == len(set(shown)) == 6, "each once, though two calls of the store were made"
        assert (whole.headers["x-ratelimit-remaining-requests"], whole.headers["x-ratelimit-remaining-tokens"]) == ("3", "61")


async def test_a_refused_request_is_not_read(opened: Opened) -> None:
    async with opened({"requests_per_minute": 1}) as bench:
        assert (await ask(bench)).status_code == 200
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        refused = await bench.client.post("/v1/chat/completions", content=b"no json", headers=headers)
        assert refused.status_code == 429


async def test_open_requests_are_counted_and_freed(opened: Opened) -> None:
    async with opened({"max_concurrent_requests": 2}) as bench:
        bench.replica.go.clear()
        running = [asyncio.create_task(ask(bench)) for _ in range(2)]
        await eventually(lambda: len(bench.replica.requests) == 2)
        refused = await ask(bench)
        assert refused.status_code == 429
        assert "max_concurrent_requests is 2" in error_of(refused)["message"]
        assert refused.headers["retry-after"] == "1"
        bench.replica.go.set()
        assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
        for _ in range(5):
            assert (await ask(bench)).status_code == 200, "a request that has ended is not open for the next one"
        assert await used(bench, "max_concurrent_requests", KEY) == 0


async def test_the_engines_counts_are_charged(opened: Opened) -> None:
    numbers = {"input_tokens_per_minute": 10_000, "output_tokens_per_minute": 10_000, "daily_tokens": 10_000, "monthly_budget": 5.0}
    async with opened(numbers, prices={"fox": {"input": 100, "output": 1000}}) as bench:
        usage = (await ask(bench, max_tokens=8)).json()["usage"]
        assert usage["completion_tokens"] == 8
        prompt = usage["prompt_tokens"]
        assert await used(bench, "input_tokens_per_minute", KEY) == prompt
        assert await used(bench, "output_tokens_per_minute", KEY) == 8
        assert await used(bench, "daily_tokens", KEY) == prompt + 8
        assert await used(bench, "monthly_budget", KEY) == (100 * prompt + 1000 * 8) * NANOS // 1_000_000


async def test_the_most_that_a_request_may_use_is_reserved(opened: Opened) -> None:
    async with opened({"output_tokens_per_minute": 100}) as bench:
        bench.replica.go.clear()
        running = asyncio.create_task(ask(bench, n=2, max_tokens=40))
        await eventually(lambda: bool(bench.replica.requests))
        refused = await ask(bench, max_tokens=21)
        assert refused.status_code == 429
        assert "100 in a sliding minute; 80 is used or reserved, and this request needs 21." in error_of(refused)["message"]
        assert refused.headers["x-ratelimit-remaining-tokens"] == "20"
        bench.replica.go.set()
        assert (await running).status_code == 200
        assert (await ask(bench, max_tokens=20)).status_code == 200


async def test_more_than_a_limit_is_refused_as_what_never_fits(opened: Opened) -> None:
    async with opened({"output_tokens_per_minute": 100}) as bench:
        refused = await ask(bench, max_tokens=101)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert "more than the limit allows at all" in error_of(refused)["message"]


@pytest.mark.parametrize("numbers", [{"daily_tokens": 60}, {"monthly_budget": 0.01}, {"daily_budget": 0.01}])
async def test_a_spent_budget_refuses_until_its_window_ends(opened: Opened, clocks: Clocks, numbers: dict[str, Any]) -> None:
    async with opened(numbers, prices={"fox": {"output": 1000}}) as bench:
        while (response := await ask(bench, max_tokens=9)).status_code == 200:
            pass
        assert (error_of(response)["type"], error_of(response)["code"]) == ("rate_limit_error", "insufficient_quota")
        assert next(iter(numbers)) in error_of(response)["message"]
        left_s = int(response.headers["retry-after"])
        clocks.wait(left_s - 1)
        assert (await ask(bench, max_tokens=9)).status_code == 429
        clocks.wait(1)
        assert (await ask(bench, max_tokens=9)).status_code == 200


@pytest.mark.parametrize("name", ["daily_budget", "monthly_budget"])
async def test_the_deployments_budget_is_spent_by_all_tenants_together(opened: Opened, clocks: Clocks, name: str) -> None:
    async with opened({}, prices={"fox": {"output": 1000}}, limits={name: 0.03}, open_metrics="all") as bench:
        statuses = [(await ask(bench, key, max_tokens=9)).status_code for key in (KEY, OTHER, KEY, OTHER)]
        assert statuses == [200, 200, 200, 429]
        refused = await ask(bench, max_tokens=9)
        error = error_of(refused)
        assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert error["message"] == f"The {name} of this deployment has no room for this request now. {LATER_OR_SMALLER}"
        assert error_of(await ask(bench, max_tokens=400))["message"] == error["message"], "it says nothing of the budget's number"
        assert refused.headers["retry-after"] == "60", "other requests may give back what they reserved"
        page = (await bench.client.get("/metrics")).text
        assert f'headrace_tier_limited_total{{limit="deployment_{name}",tier="small"}} 3.0' in page
        clocks.wait((DAY_MS if name == "daily_budget" else 31 * DAY_MS) / 1000)
        assert (await ask(bench, max_tokens=9)).status_code == 200
        change: dict[str, Any] = {name: 0.01}
        config = bench.reloader.config
        await bench.reloader.reload(lambda: replace(config, limits=replace(config.limits, **change)))
        assert (await ask(bench, OTHER, max_tokens=9)).status_code == 429, "a reload changes it, and finds what is used"


async def test_the_deployments_budget_holds_without_keys_too(text: TextModel) -> None:
    async with open_bench(text, prices={"fox": {"output": 1000}}, limits={"daily_budget": 0.01}) as bench:
        assert [(await bench.chat(max_tokens=9)).status_code for _ in range(2)] == [200, 429]


async def test_what_another_tenant_reserved_and_did_not_use_is_free_again(opened: Opened) -> None:
    async with opened({}, prices={"fox": {"output": 1000}}, limits={"daily_budget": 0.1}) as bench:
        bench.replica.go.clear()
        running = asyncio.create_task(ask(bench, OTHER, max_tokens=95))
        await eventually(lambda: len(bench.replica.requests) == 1)
        refused = await ask(bench, max_tokens=9)
        assert (refused.status_code, error_of(refused)["code"], refused.headers["retry-after"]) == (429, "rate_limit_exceeded", "60")
        running.cancel()
        bench.replica.go.set()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(lambda: bench.gateway.limiter.num_uncharged == 0)
        assert (await ask(bench, max_tokens=9)).status_code == 200


@pytest.mark.pure
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"limits": {"daily_budget": 5.0}}, r"limits\.daily_budget: has no effect without prices"),
        ({"tiers": {"small": {"monthly_budget": 5.0}}}, r"tiers\.small\.monthly_budget: has no effect without prices"),
        ({"prices": {"owl": {}}}, r"prices\.owl: is no model's name\. The models are fox"),
        ({"prices": {"gpt-4o": {}}}, r"prices\.gpt-4o: is no model's name\. Write fox: gpt-4o is its alias"),
        ({"prices": {"fox": {}}, "limits": {"daily_budget": math.inf}}, r"limits\.daily_budget: inf is outside 1e-09\.\.1000000000"),
        ({"prices": {"fox": {}}, "tiers": {"small": {"daily_budget": 1e-12}}}, r"tiers\.small\.daily_budget: 1e-12 is outside"),
        (
            {"limits": {"daily_budget": 5.0}, "models": TWO_MODELS, "prices": {"fox": {}}},
            r"does not count the model owl, which has no price",
        ),
    ],
)
def test_budgets_and_prices_that_would_count_nothing_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        gateway_config(**changes)


async def test_an_answer_without_max_tokens_ends_where_a_limit_does(opened: Opened) -> None:
    for numbers, most in [({"output_tokens_per_minute": 7}, 7), ({"daily_budget": 0.005}, 5), ({"output_tokens_per_minute": 9}, 9)]:
        async with opened(numbers, prices={"fox": {"output": 1000}}) as bench:
            response = await ask(bench)
            assert response.json()["usage"]["completion_tokens"] == most
            assert response.json()["choices"][0]["finish_reason"] == "length"
            assert bench.replica.requests[0].params.max_tokens == most


async def test_the_tiers_context_bounds_prompt_and_output(opened: Opened) -> None:
    async with opened({"max_context_tokens": 40}) as bench:
        usage = (await ask(bench)).json()["usage"]
        assert usage["total_tokens"] == 40, "without max_tokens the answer has what the tier leaves"
        refused = await ask(bench, max_tokens=40)
        assert (refused.status_code, error_of(refused)["code"]) == (400, "context_length_exceeded")
        assert "tier small's maximum context length (max_context_tokens) is 40 tokens" in error_of(refused)["message"]
        long = await bench.client.post(
            "/v1/completions", json={"model": "fox", "prompt": "a b " * 400}, headers={"authorization": f"Bearer {KEY}"}
        )
        assert (long.status_code, error_of(long)["code"]) == (400, "context_length_exceeded")
        assert "tier small" in error_of(long)["message"]


@pytest.mark.parametrize(("tier", "most"), [("free", 32 * 1024), ("enterprise", 128 * 1024)])
async def test_a_built_in_tier_has_its_context(text: TextModel, tier: str, most: int) -> None:
    async with open_bench(text, api_keys=[{"key": KEY, "tenant": "acme", "tier": tier}]) as bench:
        assert bench.replica.info is not None
        bench.replica.info = replace(bench.replica.info, model=replace(bench.replica.info.model, max_model_len=2 * most))
        fitting, longer = [
            await bench.client.post(
                "/v1/completions",
                json={"model": "fox", "prompt": [5] * length, "max_tokens": 1},
                headers={"authorization": f"Bearer {KEY}"},
            )
            for length in (most - 1, most)
        ]
        assert fitting.json()["usage"]["total_tokens"] == most
        assert (longer.status_code, error_of(longer)["code"]) == (400, "context_length_exceeded")
        assert f"The tier {tier}'s maximum context length (max_context_tokens) is {most} tokens" in error_of(longer)["message"]


async def test_an_aborted_stream_is_charged_for_what_the_engine_made(opened: Opened) -> None:
    async with opened({"output_tokens_per_minute": 1000, "max_concurrent_requests": 4}) as bench:
        bench.replica.said, bench.replica.token_delay_s = SAID * 20, 0.005
        body = chat_body(stream=True, max_tokens=400)
        async with asyncio.timeout(20):
            task = asyncio.create_task(bench.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}))
            await eventually(lambda: bool(bench.replica.requests))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await used(bench, "max_concurrent_requests", KEY) == 0
        assert 0 < await used(bench, "output_tokens_per_minute", KEY) < 400


LONG = [{"role": "user", "content": f"Turn {number}: The quick brown fox jumps over the lazy dog."} for number in range(60)]


async def test_a_summary_is_charged_with_its_request_as_the_usage_log_has_it(opened: Opened, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened({"daily_tokens": 100_000, "input_tokens_per_minute": 100_000}, request_log=str(log)) as bench:
        answer = await ask(bench, messages=LONG, context_fitting="summary", max_tokens=20)
        assert answer.status_code == 200, answer.text
        assert len(bench.replica.requests) > 1
        charged, charged_input = await used(bench, "daily_tokens", KEY), await used(bench, "input_tokens_per_minute", KEY)
    record = json.loads(log.read_text().splitlines()[0])
    assert record["prompt_tokens"] > answer.json()["usage"]["prompt_tokens"]
    assert charged_input == record["prompt_tokens"]
    assert charged == record["prompt_tokens"] + record["completion_tokens"]


async def test_a_summary_that_exceeds_a_limit_is_refused_before_it_runs(opened: Opened) -> None:
    async with opened({"daily_tokens": 100}) as bench:
        refused = await ask(bench, messages=LONG, context_fitting="summary", max_tokens=20)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "insufficient_quota")
        assert not bench.replica.requests
        assert await used(bench, "daily_tokens", KEY) == 0


async def test_what_was_summarised_is_charged_where_the_answer_is_refused(opened: Opened, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened({"output_tokens_per_minute": 450}, request_log=str(log)) as bench:
        refused = await ask(bench, messages=LONG, context_fitting="summary", n=20, max_tokens=20)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded"), refused.text
        assert bench.replica.requests
        charged = await used(bench, "output_tokens_per_minute", KEY)
    record = json.loads(log.read_text().splitlines()[0])
    assert 0 < charged == record["completion_tokens"]
    assert record["prompt_tokens"] == sum(len(request.prompt_ids) for request in bench.replica.requests)


async def test_a_request_that_no_engine_takes_costs_no_tokens(opened: Opened) -> None:
    async with opened({"daily_tokens": 1000, "requests_per_minute": 9}) as bench:

        def broken(_request: object, _stream: object) -> None:
            raise ValueError("a fault of the connection")

        bench.replica.on_submit = broken
        assert (await ask(bench, max_tokens=9)).status_code == 500
        assert (await used(bench, "daily_tokens", KEY), await used(bench, "requests_per_minute", KEY)) == (0, 1)


async def test_callers_without_limits_ask_no_store(text: TextModel) -> None:
    async with open_bench(text) as bench:
        taken: list[object] = []
        bench.gateway.limiter._store.take = partial(_record, taken)  # type: ignore[method-assign,assignment]
        response = await bench.chat()
        assert response.status_code == 200
        assert not taken
        assert not [name for name in response.headers if name.startswith("x-ratelimit")]


async def _record(taken: list[object], *given: object) -> None:
    taken.append(given)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 365 * 86_400.0, -365 * 86_400.0])
async def test_a_clock_that_jumps_opens_no_window_when_it_is_back(opened: Opened, clocks: Clocks, jump_s: float) -> None:
    async with opened({"requests_per_minute": 3, "daily_tokens": 60}) as bench:
        assert (await ask(bench, max_tokens=9)).status_code == 200
        before = await used(bench, "daily_tokens", KEY)
        clocks.unix_s += jump_s
        in_jump = await ask(bench, max_tokens=9)
        assert in_jump.status_code == 200
        assert in_jump.headers["x-ratelimit-remaining-requests"] == "1", "minutes follow the other clock"
        clocks.unix_s -= jump_s
        assert await used(bench, "daily_tokens", KEY) == before * (1 if abs(jump_s) > 43_200 else 2)
        assert (await ask(bench, max_tokens=9)).status_code in (200, 429)
        assert (await ask(bench, max_tokens=1)).status_code == 429
        bench.gateway.limiter.check()


@pytest.fixture
async def two(text: TextModel, redis_url: str) -> AsyncIterator[tuple[TestBench, TestBench]]:
    """Two gateways over one Redis."""
    keys = [{"key": KEY, "tenant": "acme", "tier": "small"}]
    changes: dict[str, Any] = {"api_keys": keys, "tiers": {"small": {"requests_per_minute": 6, "max_concurrent_requests": 3}}}
    changes["store"] = {"url": redis_url}
    async with open_bench(text, **changes) as one, open_bench(text, **changes) as other:
        yield one, other


@pytest.mark.socket
async def test_two_gateways_share_one_limit(two: tuple[TestBench, TestBench]) -> None:
    one, other = two
    responses = [await ask(bench) for bench in (one, other) * 4]
    assert [response.status_code for response in responses].count(200) == 6
    assert responses[-1].status_code == 429


@pytest.mark.socket
async def test_a_store_that_forgets_begins_again(two: tuple[TestBench, TestBench], redis_server: RedisServer) -> None:
    bench, _ = two
    bench.replica.go.clear()
    running = asyncio.create_task(ask(bench))
    await eventually(lambda: bool(bench.replica.requests), within_s=60)
    redis_server.empty()
    bench.replica.go.set()
    assert (await running).status_code == 200
    for _ in range(6):
        assert (await ask(bench)).status_code == 200
    assert (await ask(bench)).status_code == 429


async def refused_after(bench: TestBench, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    response = await ask(bench)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert loop.time() - began == pytest.approx(seconds)


async def test_a_store_that_hangs_refuses_in_time_and_is_asked_again_when_it_goes_on(text: TextModel) -> None:
    keys = [{"key": KEY, "tenant": "acme", "tier": "small"}]
    async with open_bench(text, api_keys=keys, tiers={"small": {"requests_per_minute": 100}}) as bench:
        store = script_limits(bench)
        store.takes_s = REQUEST_WAIT_S / 2
        assert (await ask(bench)).status_code == 200, "a slow one is waited for"
        store.hang()
        for _ in range(MAX_UNANSWERED):
            await refused_after(bench, REQUEST_WAIT_S)
        await refused_after(bench, 0.0)
        store.go_on()
        await asyncio.sleep(RETRY_S)
        assert (await ask(bench)).status_code == 200


async def test_a_store_that_fails_refuses_at_once_and_heals_with_the_next_request(text: TextModel) -> None:
    keys = [{"key": KEY, "tenant": "acme", "tier": "small"}]
    async with open_bench(text, api_keys=keys, tiers={"small": {"requests_per_minute": 100}}) as bench:
        store = script_limits(bench)
        assert (await ask(bench)).status_code == 200
        store.failure = "READONLY"
        for _ in range(2 * MAX_UNANSWERED):
            await refused_after(bench, 0.0)
        store.go_on()
        assert (await ask(bench)).status_code == 200


async def test_a_beat_that_the_store_answers_ends_the_second_for_which_it_is_left_alone(text: TextModel) -> None:
    keys = [{"key": KEY, "tenant": "acme", "tier": "small"}]
    async with open_bench(text, api_keys=keys, tiers={"small": {"requests_per_minute": 100}}) as bench:
        store = script_limits(bench)
        store.hang()
        await asyncio.sleep(0.2 * BEAT_S)
        for _ in range(MAX_UNANSWERED):
            await refused_after(bench, REQUEST_WAIT_S)
        store.go_on()
        await asyncio.sleep(BEAT_S - 0.2 * BEAT_S - MAX_UNANSWERED * REQUEST_WAIT_S + 0.01)
        assert (await ask(bench)).status_code == 200


async def test_a_gateway_goes_on_without_its_store_where_configured(text: TextModel) -> None:
    keys = [{"key": KEY, "tenant": "acme", "tier": "small"}]
    tiers = {"small": {"requests_per_minute": 1, "daily_tokens": 10_000}}
    limits = {"on_store_failure": "open"}
    async with open_bench(text, api_keys=keys, tiers=tiers, limits=limits) as bench:
        store = script_limits(bench)
        store.failure = "down"
        assert [(await ask(bench)).status_code for _ in range(3)] == [200, 200, 200]
        store.go_on()
        assert [(await ask(bench)).status_code for _ in range(2)] == [200, 429], "what it could not count is not counted"


async def test_a_locked_file_refuses_and_heals(opened: Opened, tmp_path: Path) -> None:
    async with opened({"requests_per_minute": 100}, state=str(tmp_path)) as bench:
        assert (await ask(bench)).status_code == 200
        other = sqlite3.connect(tmp_path / "limits.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        refused = await ask(bench)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        other.execute("COMMIT")
        other.close()
        assert (await ask(bench)).status_code == 200


async def test_the_next_process_charges_what_a_dead_one_left(opened: Opened, clocks: Clocks, tmp_path: Path) -> None:
    numbers = {"max_concurrent_requests": 1, "output_tokens_per_minute": 1000}
    async with opened(numbers, state=str(tmp_path)) as bench:
        limiter = bench.gateway.limiter
        bench.replica.go.clear()
        running = asyncio.create_task(ask(bench, max_tokens=400))
        await eventually(lambda: bool(bench.replica.requests))
        async with opened(numbers, state=str(tmp_path)) as survivor:
            for task in asyncio.all_tasks():
                if task.get_name() in ("limits _beats", "limits _charges") and task.get_coro().cr_frame.f_locals["self"] is limiter:  # type: ignore[union-attr]
                    task.cancel()
            assert (await ask(survivor, max_tokens=5)).status_code == 429
            watcher = survivor.gateway.limiter
            await watcher._renew()
            clocks.wait(4.9)
            await watcher._renew()
            assert (await ask(survivor, max_tokens=5)).status_code == 429
            clocks.wait(0.2)
            await watcher._renew()
            assert await used(survivor, "max_concurrent_requests", KEY) == 0
            assert await used(survivor, "output_tokens_per_minute", KEY) == 256, "nothing was saved but the first tail"
            assert (await ask(survivor, max_tokens=5)).status_code == 200
        bench.replica.go.set()
        assert (await running).status_code == 200


async def test_a_changed_tier_holds_for_the_next_request(opened: Opened) -> None:
    async with opened({"requests_per_minute": 1}) as bench:
        assert (await ask(bench)).status_code == 200
        assert (await ask(bench)).status_code == 429
        config = bench.reloader.config
        tier = replace(config.tiers["small"], requests_per_minute=5)
        await bench.reloader.reload(lambda: replace(config, tiers={"small": tier}))
        assert (await ask(bench)).status_code == 200


WORK = [
    ("POST", "/tokenize", {"prompt": "hello"}),
    ("POST", "/v1/detokenize", {"tokens": [1]}),
    ("GET", "/v1/sessions/s", None),
    ("DELETE", "/v1/sessions/s", None),
    ("GET", "/v1/usage", None),
]


@pytest.mark.parametrize(("method", "path", "body"), WORK)
@pytest.mark.parametrize("limit", ["requests_per_minute", "user_requests_per_minute"])
async def test_work_that_generates_nothing_counts_as_a_request(
    opened: Opened, tmp_path: Path, limit: str, method: str, path: str, body: dict[str, Any] | None
) -> None:
    async with opened({limit: 3, "max_concurrent_requests": 1, "monthly_tokens": 1000}, state=str(tmp_path)) as bench:
        headers = {"authorization": f"Bearer {KEY}"}
        for _ in range(2):
            answer = await bench.client.request(method, path, json=body, headers=headers)
            assert answer.status_code in (200, 404)
            await eventually(lambda: not bench.gateway.limiter.num_uncharged)
        assert (await ask(bench)).status_code == 200
        await eventually(lambda: not bench.gateway.limiter.num_uncharged)
        refused = await bench.client.request(method, path, json=body, headers=headers)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert limit in error_of(refused)["message"]
        assert "retry-after" in refused.headers
        assert (await ask(bench, OTHER)).status_code == 200, "the tenant alone is refused"
        for unlimited in ("/v1/models", "/version", "/metrics"):
            assert (await bench.client.get(unlimited, headers=headers)).status_code == 200
        await eventually(lambda: not bench.gateway.limiter.num_uncharged)
        bench.gateway.limiter.check()
