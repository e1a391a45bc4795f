"""Tests the response cache: which requests use it, what it gives, and what it never keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from gateway_kit import MODEL, TestBench, chat_body, events_of, eventually, metric, open_bench, two_replicas
from scripted_store import script_answers
from virtual_time import VirtualTimeLoop

from headrace.core.errors import Unavailable
from headrace.gateway.access.principal import ANONYMOUS, KeyLimits, Principal
from headrace.gateway.cache import answer_cache
from headrace.gateway.stores.guard import MAX_UNANSWERED, REQUEST_WAIT_S, RETRY_S
from headrace.observe.finished_request import FinishedRequest
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

ON: dict[str, Any] = {"cache": {"enabled": True}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
async def cached(text: TextModel) -> AsyncIterator[TestBench]:
    async with open_bench(text, **ON) as bench:
        yield bench
        bench.gateway.service.stages.answer_cache.check()


def result(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-headrace-cache"]


async def written(bench: TestBench) -> None:
    """Until the store has every answer."""
    await eventually(lambda: not bench.gateway.service.stages.answer_cache.num_computing)


def comparable(answer: httpx2.Response) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    return {name: value for name, value in body.items() if name not in ("id", "created")}


async def test_an_equal_request_is_answered_without_an_engine(cached: TestBench) -> None:
    first, second = [await cached.chat(**GREEDY) for _ in range(2)]
    assert (result(first), result(second)) == ("miss", "hit")
    assert (len(cached.replica.requests), second.headers["age"], "age" in first.headers) == (1, "0", False)
    assert comparable(first) == comparable(second)
    assert (second.headers["x-headrace-model"], second.headers["x-headrace-reason"]) == (MODEL, "cached_answer")
    assert first.json()["id"] != second.json()["id"]
    assert metric(cached.gateway, "headrace_cache_requests_total", result="hit") == 1


async def test_it_is_off_unless_it_is_configured(text: TextModel) -> None:
    async with open_bench(text) as bench:
        assert [result(await bench.chat(**GREEDY)) for _ in range(2)] == ["off", "off"]
        assert len(bench.replica.requests) == 2
        assert (await bench.chat(**GREEDY, cache=True)).headers["x-headrace-ignored"] == "cache"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"stop": ["fox"]},
        {"logprobs": True, "top_logprobs": 3},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
        {"stream": True, "logprobs": True, "top_logprobs": 2},
    ],
)
async def test_the_answer_is_the_same_as_it_was(cached: TestBench, fields: dict[str, Any]) -> None:
    first, second = [await cached.chat(**GREEDY, **fields) for _ in range(2)]
    assert (result(first), result(second)) == ("miss", "hit")
    if fields.get("stream"):
        events = [[{**event, "id": "", "created": 0} for event in events_of(answer.text)] for answer in (first, second)]
        assert events[0] == events[1], "in the pieces in which it came"
    else:
        assert comparable(first) == comparable(second)


async def test_a_stream_and_a_whole_answer_share_an_entry(cached: TestBench) -> None:
    whole = await cached.chat(**GREEDY)
    stream = await cached.chat(**GREEDY, stream=True)
    assert (result(whole), result(stream)) == ("miss", "hit")
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events_of(stream.text))
    assert said == whole.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_completions_with_echo_are_cached(cached: TestBench, logprobs: int | None) -> None:
    fields = {**GREEDY, "prompt": ["Hello there", "How are you?"], "echo": True, "n": 2}
    answers = [await cached.complete(**fields, **({} if logprobs is None else {"logprobs": logprobs})) for _ in range(2)]
    assert [result(answer) for answer in answers] == (["miss", "hit"] if logprobs is None else ["off", "off"])
    assert comparable(answers[0]) == comparable(answers[1])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, "hit"),
        ({"seed": 7}, "hit"),
        ({"temperature": 0.7}, "off"),
        ({}, "off"),
        ({"temperature": 0.7, "cache": True}, "hit"),
        ({"temperature": 0.7, "cache": {"use-cache": True}}, "hit"),
        ({"temperature": 0, "cache": False}, "off"),
        ({"temperature": 0, "cache": {"no-cache": True, "no-store": True}}, "off"),
        ({"temperature": 0, "cache": {"no-cache": True}}, "miss"),
        ({"temperature": 0, "cache": {"no-store": True}}, "miss"),
        ({"temperature": 0, "prompt_logprobs": 1}, "off"),
    ],
)
async def test_which_requests_use_it(cached: TestBench, fields: dict[str, Any], expected: str) -> None:
    await cached.chat(max_tokens=3, **fields)
    assert result(await cached.chat(max_tokens=3, **fields)) == expected


async def test_no_cache_computes_anew_and_keeps_the_answer(cached: TestBench) -> None:
    assert result(await cached.chat(**GREEDY, cache={"no-cache": True})) == "miss"
    await eventually(lambda: metric(cached.gateway, "headrace_cache_answers_total", outcome="kept") == 1)
    assert result(await cached.chat(**GREEDY)) == "hit"


@pytest.mark.parametrize(
    "changed",
    [
        {"messages": [{"role": "user", "content": "hello"}]},
        {"temperature": 0, "top_p": 0.5},
        {"max_tokens": 9},
        {"cache_salt": "mine"},
        {"stop": ["x"]},
        {"response_format": {"type": "json_object"}},
    ],
)
async def test_any_difference_is_another_answer(cached: TestBench, changed: dict[str, Any]) -> None:
    await cached.chat(**GREEDY)
    other = await cached.client.post("/v1/chat/completions", json=chat_body(**GREEDY) | changed)
    assert result(other) == "miss"


async def test_an_alias_and_the_order_of_fields_change_nothing(cached: TestBench) -> None:
    await cached.chat(**GREEDY)
    body = dict(reversed(chat_body(**GREEDY).items())) | {"model": "gpt-4o", "user": "someone"}
    assert result(await cached.client.post("/v1/chat/completions", json=body)) == "hit"


async def test_other_weights_give_another_answer(cached: TestBench) -> None:
    await cached.chat(**GREEDY)
    info = cached.replica.info
    assert info is not None
    cached.replica.info = replace(info, model=replace(info.model, numerics={"weights": "other"}))
    assert result(await cached.chat(**GREEDY)) == "miss"


async def test_an_answer_kept_while_two_versions_serve_is_not_given_once_one_is_left(text: TextModel) -> None:
    """Either of them may have given it, and the one that is left need not be the one that stays."""
    async with open_bench(text, **ON, models=two_replicas()) as bench:
        before, canary = (replica.info for replica in bench.replicas.values())
        assert before is not None
        assert canary is not None
        bench.replicas["r1"].info = replace(canary, model=replace(canary.model, numerics={"weights": "other"}))
        assert [result(await bench.chat(**GREEDY)) for _ in range(2)] == ["miss", "hit"]
        bench.replicas["r1"].info = canary
        assert result(await bench.chat(**GREEDY)) == "miss"


async def test_tenants_share_nothing(text: TextModel) -> None:
    keys = [{"key": f"key-of-{name}", "tenant": name} for name in ("one", "two")]
    async with open_bench(text, **ON, api_keys=keys) as bench:
        found = []
        for name in ("one", "two", "one", "two"):
            headers = {"authorization": f"Bearer key-of-{name}"}
            found.append(result(await bench.client.post("/v1/chat/completions", json=chat_body(**GREEDY), headers=headers)))
        assert found == ["miss", "miss", "hit", "hit"]


@pytest.mark.parametrize(("option", "expected"), [(True, "hit"), (False, "off")])
async def test_a_tenants_option_counts_more_than_the_configuration(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, option: bool, expected: str
) -> None:
    async with open_bench(text, cache={"enabled": not option}) as bench:
        tenant = replace(ANONYMOUS, options={"cache": option})

        async def principal(_: object, framing: object) -> Principal:
            return tenant

        monkeypatch.setattr(bench.gateway.active.authenticator, "principal", principal)
        assert [result(await bench.chat(**GREEDY)) for _ in range(2)][1] == expected


POOR = Principal(tenant="one", key_id="poor", limits=KeyLimits(monthly_budget=0.0005))
RICH = Principal(tenant="one", key_id="rich", limits=KeyLimits(monthly_budget=5.0))


@pytest.mark.parametrize(("more", "expected"), [({}, ["miss", "miss", "hit", "hit"]), ({"max_tokens": 3}, ["miss", "hit", "hit", "hit"])])
async def test_an_answer_that_a_budget_cut_is_for_keys_of_that_budget(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], expected: list[str]
) -> None:
    async with open_bench(text, **ON, prices={MODEL: {"output": 100.0}}) as bench:
        found = []
        for caller in (POOR, RICH, POOR, RICH):

            async def principal(_: object, framing: object, caller: Principal = caller) -> Principal:
                return caller

            monkeypatch.setattr(bench.gateway.active.authenticator, "principal", principal)
            found.append(result(await bench.client.post("/v1/chat/completions", json=chat_body(temperature=0, **more))))
            await written(bench)
        assert found == expected
        most = [request.params.max_tokens for request in bench.replica.requests]
        assert most == [3] if more else most[0] == 5 < (most[1] or 0)


async def test_an_answer_is_there_for_its_time(text: TextModel) -> None:
    async with open_bench(text, cache={"enabled": True, "ttl_s": 60}) as bench:
        await bench.chat(**GREEDY)
        await written(bench)
        await asyncio.sleep(59)
        kept = await bench.chat(**GREEDY)
        assert (result(kept), kept.headers["age"]) == ("hit", "59")
        assert result(await bench.chat(**GREEDY, cache={"s-maxage": 30, "no-store": True})) == "miss"
        await asyncio.sleep(2)
        assert result(await bench.chat(**GREEDY, cache={"ttl": 10})) == "miss"
        await written(bench)
        await asyncio.sleep(11)
        assert result(await bench.chat(**GREEDY)) == "miss"


@pytest.mark.parametrize("jump_s", [3600.0, 31_536_000.0])
async def test_a_jump_of_the_clock_gives_no_negative_age(text: TextModel, jump_s: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with open_bench(text, **ON) as bench:
        await bench.chat(**GREEDY)
        await written(bench)
        loop.change_unix_time(-jump_s)
        again = await bench.chat(**GREEDY)
        assert (result(again), again.headers["age"]) == ("hit", "0")
        loop.change_unix_time(2 * jump_s)
        assert result(await bench.chat(**GREEDY)) == "miss"


async def test_equal_requests_at_once_are_computed_once(cached: TestBench) -> None:
    cached.replica.go.clear()
    asked = [asyncio.create_task(cached.chat(**GREEDY, stream=number % 2 == 0)) for number in range(6)]
    await eventually(lambda: len(cached.replica.requests) == 1)
    await asyncio.sleep(0.05)
    cached.replica.go.set()
    found = [result(await each) for each in asked]
    assert sorted(found) == ["hit"] * 5 + ["miss"]
    assert len(cached.replica.requests) == 1


async def test_where_the_first_of_equal_requests_fails_the_next_is_computed(cached: TestBench) -> None:
    submitted = 0

    def fail_first(*_: object) -> None:
        nonlocal submitted
        submitted += 1
        if submitted == 1:
            raise Unavailable("gone")

    cached.replica.on_submit = fail_first
    answers = await asyncio.gather(*(cached.chat(**GREEDY) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 503]
    assert len(cached.replica.requests) == 2


async def test_what_is_cut_or_refused_is_not_kept(cached: TestBench) -> None:
    cached.replica.go.clear()
    cut = asyncio.create_task(cached.chat(**GREEDY))
    await eventually(lambda: bool(cached.replica.requests))
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    cached.replica.go.set()
    assert (await cached.chat(**GREEDY, min_tokens=9)).status_code == 400
    assert result(await cached.chat(**GREEDY)) == "miss"


async def test_an_answer_that_is_too_large_is_not_kept(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_cache, "MAX_ANSWER_BYTES", 300)
    async with open_bench(text, cache={"enabled": True}) as bench:
        assert [result(await bench.chat(temperature=0, max_tokens=200, ignore_eos=True)) for _ in range(2)] == ["miss", "miss"]
        assert metric(bench.gateway, "headrace_cache_answers_total", outcome="too_large") == 2
        assert result(await bench.chat(**{**GREEDY, "max_tokens": 1})) == "miss"
        assert result(await bench.chat(**{**GREEDY, "max_tokens": 1})) == "hit"


async def test_a_field_that_makes_no_sense_is_refused_by_name(cached: TestBench) -> None:
    for given, name in (
        ({"ttl": 0}, "cache.ttl"),
        ({"s-maxage": -1}, "cache.s-maxage"),
        ({"namespace": "x"}, "cache.namespace"),
        (7, "cache"),
    ):
        refused = await cached.chat(cache=given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_a_hit_says_so_in_the_request_log_and_counts_no_engine(cached: TestBench) -> None:
    await cached.chat(**GREEDY)
    records: list[FinishedRequest] = []
    cached.gateway.request_log.write = records.append  # type: ignore[method-assign,assignment]
    await cached.chat(**GREEDY)
    (record,) = records
    answered = record.answered
    assert (answered.cache_tier, answered.replica, answered.usage.completion_tokens, record.model) == ("response", None, 8, MODEL)


@pytest.mark.parametrize("trouble", ["fails", "hangs", "takes no writes"])
async def test_a_store_that_fails_costs_the_cache_and_no_answer(cached: TestBench, trouble: str) -> None:
    store, loop = script_answers(cached), asyncio.get_running_loop()
    kept = {"temperature": 0, "max_tokens": 4}
    await cached.chat(**kept)
    await written(cached)
    if trouble == "fails":
        store.failure = "down"
    elif trouble == "hangs":
        store.hang()
    else:
        store.write_failure = "READONLY"
    can_read = trouble == "takes no writes"
    began = loop.time()
    for number in range(6):
        answer = await cached.chat(**GREEDY, messages=[{"role": "user", "content": f"question {number}"}])
        assert result(answer) == "miss", "it is computed"
    waited_s = MAX_UNANSWERED * REQUEST_WAIT_S if trouble == "hangs" else 0.0
    assert loop.time() - began == pytest.approx(waited_s), "after three waits nothing is asked"
    assert result(await cached.chat(**kept)) == ("hit" if can_read else "miss")
    if not can_read:
        assert metric(cached.gateway, "headrace_cache_lookup_failures_total") >= MAX_UNANSWERED
    store.go_on()
    await asyncio.sleep(RETRY_S)
    found = [result(await cached.chat(**GREEDY, messages=[{"role": "user", "content": "after it"}])) for _ in range(2)]
    assert found == ["miss", "hit"]
    assert result(await cached.chat(**GREEDY, messages=[{"role": "user", "content": "question 0"}])) == "hit", "it was written later"
    await written(cached)
