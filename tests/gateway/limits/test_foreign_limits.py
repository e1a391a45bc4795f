"""Tests requests to a server whose tokenizer is not known: their bytes count for limits, and what the server counts is charged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from foreign_kit import DONE, FAR, HELLO, RESERVED_TOKENS, ScriptedServer, event, far_models, head, listening, said
from gateway_kit import TestBench, eventually, open_bench

from headrace.gateway.upstream.foreign.upstream import TEMPLATE_TOKENS, HttpUpstream, most_prompt_tokens
from headrace.gateway.upstream.generation_request import Conversation, PlainPrompts
from headrace.text.folder import TextModel

pytestmark = pytest.mark.socket

KEY = "hr-foreign-limits-key"
COUNTED = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3})


@asynccontextmanager
async def opened(
    text: TextModel, server: ScriptedServer, timeouts: dict[str, float] | None = None, **numbers: Any
) -> AsyncIterator[TestBench]:
    keys = [{"key": KEY, "tenant": "acme", "tier": "small"}]
    async with (
        listening(server) as ports,
        open_bench(text, models=far_models(*ports), api_keys=keys, tiers={"small": numbers}, timeouts=timeouts or {}) as bench,
    ):
        bench.client.headers["authorization"] = f"Bearer {KEY}"
        yield bench


async def ask(bench: TestBench, **fields: Any) -> httpx2.Response:
    return await bench.client.post("/v1/chat/completions", json={"model": FAR, "messages": HELLO, **fields})


async def remaining(bench: TestBench) -> int:
    """Tokens left of the limit, once everything is charged: after this refused request, which reads it."""
    limiter = bench.gateway.limiter
    await eventually(lambda: not limiter.num_uncharged)
    return int((await ask(bench, max_tokens=1_000_000)).headers["x-ratelimit-remaining-tokens"])


async def test_the_most_that_a_prompt_can_be_is_reserved_and_the_servers_count_charged(text: TextModel) -> None:
    async with opened(text, ScriptedServer(head(), said("Hi"), said("", "stop"), COUNTED, DONE), daily_tokens=1000) as bench:
        first = await ask(bench, max_tokens=20)
        assert first.status_code == 200, first.text
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 1000 - RESERVED_TOKENS - 20
        assert await remaining(bench) == 1000 - 9 - 3


async def test_a_prompt_that_may_exceed_the_limit_is_refused_and_asks_no_server(text: TextModel) -> None:
    server = ScriptedServer(head(), said("Hi", "stop"), COUNTED, DONE)
    async with opened(text, server, input_tokens_per_minute=RESERVED_TOKENS - 1) as bench:
        refused = await ask(bench, max_tokens=5)
        assert refused.status_code == 429
        assert f"this request needs {RESERVED_TOKENS}" in refused.json()["error"]["message"]
        assert not server.bodies


async def test_an_answer_without_max_tokens_leaves_room_for_any_prompt(text: TextModel) -> None:
    server = ScriptedServer(head(), said("Hi", "stop"), COUNTED, DONE)
    async with opened(text, server, daily_tokens=500) as bench:
        answer = await ask(bench)
        assert answer.status_code == 200, answer.text
        assert server.bodies[0]["max_tokens"] == 500 - RESERVED_TOKENS


@pytest.mark.parametrize("pieces", [(said("Hi", "stop"), DONE), (said("Hi"),)])
async def test_a_prompt_that_no_server_counts_is_charged_as_reserved(text: TextModel, pieces: tuple[bytes, ...]) -> None:
    """The second server breaks off behind the first piece."""
    async with opened(text, ScriptedServer(head(), *pieces), daily_tokens=1000) as bench:
        await ask(bench, max_tokens=20)
        assert await remaining(bench) == 1000 - RESERVED_TOKENS - 1


ONE = head() + said("Hi") + said("", "stop")
"""The answer of a server that ignores `n`, without its counts."""


async def test_a_prompt_is_reserved_as_often_as_it_is_sent_to_a_server_known_to_answer_one_at_a_time(text: TextModel) -> None:
    async with opened(text, ScriptedServer(ONE + COUNTED + DONE), daily_tokens=10_000) as bench:
        first = await ask(bench, n=4, max_tokens=20)
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == 10_000 - RESERVED_TOKENS - 4 * 20
        assert await remaining(bench) == 10_000 - 4 * (9 + 3), "what the server counted"
        second = await ask(bench, n=4, max_tokens=20)
        assert int(second.headers["x-ratelimit-remaining-tokens"]) == 10_000 - 4 * (9 + 3) - 4 * (RESERVED_TOKENS + 20)
        single = await ask(bench, max_tokens=20)
        assert int(single.headers["x-ratelimit-remaining-tokens"]) == 10_000 - 8 * (9 + 3) - RESERVED_TOKENS - 20
        assert await remaining(bench) == 10_000 - 9 * (9 + 3)


async def test_an_answer_without_max_tokens_leaves_room_for_every_copy_of_the_prompt(text: TextModel) -> None:
    server = ScriptedServer(ONE + COUNTED + DONE)
    async with opened(text, server, daily_tokens=2000) as bench:
        upstream = bench.gateway.service.models.get(FAR).upstream
        assert isinstance(upstream, HttpUpstream)
        upstream.servers[0].refused.add("n")
        assert (await ask(bench, n=2)).status_code == 200
        assert server.bodies[-1]["max_tokens"] == (2000 - 2 * RESERVED_TOKENS) // 2


async def test_a_prompt_that_no_server_counts_is_charged_as_often_as_it_was_sent(text: TextModel) -> None:
    busy = head("503 Service Unavailable", "text/plain")
    async with opened(text, ScriptedServer(ONE + DONE), daily_tokens=10_000) as bench:
        await ask(bench, n=4, max_tokens=20)
        assert await remaining(bench) == 10_000 - 4 * (RESERVED_TOKENS + 1)
    async with opened(text, ScriptedServer(busy, before=(ONE + COUNTED + DONE, ONE + DONE)), daily_tokens=10_000) as bench:
        assert (await ask(bench, n=4, max_tokens=20)).status_code == 503
        assert await remaining(bench) == 10_000 - (9 + 3) - (RESERVED_TOKENS + 1), "one counted, one not, and none for the refused one"


@pytest.mark.loop
async def test_a_request_that_ends_before_its_server_answers_costs_what_was_sent(text: TextModel) -> None:
    silent = ScriptedServer(head(), hangs=True, before=(ONE + COUNTED + DONE,))
    async with opened(text, silent, timeouts={"request_s": 5.0}, daily_tokens=10_000) as bench:
        assert (await ask(bench, n=3, max_tokens=20)).status_code == 504
        assert len(silent.bodies) == 2
        assert await remaining(bench) == 10_000 - (9 + 3) - RESERVED_TOKENS
        assert (await ask(bench, max_tokens=20)).status_code == 504
        assert await remaining(bench) == 10_000 - (9 + 3) - 2 * RESERVED_TOKENS


@pytest.mark.pure
def test_no_text_has_more_tokens_than_its_bound(text: TextModel) -> None:
    texts = ["", "a", "\u00e9\u4e2d\U0001f9ea" * 50, "\x00\ud7ff\n\t ", "plain words " * 20, '"\\' * 30]
    for given in texts:
        num_tokens = len(text.tokenizer.encode(given, add_special_tokens=True))
        assert most_prompt_tokens(PlainPrompts(prompts=[given]), None) >= num_tokens
        messages = [{"role": "system", "content": given}, {"role": "user", "content": given}]
        assert most_prompt_tokens(Conversation(messages=messages), None) >= 2 * num_tokens + TEMPLATE_TOKENS


@pytest.mark.pure
def test_token_ids_and_a_servers_context_bound_a_prompt() -> None:
    assert most_prompt_tokens(PlainPrompts(prompts=[[1, 2, 3], "four"]), None) == 3 + 6
    assert most_prompt_tokens(PlainPrompts(prompts=["x" * 900, "four"]), 100) == 100 + 6
