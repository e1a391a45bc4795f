"""Tests that an answer that goes on elsewhere is billed once: the records of its parts, and its tenant's limits, add up to the answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, chat_body, eventually, follow, metric, open_bench, snapshot, two_replicas, used
from resume_kit import CHAT, COMPLETIONS, answer_of, equal, kept, send, streaming_body, two_gateways

from headrace.text.folder import TextModel
from headrace.wire.client import SeenLoad

pytestmark = pytest.mark.loop

KEY = "sk-continued-0123456789"
PRICES = {MODEL: {"input": 1.0, "output": 2.0, "cached_input": 0.5}}
BILLED: dict[str, Any] = {
    "prices": PRICES,
    "tiers": {"small": {"daily_tokens": 1_000_000, "daily_budget": 1000.0}},
    "api_keys": [{"key": KEY, "tenant": "acme", "tier": "small"}],
}
USAGE = {"stream_options": {"include_usage": True}}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"max_tokens": 12, "ignore_eos": True, **USAGE}),
    "n": (CHAT, {"n": 3, "max_tokens": 6, **USAGE}),
    "prompts": (COMPLETIONS, {"prompt": ["Hello", "world"], "n": 2, "max_tokens": 6, **USAGE}),
    "logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 12, "ignore_eos": True, **USAGE}),
}


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_that_goes_on_at_another_gateway_is_billed_once(text: TextModel, tmp_path: Path, mode: str) -> None:
    """Its client leaves twice, each time without the last two events, which were lost on the way. Where these are computed again (their
    log-probabilities are not kept), they are not billed again."""
    path, fields = MODES[mode]
    body = streaming_body(path, **fields)
    async with two_gateways(text, tmp_path, **BILLED) as (first, second):
        parts = follow(first, second)
        for bench in (first, second):
            bench.replica.token_delay_s = 0.002
        events = (await send(first.gateway, path, body, leave_after=6, key=KEY)).events[:-2]
        await kept(first)
        events += (await send(second.gateway, path, body, last_event=events[-1].id, leave_after=5, key=KEY)).events[:-2]
        await kept(second)
        events += (await send(first.gateway, path, body, last_event=events[-1].id, key=KEY)).events
        usage = answer_of(events)["usage"]
        await eventually(lambda: len(parts) == 3)
        await used(first, "daily_tokens", KEY)
        assert await used(second, "daily_tokens", KEY) == usage["prompt_tokens"] + usage["completion_tokens"]
        assert await used(second, "daily_budget", KEY) == sum(part.cost_nanos for part in parts)
    assert sum(part.prompt_tokens for part in parts) == usage["prompt_tokens"] == parts[0].prompt_tokens
    assert sum(part.completion_tokens for part in parts) == usage["completion_tokens"]
    assert sum(part.cost_nanos for part in parts) == usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 2000
    assert [part.outcome for part in parts] == ["cancelled", "cancelled", "completed"]
    assert len({part.request_id for part in parts}) == 3


async def test_an_answer_that_goes_on_at_another_replica_is_billed_once(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, models=two_replicas(), state=str(tmp_path), timeouts={"failover_s": 30}, **BILLED) as bench:
        for number, replica in enumerate(bench.replicas.values()):
            equal(replica)
            replica.snapshot = SeenLoad(snapshot(num_running=5 * number), asyncio.get_running_loop().time() + 1e6)
            replica.token_delay_s = 0.01
        first, written = bench.replicas["r0"], follow(bench)
        headers = {"authorization": f"Bearer {KEY}"}
        body = chat_body(n=2, max_tokens=30, ignore_eos=True)
        answering = asyncio.create_task(bench.client.post(CHAT, json=body, headers=headers))
        await eventually(lambda: any(stream.unread_bytes or not stream.is_unbegun for stream in first.streams.values()))
        await asyncio.sleep(0.1)
        first.die()
        answer = await answering
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        [record] = written
        assert metric(bench.gateway, "headrace_sequences_resumed_total", model=MODEL, replica="r1") == 2
        assert await used(bench, "daily_tokens", KEY) == usage["total_tokens"]
        assert await used(bench, "daily_budget", KEY) == record.cost_nanos
    assert usage["completion_tokens"] == 60
    assert [record.prompt_tokens, record.completion_tokens, record.route] == [usage["prompt_tokens"], 60, "r1"]
