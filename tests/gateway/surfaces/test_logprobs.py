"""Tests log-probabilities as JSON: a token that the model rules out still has a number."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
from asgi_connection import exchange_of
from gateway_kit import MAX_MODEL_LEN, TestBench, events_of, eventually, open_bench

from headrace.core.plan import TokenLogprobs, columns_of
from headrace.gateway import site
from headrace.gateway.generation import answer_memory
from headrace.gateway.generation.answer_encoder import EncodingTurns
from headrace.gateway.http.asgi import PIECE_BYTES
from headrace.gateway.http.errors import ClientLeft
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces import completions
from headrace.gateway.surfaces.dialect.logprobs import LOWEST_LOGPROB, chat_logprobs, completion_logprobs
from headrace.text.folder import TextModel
from headrace.text.logprobs import DecodedLogprobs

pytestmark = pytest.mark.loop


@pytest.mark.pure
def test_a_token_the_model_rules_out_gets_the_lowest_number_not_null(text: TextModel) -> None:
    a, b = text.tokenizer.encode("a", add_special_tokens=False) + text.tokenizer.encode("b", add_special_tokens=False)
    decoded = DecodedLogprobs(text.tokenizer)
    decoded.add(columns_of([TokenLogprobs(a, -math.inf, 1, (b,), (-math.inf,))]), [0], [True])
    chat = json.loads(b"".join(chat_logprobs([decoded], 1)))
    assert chat["content"][0]["logprob"] == chat["content"][0]["top_logprobs"][0]["logprob"] == LOWEST_LOGPROB
    completion = json.loads(b"".join(completion_logprobs([decoded], 1)))
    assert completion["token_logprobs"] == [LOWEST_LOGPROB]
    assert completion["top_logprobs"] == [{"a": LOWEST_LOGPROB, "b": LOWEST_LOGPROB}]


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_prompts_logprobs_are_encoded_once_whatever_n_is(
    bench: TestBench, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    """Choices of one prompt show the same log-probabilities, which are encoded once."""
    made: list[str] = []
    for name in ("echo_logprobs", "prompt_logprobs"):
        monkeypatch.setattr(completions, name, noting(made, name, getattr(completions, name)))
    more = {} if is_streaming else {"prompt_logprobs": 1}
    response = await bench.complete(prompt=["Hello", "Bye"], n=3, echo=True, logprobs=2, max_tokens=2, stream=is_streaming, **more)
    assert sorted(made) == ["echo_logprobs"] * 2 + ["prompt_logprobs"] * (0 if is_streaming else 2)
    choices = [event["choices"][0] for event in events_of(response.text)] if is_streaming else response.json()["choices"]
    firsts = {choice["index"]: choice["logprobs"]["tokens"][0] for choice in reversed(choices) if choice["logprobs"]}
    assert [firsts[index] for index in range(6)] == [firsts[0]] * 3 + [firsts[3]] * 3


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_many_logprobs_are_written_in_slices_with_turns_for_others(bench: TestBench, is_streaming: bool) -> None:
    """No time passes here: the slices are those of their size."""
    made: list[int] = []
    encoding = bench.gateway.service.pipeline.encoding
    one_slice = encoding._slice

    def noted(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        assert encoding.num_pending == 1
        found = one_slice(pieces)
        made.append(len(found[0]))
        return found

    encoding._slice = noted  # type: ignore[method-assign]
    for prompt, num_slices in (([5], 0), ([5] * (MAX_MODEL_LEN - 1), 2)):
        response = await bench.complete(prompt=prompt, echo=True, logprobs=20, max_tokens=1, stream=is_streaming)
        assert response.status_code == 200
        assert len(made) == num_slices
        assert max(made, default=0) < 2 * PIECE_BYTES
    assert encoding.num_pending == 0


async def test_whoever_waits_for_its_turn_gets_it_in_order_and_one_slice_is_made_at_a_time() -> None:
    """44 answers encoded in threads and tasks of their own held up the event loop for a second."""
    now, turns, round_of = 0.0, EncodingTurns(lambda: now), asyncio.Event()
    order: list[tuple[int, int]] = []

    def pieces(number: int) -> Iterator[bytes]:
        nonlocal now
        for place in range(3):
            now += 1.0
            order.append((place, number))
            yield b"x"

    async def read(number: int) -> bytes:
        return b"".join([made async for made in turns.slices(pieces(number))])

    async def count_rounds() -> int:
        num_rounds = 0
        while not round_of.is_set():
            num_rounds += 1
            await asyncio.sleep(0)
        return num_rounds

    counting = asyncio.create_task(count_rounds())
    assert await asyncio.gather(*[read(number) for number in range(5)]) == [b"xxx"] * 5
    round_of.set()
    assert order == [(place, number) for place in range(3) for number in range(5)]
    assert await counting >= 15
    assert turns.num_pending == 0


async def test_what_waits_is_not_encoded_for_a_client_that_has_left() -> None:
    turns, made = EncodingTurns(time.monotonic), []

    def pieces() -> Iterator[bytes]:
        made.append(1)
        yield b"x"

    async def read() -> None:
        async for _ in turns.slices(pieces()):
            pass

    async with turns._turn:
        tasks = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)
        assert turns.num_pending == 3
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (made, turns.num_pending) == ([], 0)


async def test_slices_are_closed_when_their_writer_fails(bench: TestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that was given up is not pending until its generator is collected."""
    turns = bench.gateway.service.pipeline.encoding
    held: list[object] = []

    async def fail(exchange: Exchange, body: bytes, *, is_last: bool = False) -> None:
        held.append(turns.num_pending)
        raise ClientLeft("The client left.")

    kept = [turns.slices(iter([b"x", b"y"]))]  # a second reference: nothing but closing ends it
    monkeypatch.setattr(Exchange, "write", fail)
    monkeypatch.setattr(Exchange, "start", AsyncMock())
    exchange = exchange_of(AsyncMock(), AsyncMock())
    with pytest.raises(ClientLeft):
        await exchange.reply_in_pieces(kept[0])
    assert (held, turns.num_pending) == ([1], 0)
    kept = [turns.slices(iter([b"x", b"y"]))]
    stream = bench.gateway.service.pipeline.watch.open(exchange, lambda: 0)
    with pytest.raises(ClientLeft):
        await stream.write_slices(kept[0], num_bytes=2)
    assert (held, turns.num_pending) == ([1, 1], 0)


