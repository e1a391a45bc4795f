"""Tests that a request that has ended leaves nothing that only a garbage collection frees.

With tens of objects in cycles for each request, a busy gateway stood still for 20 ms every few seconds.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, dial, eventually, open_bench, post, serving, some_replicas

from headrace.core.errors import Unavailable
from headrace.text.folder import TextModel

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("frozen_heap")]  # a collection walks what the module made, and no more

KEY, LIMITED_KEY = "hr-garbage-key", "hr-limited-key"
LIMITS: dict[str, Any] = {
    "requests_per_minute": 100_000,
    "input_tokens_per_minute": 10_000_000,
    "daily_tokens": 100_000_000,
    "max_concurrent_requests": 100,
    "monthly_budget": 1000.0,
}
NUM_REQUESTS = 5
CHAT = "/v1/chat/completions"
BODIES: dict[str, tuple[Any, ...]] = {
    "whole": (chat_body(), 200),
    "stream": (chat_body(stream=True, stream_options={"include_usage": True}), 200),
    "two choices": (chat_body(stream=True, n=2), 200),
    "log-probabilities": (chat_body(logprobs=True, top_logprobs=2), 200),
    "cached": (chat_body(temperature=0), 200),
    "session": (chat_body(), 200, f"Authorization: Bearer {KEY}", "x-session-id: s-{number}"),
    "idempotent": (chat_body(), 200, f"Authorization: Bearer {KEY}", "Idempotency-Key: i-{number}"),
    "given again": (chat_body(), 200, f"Authorization: Bearer {KEY}", "Idempotency-Key: once"),
    "refused field": (chat_body(temperature=99), 400),
    "unknown model": (chat_body() | {"model": "none"}, 404),
    "too long": (chat_body(max_tokens=1_000_000), 400),
    "limited": (chat_body(), 429, f"Authorization: Bearer {LIMITED_KEY}"),
    "no key": (chat_body(), 401, "x-nothing: 1"),
}
"""Body, status of the answer, and headers instead of a key's alone."""


@pytest.fixture
def saved_garbage() -> Iterator[list[Any]]:
    """What collections find once `gc.DEBUG_SAVEALL` is set; none runs by itself."""
    gc.collect()
    gc.disable()
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@asynccontextmanager
async def opened(text: TextModel, tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[TestBench, int]]:
    """A gateway with a caller of every limit, and one that has used up its requests; the port of its server."""
    keys = [{"key": KEY, "tenant": "acme", "tier": "large"}, {"key": LIMITED_KEY, "tenant": "other", "tier": "small"}]
    tiers = {"large": LIMITS, "small": {"requests_per_minute": 1}}
    prices = {MODEL: {"input": 1.0, "output": 2.0}}
    async with (
        open_bench(text, api_keys=keys, tiers=tiers, prices=prices, state=str(tmp_path), **changes) as bench,
        serving(bench.gateway) as port,
    ):
        yield bench, port


async def garbage_of(bench: TestBench, ask: Callable[[], Awaitable[None]], saved: list[Any]) -> dict[str, int]:
    """Type of ours or of uvicorn's -> objects that requests left to the collector, at least one for each of them."""
    limiter = bench.gateway.limiter

    async def is_over() -> None:
        await eventually(lambda: not limiter.num_uncharged and bench.gateway.service.open_requests.num_open == 0)
        await asyncio.sleep(0.02)
        gc.collect()

    for _ in range(3):  # what is made once
        await ask()
    await is_over()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for _ in range(NUM_REQUESTS):
        await ask()
    await is_over()
    found = Counter(type(one).__qualname__ for one in saved if type(one).__module__.startswith(("headrace.", "uvicorn.")))
    return {name: count for name, count in found.items() if count >= NUM_REQUESTS}


@pytest.mark.parametrize("kind", BODIES)
async def test_an_answered_request_leaves_no_garbage(kind: str, text: TextModel, tmp_path: Path, saved_garbage: list[Any]) -> None:
    body, status, *more = BODIES[kind]
    numbers = count()
    async with opened(text, tmp_path, cache={"enabled": kind == "cached"}) as (bench, port), dial(port) as (reader, writer):

        async def answered() -> int:
            headers = [line.format(number=next(numbers)) for line in more] or [f"Authorization: Bearer {KEY}"]
            writer.write(post(CHAT, body, *headers))
            return await status_of_whole(reader)

        async def ask() -> None:
            assert await answered() == status

        await answered()  # it uses up the limit, and its answer is what the cache has for the others
        num_computed = len(bench.replica.requests)
        assert not await garbage_of(bench, ask, saved_garbage)
        assert (len(bench.replica.requests) > num_computed) == (status == 200 and kind not in ("cached", "given again"))


async def test_a_client_that_leaves_in_the_middle_leaves_no_garbage(text: TextModel, tmp_path: Path, saved_garbage: list[Any]) -> None:
    async with opened(text, tmp_path) as (bench, port):
        bench.replica.token_delay_s = 0.01

        async def ask() -> None:
            async with dial(port) as (reader, writer):
                writer.write(post(CHAT, chat_body(stream=True, max_tokens=200), f"Authorization: Bearer {KEY}"))
                await reader.readuntil(b"data: ")

        assert not await garbage_of(bench, ask, saved_garbage)


@pytest.mark.parametrize(("failing", "status"), [(("r0",), 200), (("r0", "of-cub"), 503)])
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_fallback_leaves_no_garbage(
    text: TextModel, tmp_path: Path, saved_garbage: list[Any], failing: tuple[str, ...], status: int, is_streaming: bool
) -> None:
    (fox,) = some_replicas(1)
    cub = {"name": "cub", "folder": "/nowhere", "replicas": [{"name": "of-cub", "address": "unix:/nowhere"}]}
    models = [fox | {"fallbacks": {"failed": ["cub"]}}, cub]
    async with opened(text, tmp_path, models=models) as (bench, port), dial(port) as (reader, writer):
        for name in failing:
            bench.replicas[name].on_submit = lambda request, stream: stream.fail(Unavailable("gone"))

        async def ask() -> None:
            writer.write(post(CHAT, chat_body(stream=is_streaming), f"Authorization: Bearer {KEY}"))
            assert await status_of_whole(reader) == status

        assert not await garbage_of(bench, ask, saved_garbage)


async def status_of_whole(reader: asyncio.StreamReader) -> int:
    """The status of the next answer, which is read to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"content-length: " in head:
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    else:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    return int(head.split()[1])
