"""Tests the memory of a gateway whose clients ask for much and read nothing: bounded while they stay, given back once they left.

By the gateway's own counters on virtual time; and once by the resident memory of a process, in a small storm of
`bench/storms/memory_unread.py` on the real wire, since the counters cannot tell columns from objects that take ten times as much.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from figures import Figure
from gateway_kit import MODEL, TestBench, dial, open_bench, post, serving
from gateway_processes import Site, site
from wire_kit import socket_dir

from headrace.text.folder import TextModel

NUM_CLIENTS = 24
PATHS = ("/v1/completions", "/v1/chat/completions")


def bodies(num_prompt_tokens: int, **choices: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """For each of PATHS: many choices that echo one prompt's log-probabilities, and a long answer with those of its own tokens."""
    prompt = [40 + i % 50 for i in range(num_prompt_tokens)]
    echo = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 20, "n": 24, "max_tokens": 8, "stream": True}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    return echo, {**chat, **choices}


# -- by the gateway's counters -----------------------------------------------------------------------------------------------------


def counted_bytes(bench: TestBench) -> int:
    """Of answers: what requests hold, and what waits for their clients."""
    service = bench.gateway.service
    service.memory.check()
    return service.memory.answers.held + sum(stream.waiting_bytes for stream in service.pipeline.watch.writing)


@pytest.mark.loop
@pytest.mark.parametrize(("path", "body"), list(zip(PATHS, bodies(480, n=16, max_tokens=16), strict=True)))
async def test_what_unread_answers_hold_and_wait_for_is_bounded_and_given_back(text: TextModel, path: str, body: dict[str, Any]) -> None:
    """There is room for a third of the clients."""
    alone = await peak_alone(text, path, body)
    limit = NUM_CLIENTS // 3 * alone
    async with open_bench(text, limits={"max_answer_bytes": limit}) as bench, serving(bench.gateway) as port:
        async with AsyncExitStack() as clients:
            for _ in range(NUM_CLIENTS):
                _, writer = await clients.enter_async_context(dial(port, limit=1024))
                writer.write(post(path, body))
            peak = 0
            for _ in range(40):
                await asyncio.sleep(0.25)
                peak = max(peak, counted_bytes(bench))
            assert limit // 2 < peak <= limit, "or nothing was let in, and a storm of refusals shows nothing"
            assert bench.gateway.service.memory.answers.num_refused > 0
        await asyncio.sleep(1)
        assert counted_bytes(bench) == 0
        assert bench.gateway.service.open_requests.num_open == 0


async def peak_alone(text: TextModel, path: str, body: dict[str, Any]) -> int:
    """Bytes that one client that reads nothing takes."""
    async with open_bench(text) as bench, serving(bench.gateway) as port, dial(port, limit=1024) as (_, writer):
        writer.write(post(path, body))
        await asyncio.sleep(5)
        return counted_bytes(bench)


# -- by the process's memory -------------------------------------------------------------------------------------------------------

STORM_S, CALM_S, GIVEN_BACK_S = 6.0, 1.5, 10.0
"""A storm lasts STORM_S at most, and ends when its peak, once above MIN_OVER_IDLE, has not risen for CALM_S. Memory is given back within
GIVEN_BACK_S."""
MIN_OVER_IDLE, MAX_OVER_IDLE, MAX_KEPT = 4 << 20, 17_300_000, 5_300_000
"""Bytes; the last two fail beyond three times as many. Log-probabilities as objects: 174 and 173 million for echoed prompts, 60 to 78 and
48 to 86 for choices. As columns: 19 and 5, 16 to 26 and 5."""


@pytest.fixture
def quiet_site(text_folder: Path) -> Iterator[Site]:
    engine = {"max_model_len": 2048, "num_kv_blocks": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    with socket_dir() as folder, site(folder, text_folder, {"vocab_size": 345, "step_seconds": 0.002}, engine=engine) as made:
        yield made


@pytest.mark.process
@pytest.mark.timing
def test_storms_of_unread_log_probabilities_take_little_memory_and_give_it_back(quiet_site: Site, figure: Figure) -> None:
    pid, port = quiet_site.gateway.process.pid, int(quiet_site.url.rsplit(":")[-1])
    for path, body in zip(PATHS, bodies(1500, n=64, max_tokens=48), strict=True):
        with quiet_site.client() as client:
            assert client.post(path, json={**body, "n": 2}).status_code == 200  # what is loaded and made once
        time.sleep(1.5)
        idle = resident_bytes(pid)
        with ExitStack() as stack:
            for _ in range(NUM_CLIENTS):
                unread(stack, port, post(path, body))
            peak = peak_bytes(pid, idle)
        assert peak - idle > MIN_OVER_IDLE, "nothing was let in: a storm of refusals shows nothing"
        figure(f"{path} peak", peak - idle, MAX_OVER_IDLE, "bytes")
        given_back_by = time.monotonic() + GIVEN_BACK_S
        while (kept := resident_bytes(pid)) - idle >= MAX_KEPT and time.monotonic() < given_back_by:
            time.sleep(0.1)
        figure(f"{path} kept", kept - idle, MAX_KEPT, "bytes")


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024


def peak_bytes(pid: int, idle: int) -> int:
    """The most that the process holds during a storm. idle: what it held before"""
    peak = idle
    began = risen = time.monotonic()
    while (now := time.monotonic()) < began + STORM_S and (peak - idle <= MIN_OVER_IDLE or now < risen + CALM_S):
        if (held := resident_bytes(pid)) > peak:
            peak, risen = held, now
        time.sleep(0.02)
    return peak


def unread(stack: ExitStack, port: int, request: bytes) -> None:
    """A client that asks and never reads; its kernel takes a few kilobytes for it."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request)