async def test_prompt_logprobs_are_capped_before_anything_runs(bench: TestBench) -> None:
    prompts = [[5] * 500] * 2
    response = await bench.complete(prompt=prompts, n=64, prompt_logprobs=20, max_tokens=1)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (413, "prompt_logprobs", "request_too_large")
    assert "prompt tokens (1000) x (prompt_logprobs + 1) x choices (64) <= 1048576" in error["message"]
    response = await bench.complete(prompt=prompts, n=64, echo=True, logprobs=20, max_tokens=1)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "logprobs")
    assert bench.replica.requests == []


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 4, "n": 2}, {"echo": True, "logprobs": 4}])
async def test_kept_json_that_is_longer_than_charged_beforehand_is_charged_as_it_is_encoded(
    text: TextModel, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """An entry of " alphabetically" took 85 bytes where 76 were charged."""
    monkeypatch.setattr(answer_memory, "ENCODED_PROMPT_LOGPROB_BYTES", 1)
    body = {"prompt": [5] * 300, "max_tokens": 1, **fields}
    async with open_bench(text) as bench:
        answered = await bench.complete(**body)
        assert answered.status_code == 200
        assert bench.gateway.service.memory.held == 0
    monkeypatch.setattr(site, "MAX_REQUEST_BYTES", 170_000)
    async with open_bench(text) as bench:
        refused = await bench.complete(**body)
        assert (refused.status_code, len(bench.replica.requests)) == (413, 1), "only its encoding is too large"
        assert bench.gateway.service.memory.held == 0


async def test_logprobs_of_a_whole_answer_are_capped_before_it_runs_where_its_length_is_given(bench: TestBench) -> None:
    prompts = [[5]] * 4
    response = await bench.complete(prompt=prompts, n=32, logprobs=20, max_tokens=100)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (413, "logprobs", "request_too_large")
    assert "tokens of all choices (12800) x (alternatives + 1) <= 262144 without stream" in error["message"]
    assert bench.replica.requests == []
    assert (await bench.complete(prompt=prompts, n=32, logprobs=20, max_tokens=100, stream=True)).status_code == 200


async def test_logprobs_of_a_whole_answer_are_capped_while_it_runs(bench: TestBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_memory, "MAX_OUTPUT_LOGPROBS", 30)
    assert (await bench.chat(logprobs=True, top_logprobs=2, max_tokens=10)).status_code == 200
    response = await bench.chat(logprobs=True, top_logprobs=2)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "top_logprobs")
    await eventually(lambda: bench.replica.num_open == 0)


def noting(notes: list[Any], what: Any, call: Any) -> Any:
    """`call`, which adds `what` (or what it returns) to `notes` each time."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append(what() if callable(what) else what)
        return call(*args, **kwargs)

    return noted
