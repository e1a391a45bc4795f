"""Every field of a usage record, beside what its client saw: whole answers, a stream that its client left, and an answer from a cache.

Real processes: a gateway, and the engine's own loop, scheduler and cache over a runner whose steps take a known time.
"""

from __future__ import annotations

import json
import sqlite3
import time
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
from gateway_processes import PATIENCE_S, Site, site
from wire_kit import socket_dir

from headrace.gateway.ledger.record import UsageRecord
from headrace.gateway.ledger.usage_db import FILE

STEP_S = 0.02
FAKE = {"vocab_size": 345, "step_seconds": STEP_S, "digests": {"model": "0123456789abcdef"}}
KEY = "sk-fields-0123456789"
SITE: dict[str, Any] = {
    "api_keys": [{"key": KEY, "tenant": "acme", "user": "ann", "tier": "gold"}],
    "tiers": {"gold": {"class": "premium"}},
    "prices": {"fox": {"input": 3.0, "cached_input": 1.0, "output": 5.0}},
}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
NUM_TOKENS = 6


def body(**fields: Any) -> dict[str, Any]:
    plain = {"model": "fox", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return plain | fields


class Asked:
    """What the client saw of one request. usage: as the answer shows it; empty where the client left, after so many pieces"""

    def __init__(self, running: Site, fields: dict[str, Any], *, leave_after: int | None = None, replay_key: str = "") -> None:
        self.began_s = time.time()
        headers = {"authorization": f"Bearer {KEY}"} | ({"idempotency-key": replay_key} if replay_key else {})
        with running.client(headers=headers) as client:
            began = time.monotonic()
            with client.stream("POST", "/v1/chat/completions", json=body(**fields)) as answer:
                assert answer.status_code == 200
                self.request_id = answer.headers["x-request-id"]
                self.body = self._left(answer, leave_after) if leave_after is not None else json.loads(answer.read())
            self.seen_ms = (time.monotonic() - began) * 1000
        self.usage = self.body.get("usage", {})

    @staticmethod
    def _left(answer: httpx2.Response, num_pieces: int) -> dict[str, Any]:
        pieces = (line for line in answer.iter_lines() if '"content":"' in line and '"content":""' not in line)
        assert len(list(islice(pieces, num_pieces))) == num_pieces
        return {}


def records(state: Path, count: int) -> dict[str, dict[str, Any]]:
    """By request id, once there are as many."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        connection = sqlite3.connect(state / FILE)
        connection.row_factory = sqlite3.Row
        try:
            found = {row["request_id"]: dict(row) for row in connection.execute("SELECT * FROM usage")}
        finally:
            connection.close()
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_every_field_says_what_its_request_saw(text_folder: Path) -> None:
    with socket_dir() as folder:
        state = folder / "state"
        state.mkdir(mode=0o700)
        with site(folder, text_folder, FAKE, state=str(state), **SITE) as running:
            first = Asked(running, {}, replay_key="a")
            again = Asked(running, {})
            replayed = Asked(running, {}, replay_key="a")
            left = Asked(running, {"stream": True, "max_tokens": 200}, leave_after=8)
            found = records(state, 4)
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
    assert abs(record["time_ms"] / 1000 - asked.began_s) < 5
    after_last_byte_ms = 1000  # until the gateway's task ends, on a busy machine
    assert 0 < record["total_latency_ms"] <= asked.seen_ms + after_last_byte_ms
    wanted: dict[str, object] = {"tenant": "acme", "user": "ann", "tier": "gold", "model": "fox", "endpoint": "/v1/chat/completions"}
    wanted |= {"adapter_id": "", "prompt": None}
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
        "preempted_ms": 0.0,
    }
    assert {name: record[name] for name in wanted} == wanted
    assert STEP_S * 1000 <= record["ttft_ms"] <= record["total_latency_ms"]
    assert record["tpot_ms"] <= (record["total_latency_ms"] - record["ttft_ms"]) / (NUM_TOKENS - 1) + 0.01
    last_token_ms = record["ttft_ms"] + record["tpot_ms"] * (NUM_TOKENS - 1)  # a gateway that reads late makes the first too late alone
    assert last_token_ms >= STEP_S * 1000 * NUM_TOKENS * 0.9
    assert 0 <= record["queue_ms"] <= record["ttft_ms"]
    assert record["prefill_ms"] >= STEP_S * 1000 * 0.9
    assert record["decode_ms"] >= STEP_S * 1000 * (NUM_TOKENS - 1) * 0.9
    stages = sum(record[name] for name in ("queue_ms", "prefill_ms", "decode_ms", "preempted_ms", "stalled_ms"))
    assert stages <= record["total_latency_ms"], "the stages are within the request's time"


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
    assert 8 <= record["completion_tokens"] < 200
    uncached = record["prompt_tokens"] - record["cached_tokens"]
    assert record["cost_nanos"] == 3000 * uncached + 1000 * record["cached_tokens"] + 5000 * record["completion_tokens"]
    assert 0 < record["queue_ms"] <= record["ttft_ms"] < record["total_latency_ms"]
    assert record["tpot_ms"] <= 1.7 * (record["total_latency_ms"] - record["ttft_ms"]) / record["completion_tokens"]
    last_token_ms = record["ttft_ms"] + record["tpot_ms"] * (record["completion_tokens"] - 1)
    assert last_token_ms >= STEP_S * 1000 * record["completion_tokens"] * 0.7, "some of the tokens came after the last piece"
    assert [record[name] for name in ("prefill_ms", "decode_ms", "preempted_ms", "stalled_ms")] == [None] * 4
