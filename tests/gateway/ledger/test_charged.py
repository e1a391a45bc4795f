"""Tests that a usage record has what its request was charged: the tokens and the money that its tenant's limits count, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_kit import DONE, ScriptedServer, head, listening, said
from gateway_kit import MODEL, TestBench, chat_body, dial, eventually, follow, open_bench, post, serving, used
from session_kit import assistant, user

from headrace.core.errors import Unavailable
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.ledger.record import UsageRecord
from headrace.observe.finished_request import FinishedRequest
from headrace.text.folder import TextModel
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

CHAT = "/v1/chat/completions"
KEY = "sk-charged-0123456789"
OTHER = "cub"
BILLED: dict[str, Any] = {
    "prices": {MODEL: {"input": 1.0, "output": 2.0, "cached_input": 0.5}},
    "tiers": {"small": {"daily_tokens": 1_000_000, "daily_budget": 1000.0}},
    "api_keys": [{"key": KEY, "tenant": "acme", "tier": "small"}],
}
KEYED = {"authorization": f"Bearer {KEY}"}


async def ask(bench: TestBench, headers: dict[str, str] | None = None, **fields: Any) -> int:
    answer = await bench.client.post(CHAT, json=chat_body(**{"max_tokens": 5, **fields}), headers={**KEYED, **(headers or {})})
    return answer.status_code


def ending_with(finish: FinishReason, error: str | None = None) -> Callable[[EngineRequest, ReplicaStream], None]:
    """What an engine does that ends a sequence without a token."""

    def end(request: EngineRequest, stream: ReplicaStream) -> None:
        stream.put(SequenceUpdate(request_id=request.request_id, epoch=request.epoch, index=0, finish=finish, error=error))

    return end


def lose(request: EngineRequest, stream: ReplicaStream) -> None:
    stream.fail(Unavailable("gone"))


async def completed(bench: TestBench) -> None:
    bench.replica.cached_tokens = 3
    assert await ask(bench) == 200


async def failed_with_output(bench: TestBench) -> None:
    bench.replica.token_delay_s = 1.0
    asking = asyncio.create_task(ask(bench, max_tokens=200))
    await asyncio.sleep(3.5)
    bench.replica.die()
    assert await asking == 503


async def failed(bench: TestBench) -> None:
    bench.replica.on_submit = ending_with(FinishReason.ERROR, "of the engine")
    assert await ask(bench) == 500


async def refused_without_output(bench: TestBench) -> None:
    bench.replica.on_submit = ending_with(FinishReason.ERROR, f"{CANNOT_CONTINUE}: the grammar is too deep")
    assert await ask(bench) == 400


async def lost(bench: TestBench, **fields: Any) -> None:
    bench.replica.on_submit = lose
    assert await ask(bench, **fields) == 503


async def cut_by_a_shutdown(bench: TestBench, **fields: Any) -> None:
    bench.replica.go.clear()
    asking = asyncio.create_task(ask(bench, **fields))
    await eventually(lambda: bench.replica.num_open == 1)
    bench.gateway.service.open_requests.cut(Unavailable("shutting down"))
    assert await asking == 503


async def left(bench: TestBench, **fields: Any) -> None:
    bench.replica.go.clear()
    async with serving(bench.gateway) as port:
        async with dial(port) as (_, writer):
            writer.write(post(CHAT, chat_body(**{"max_tokens": 5, **fields}), f"authorization: Bearer {KEY}"))
            await eventually(lambda: bench.replica.num_open == 1)
        await eventually(lambda: bench.gateway.service.open_requests.num_open == 0)


async def late(bench: TestBench) -> None:
    bench.replica.go.clear()
    assert await ask(bench) == 504


async def late_in_the_queue(bench: TestBench, **fields: Any) -> None:
    bench.replica.on_submit = ending_with(FinishReason.DEADLINE)
    assert await ask(bench, **fields) == 504


async def answered_by_caches(bench: TestBench) -> None:
    for name in ("a", "a", "b"):
        assert await ask(bench, {"idempotency-key": name}, temperature=0) == 200


ENDINGS: list[tuple[Callable[..., Awaitable[None]], list[tuple[bool, bool]]]] = [
    (completed, [(True, True)]),
    (failed_with_output, [(True, True)]),
    (failed, [(False, False)]),
    (refused_without_output, []),
    (lost, [(False, False)]),
    (cut_by_a_shutdown, [(False, False)]),
    (left, [(True, False)]),
    (late, [(True, False)]),
    (late_in_the_queue, [(True, False)]),
    (answered_by_caches, [(True, True), (False, False), (False, False)]),
]
"""How a request ends -> of each record, whether its prompt and its output cost something."""


async def check_charged(bench: TestBench, written: list[UsageRecord]) -> None:
    """The records have what counts of the limits, and each the price of its tokens."""
    tokens, nanos = [await used(bench, name, KEY) for name in ("daily_tokens", "daily_budget")]
    assert sum(record.prompt_tokens + record.completion_tokens for record in written) == tokens
    assert sum(record.cost_nanos for record in written) == nanos


@pytest.mark.parametrize(("ended", "costs"), ENDINGS, ids=[ended.__name__ for ended, _ in ENDINGS])
async def test_a_record_has_what_was_charged_however_its_request_ends(
    text: TextModel, tmp_path: Path, ended: Callable[..., Awaitable[None]], costs: list[tuple[bool, bool]]
) -> None:
    more: dict[str, Any] = {"timeouts": {"request_s": 20}, "cache": {"enabled": ended is answered_by_caches}}
    async with open_bench(text, state=str(tmp_path), **BILLED, **more) as bench:
        written = follow(bench)
        await ended(bench)
        await check_charged(bench, written)
    assert [(record.prompt_tokens > 0, record.completion_tokens > 0) for record in written] == costs
    for record in written:
        uncached = record.prompt_tokens - record.cached_tokens
        assert record.cost_nanos == 1000 * uncached + 500 * record.cached_tokens + 2000 * record.completion_tokens
        assert record.estimated_tokens == 0


TURNS = [turn for number in range(30) for turn in (user(f"Turn {number}: The quick brown fox jumps."), assistant("Yes."))]
SUMMARISED: dict[str, Any] = {"messages": [*TURNS, user("And now?")], "context_fitting": "summary", "max_tokens": 20}


@pytest.mark.parametrize(("ended", "is_charged"), [(lost, False), (cut_by_a_shutdown, False), (left, True), (late_in_the_queue, True)])
async def test_a_summary_that_ends_without_output_is_charged_as_an_answer_is(
    text: TextModel, tmp_path: Path, ended: Callable[..., Awaitable[None]], is_charged: bool
) -> None:
    async with open_bench(text, state=str(tmp_path), **BILLED, timeouts={"request_s": 20}) as bench:
        written = follow(bench)
        await ended(bench, **SUMMARISED)
        await check_charged(bench, written)
        [summary] = bench.replica.requests
    costs = (len(summary.prompt_ids), 0) if is_charged else (0, 0)
    assert [(record.prompt_tokens, record.completion_tokens) for record in written] == [costs] * is_charged


def own(name: str, **fallbacks: list[str]) -> dict[str, Any]:
    return {"name": name, "folder": "/nowhere", "replicas": [{"name": f"of-{name}", "address": "unix:/nowhere"}], "fallbacks": fallbacks}


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_summary_costs_what_the_model_that_made_it_costs(text: TextModel, tmp_path: Path, is_answered: bool) -> None:
    """The first model summarises and is lost before it answers; the other one is free."""

    def lose_answer(request: EngineRequest, stream: ReplicaStream) -> None:
        if request.params.max_tokens == 20:
            lose(request, stream)

    models = [own(MODEL, failed=[OTHER]), own(OTHER)]
    async with open_bench(text, models=models, state=str(tmp_path), **BILLED) as bench:
        written, (first, other) = follow(bench), bench.replicas.values()
        first.on_submit = lose_answer
        if not is_answered:
            other.on_submit = lose_answer
        status = await ask(bench, **SUMMARISED)
        assert status == (200 if is_answered else 503)
        await check_charged(bench, written)
    *summaries, _ = first.requests
    assert summaries
    assert [each.params.max_tokens for each in other.requests].count(20) == 1 < len(other.requests)
    [record] = written
    lost_tokens = 0 if is_answered else len(other.requests[-1].prompt_ids)
    assert record.prompt_tokens == sum(len(each.prompt_ids) for each in (*summaries, *other.requests)) - lost_tokens
    num_said = record.completion_tokens - (20 if is_answered else 0)
    assert num_said % (len(summaries) + len(other.requests) - 1) == 0, "each summary says the same"
    said_by_first = num_said * len(summaries) // (len(summaries) + len(other.requests) - 1)
    assert record.cost_nanos == 1000 * sum(len(each.prompt_ids) for each in summaries) + 2000 * said_by_first
    assert (record.requested_model, record.model) == (MODEL, OTHER if is_answered else MODEL)


async def test_a_prompt_that_a_foreign_server_does_not_count_costs_what_our_tokenizer_counts(text: TextModel, tmp_path: Path) -> None:
    async with listening(ScriptedServer(head() + said("one ") + said("two", "stop") + DONE)) as (port,):
        upstreams = [{"url": f"http://127.0.0.1:{port}/v1", "model": "far"}]
        models = [{**own(MODEL), "upstreams": upstreams}]
        async with open_bench(text, models=models, state=str(tmp_path), **BILLED) as bench:
            written = follow(bench)
            assert await ask(bench) == 200
            bench.replica.on_submit = lose
            assert await ask(bench) == 200
            await check_charged(bench, written)
    ours, theirs = written
    assert (ours.prompt_tokens, ours.estimated_tokens) == (theirs.prompt_tokens, 0)
    assert (theirs.route, theirs.completion_tokens, theirs.estimated_tokens) == ("foreign-0", 2, theirs.prompt_tokens + 2)


async def test_a_cache_says_which_tokens_of_a_foreign_answer_are_estimated(text: TextModel) -> None:
    async with listening(ScriptedServer(head() + said("one", "stop") + DONE)) as (port,):
        models = [{**own(MODEL), "upstreams": [{"url": f"http://127.0.0.1:{port}/v1", "model": "far"}]}]
        async with open_bench(text, models=models, cache={"enabled": True}) as bench:
            records: list[FinishedRequest] = []
            bench.gateway.request_log.write = records.append  # type: ignore[method-assign,assignment]
            for _ in range(2):
                assert (await bench.chat(temperature=0, provider={"only": ["foreign-0"]})).status_code == 200
    assert [record.answered.cache_tier for record in records] == [None, "response"]
    computed, replayed = [record.answered.usage for record in records]
    assert computed.estimated_tokens
    assert replayed == computed
