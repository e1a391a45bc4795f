"""Tests every field of a usage record beside what its client saw: whole answers, a stream that its client left, and an answer
from a cache, on virtual time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from asgi_connection import connected
from gateway_kit import chat_body, dial, eventually, post, serving
from virtual_gateway import virtual_gateway
from virtual_time import VirtualTimeLoop

from headrace.gateway.ledger.record import UsageRecord
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

CHAT = "/v1/chat/completions"
STEP_MS, PAUSE_MS = 20.0, 5.0
"""What a step of the engine takes, and what lies between two."""

DIGESTS = {"model": "0123456789abcdef"}
KEY = "sk-fields-0123456789"
SITE: dict[str, Any] = {
    "api_keys": [{"key": KEY, "tenant": "acme", "user": "ann", "tier": "gold"}],
    "tiers": {"gold": {"class": "premium"}},
    "prices": {"fox": {"input": 3.0, "cached_input": 1.0, "output": 5.0}},
}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
NUM_TOKENS = 6


def body(**fields: Any) -> dict[str, Any]:
    plain = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return chat_body(**({"model": "gpt-4o"} | plain | fields))


class Asked:
    """What the client saw of one request. usage: as the answer shows it; empty where the client left, after so many pieces"""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self.began_s, self._began = loop.unix_time(), loop.time()
        self.request_id = ""
        self.body: dict[str, Any] = {}
        self.seen_ms = 0.0

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.body.get("usage", {})
        return usage

    async def whole(self, client: httpx2.AsyncClient, replay_key: str = "") -> Asked:
        headers = {"authorization": f"Bearer {KEY}"} | ({"idempotency-key": replay_key} if replay_key else {})
        answer = await client.post(CHAT, json=body(), headers=headers)
        assert answer.status_code == 200, answer.text
        self.request_id, self.body = answer.headers["x-request-id"], answer.json()
        self.seen_ms = (self._loop.time() - self._began) * 1000
        return self

    async def left(self, port: int, num_pieces: int) -> Asked:
        async with dial(port) as (reader, writer):
            writer.write(post(CHAT, body(stream=True, max_tokens=200), f"authorization: Bearer {KEY}"))
            head = await reader.readuntil(b"\r\n\r\n")
            [self.request_id] = [line.partition(b": ")[2].decode() for line in head.split(b"\r\n") if line.startswith(b"x-request-id")]
            seen = 0
            while seen < num_pieces:
                line = await reader.readline()
                seen += b'"content":"' in line and b'"content":""' not in line
        self.seen_ms = (self._loop.time() - self._began) * 1000
        return self


async def test_every_field_says_what_its_request_saw(text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    written: list[UsageRecord] = []
    runner = {"step_seconds": STEP_MS / 1000, "digests": DIGESTS}
    async with virtual_gateway(text, pause_s=PAUSE_MS / 1000, runner=runner, state=str(tmp_path), **SITE) as (gateway, _):
        ledger = gateway.service.explanations.ledger
        assert ledger is not None
        monkeypatch.setattr(ledger, "write", written.append)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=connected(gateway)), base_url="http://localhost") as client:
            first = await Asked(loop).whole(client, "a")
            again = await Asked(loop).whole(client)
            await eventually(lambda: not gateway.service.stages.replays.claims)
            replayed = await Asked(loop).whole(client, "a")
        async with serving(gateway) as port:
            left = await Asked(loop).left(port, 8)
            await eventually(lambda: len(written) == 4)
    found = {record.request_id: msgspec.structs.asdict(record) for record in written}
    assert set(found) == {asked.request_id for asked in (first, again, replayed, left)}
    for asked in (first, again, replayed, left):
        check_common(found[asked.request_id], asked)
    check_whole(found[first.request_id], first, cached_tokens=0)
    cached_tokens = again.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached_tokens > 0
    check_whole(found[again.request_id], again, cached_tokens=cached_tokens)
    check_replayed(found[replayed.request_id])
    check_left(found[left.request_id], first)


def check_common(record: dict[str, Any], asked: Asked) -> None:
    """The fields that do not depend on how a request ended."""
    assert set(record) == set(UsageRecord.__struct_fields__)
    assert record["time_ms"] / 1000 == pytest.approx(asked.began_s, abs=0.001)
    assert record["total_latency_ms"] == pytest.approx(asked.seen_ms)
    wanted: dict[str, object] = {"tenant": "acme", "user": "ann", "tier": "gold", "model": "fox", "endpoint": "/v1/chat/completions"}
    wanted |= {"requested_model": "gpt-4o", "estimated_tokens": 0, "adapter_id": "", "prompt": None}
    assert {name: record[name] for name in wanted} == wanted
    assert record["key_id"]
    assert KEY not in record["key_id"]


def check_whole(record: dict[str, Any], asked: Asked, *, cached_tokens: int) -> None:
    usage = asked.usage
    wanted = {
        "version": asked.body["system_fingerprint"],
        "route": "r0",
        "outcome": "completed",
        "finish_reason": "length",
        "cache_tier": "prefix" if cached_tokens else "",
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": cached_tokens,
        "completion_tokens": NUM_TOKENS,
        "cost_nanos": 3000 * (usage["prompt_tokens"] - cached_tokens) + 1000 * cached_tokens + 5000 * NUM_TOKENS,
    }
    assert {name: record[name] for name in wanted} == wanted
    times = {
        "queue_ms": PAUSE_MS,
        "prefill_ms": STEP_MS,
        "decode_ms": (PAUSE_MS + STEP_MS) * (NUM_TOKENS - 1),
        "preempted_ms": 0.0,
        "stalled_ms": 0.0,
        "ttft_ms": PAUSE_MS + STEP_MS,
        "tpot_ms": PAUSE_MS + STEP_MS,
        "total_latency_ms": (PAUSE_MS + STEP_MS) * NUM_TOKENS,
    }
    assert {name: record[name] for name in times} == pytest.approx(times)


def check_replayed(record: dict[str, Any]) -> None:
    """An answer from a cache: no engine, no tokens, no money."""
    wanted: dict[str, object] = {"cache_tier": "idempotency", "outcome": "completed", "route": "", "prompt_tokens": 0, "cached_tokens": 0}
    wanted |= {"completion_tokens": 0, "cost_nanos": 0, "queue_ms": None, "prefill_ms": None}
    assert {name: record[name] for name in wanted} == wanted


def check_left(record: dict[str, Any], first: Asked) -> None:
    """Stages end with the sequence; the gateway is not told those of one that was cancelled."""
    assert (record["outcome"], record["finish_reason"], record["route"]) == ("cancelled", "", "r0")
    assert record["version"] == first.body["system_fingerprint"]
    assert record["prompt_tokens"] == first.usage["prompt_tokens"]
    assert 8 <= record["completion_tokens"] < 20
    uncached = record["prompt_tokens"] - record["cached_tokens"]
    assert record["cost_nanos"] == 3000 * uncached + 1000 * record["cached_tokens"] + 5000 * record["completion_tokens"]
    assert (record["queue_ms"], record["ttft_ms"]) == pytest.approx((PAUSE_MS, PAUSE_MS + STEP_MS))
    after_first_ms = record["total_latency_ms"] - record["ttft_ms"]
    least_ms, most_ms = PAUSE_MS + STEP_MS, after_first_ms / (record["completion_tokens"] - 2)  # one may come after the last that was read
    assert least_ms - 0.01 <= record["tpot_ms"] <= most_ms + 0.01
    assert [record[name] for name in ("prefill_ms", "decode_ms", "preempted_ms", "stalled_ms")] == [None] * 4
