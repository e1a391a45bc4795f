"""Tests that what a foreign server counted is shown to the client, recorded and charged alike."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from foreign_kit import DONE, FAR, ScriptedServer, event, far_models, head, listening, said
from gateway_kit import TestBench, chat_body, events_of, open_bench

from headrace.gateway.ledger.usage_query import UsageQuery
from headrace.text.folder import TextModel

pytestmark = pytest.mark.socket

PRICES = {FAR: {"input": 1.0, "output": 2.0, "cached_input": 0.1}}
BEGIN = head() + said("one ") + said("two", "stop")
CACHED = {"prompt_tokens_details": {"cached_tokens": 900}}


def counts(prompt: Any, completion: Any, **more: Any) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **more})


COUNTED_PIECE = event(choices=[{"index": 0, "delta": {"content": "one "}}], usage={"prompt_tokens": 9, "completion_tokens": 1})

# what a server sends -> prompt, completion and cached tokens
ANSWERS = {
    "more cached than prompt": (BEGIN + counts(10, 3, **CACHED) + DONE, (910, 3, 900)),
    "DeepSeek": (BEGIN + counts(1000, 3, prompt_cache_hit_tokens=900, prompt_cache_miss_tokens=100) + DONE, (1000, 3, 900)),
    "Moonshot": (BEGIN + counts(1000, 3, cached_tokens=900) + DONE, (1000, 3, 900)),
    "negative": (BEGIN + counts(-1000, -3, total_tokens=-1, cached_tokens=-900) + DONE, (0, 2, 0)),
    "huge": (BEGIN + counts(10**18, 10**12, cached_tokens=2**31) + DONE, (0, 2, 0)),
    "none": (BEGIN + DONE, (0, 2, 0)),
    "after the end, at once": (BEGIN + DONE + counts(1000, 3, **CACHED), (1000, 3, 900)),
    "in every piece, and zeros at the end": (
        head() + COUNTED_PIECE + said("two", "stop") + counts(0, 0, total_tokens=0) + DONE,
        (9, 1, 0),
    ),
}


async def charged(bench: TestBench, count: int) -> dict[str, Any]:
    """The sums of all records, once there are this many."""
    ledger = bench.gateway.service.ledger
    assert ledger is not None
    async with asyncio.timeout(60):
        while True:
            rows = await ledger.rows(UsageQuery(by=["tenant"]))
            if rows and int(str(rows[0]["requests"])) == count:
                return rows[0]
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_client_is_told_what_is_recorded_and_charged(text: TextModel, tmp_path: Path, name: str) -> None:
    sent, (prompt, completion, cached) = ANSWERS[name]
    async with (
        listening(ScriptedServer(sent)) as ports,
        open_bench(text, models=far_models(*ports), state=str(tmp_path), prices=PRICES) as near,
    ):
        whole = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR))).json()["usage"]
        body = chat_body(model=FAR, stream=True, stream_options={"include_usage": True})
        streamed = events_of((await near.client.post("/v1/chat/completions", json=body)).text)[-1]["usage"]
        row = await charged(near, 2)
    for shown in (whole, streamed):
        assert (shown["prompt_tokens"], shown["completion_tokens"], shown["total_tokens"]) == (prompt, completion, prompt + completion)
        assert shown["prompt_tokens_details"]["cached_tokens"] == cached
    assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (2 * prompt, 2 * completion, 2 * cached)
    assert row["cost_nanos"] == 2 * ((prompt - cached) * 1000 + cached * 100 + completion * 2000)
