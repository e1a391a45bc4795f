"""Tests that what a foreign server counted, or did not count, is shown to the client, recorded and charged alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign_kit import DONE, FAR, RESERVED_TOKENS, ScriptedServer, event, far_models, head, listening, said
from gateway_kit import chat_body, events_of, follow, open_bench, used

from headrace.text.folder import TextModel

pytestmark = pytest.mark.socket

KEY = "sk-foreign-usage-0123456789"
PRICES = {FAR: {"input": 1.0, "output": 2.0, "cached_input": 0.1}}
BEGIN = head() + said("one ") + said("two", "stop")
CACHED = {"prompt_tokens_details": {"cached_tokens": 900}}


def counts(prompt: Any, completion: Any, **more: Any) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **more})


COUNTED_PIECE = event(choices=[{"index": 0, "delta": {"content": "one "}}], usage={"prompt_tokens": 9, "completion_tokens": 1})

# what a server sends -> prompt, completion and cached tokens, and how many of them it did not count itself
ANSWERS = {
    "more cached than prompt": (BEGIN + counts(10, 3, **CACHED) + DONE, (910, 3, 900, 0)),
    "DeepSeek": (BEGIN + counts(1000, 3, prompt_cache_hit_tokens=900, prompt_cache_miss_tokens=100) + DONE, (1000, 3, 900, 0)),
    "Moonshot": (BEGIN + counts(1000, 3, cached_tokens=900) + DONE, (1000, 3, 900, 0)),
    "negative": (BEGIN + counts(-1000, -3, total_tokens=-1, cached_tokens=-900) + DONE, (RESERVED_TOKENS, 2, 0, RESERVED_TOKENS + 2)),
    "huge": (BEGIN + counts(10**18, 10**12, cached_tokens=2**31) + DONE, (RESERVED_TOKENS, 2, 0, RESERVED_TOKENS + 2)),
    "none": (BEGIN + DONE, (RESERVED_TOKENS, 2, 0, RESERVED_TOKENS + 2)),
    "after the end, at once": (BEGIN + DONE + counts(1000, 3, **CACHED), (1000, 3, 900, 0)),
    "in every piece, and zeros at the end": (
        head() + COUNTED_PIECE + said("two", "stop") + counts(0, 0, total_tokens=0) + DONE,
        (9, 1, 0, 0),
    ),
    "the prompt alone": (BEGIN + counts(9, 0) + DONE, (9, 2, 0, 2)),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_client_is_told_what_is_recorded_and_charged(text: TextModel, tmp_path: Path, name: str) -> None:
    sent, (prompt, completion, cached, estimated) = ANSWERS[name]
    tiers = {"small": {"daily_tokens": 1_000_000, "daily_budget": 1000.0}}
    billed: dict[str, Any] = {"prices": PRICES, "tiers": tiers, "api_keys": [{"key": KEY, "tenant": "acme", "tier": "small"}]}
    async with (
        listening(ScriptedServer(sent)) as ports,
        open_bench(text, models=far_models(*ports), state=str(tmp_path), **billed) as near,
    ):
        near.client.headers["authorization"] = f"Bearer {KEY}"
        written = follow(near)
        whole = (await near.client.post("/v1/chat/completions", json=chat_body(model=FAR, max_tokens=20))).json()["usage"]
        body = chat_body(model=FAR, max_tokens=20, stream=True, stream_options={"include_usage": True})
        streamed = events_of((await near.client.post("/v1/chat/completions", json=body)).text)[-1]["usage"]
        tokens, nanos = [await used(near, limit, KEY) for limit in ("daily_tokens", "daily_budget")]
    for shown in (whole, streamed):
        assert (shown["prompt_tokens"], shown["completion_tokens"], shown["total_tokens"]) == (prompt, completion, prompt + completion)
        assert shown["prompt_tokens_details"]["cached_tokens"] == cached
    cost_nanos = (prompt - cached) * 1000 + cached * 100 + completion * 2000
    for record in written:
        assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (prompt, completion, cached)
        assert (record.estimated_tokens, record.cost_nanos) == (estimated, cost_nanos)
    assert (len(written), tokens, nanos) == (2, 2 * (prompt + completion), 2 * cost_nanos)
