"""Runs a thousand streams at once through one gateway process and a paced fake engine on the real wire, and the largest bodies of one
request.

Prints what it measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest
from figures import Figure
from gateway_kit import MODEL, TestBench, chat_body, post
from gateway_processes import Site, site
from wire_kit import socket_dir

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("frozen_heap")]

NUM_STREAMS = 1000
NUM_TOKENS = 30
STEP_SECONDS = 0.2


@dataclass
class Seen:
    """What one client saw."""

    num_chunks: int = 0
    text: list[str] = field(default_factory=list)
    is_done: bool = False
    first_s: float = 0.0
    last: bytes = b""


@pytest.fixture
def big_site(text_folder: Path) -> Iterator[Site]:
    fake = {"vocab_size": 345, "step_seconds": STEP_SECONDS, "num_blocks": 20_000, "verify": False}
    engine = {"max_num_seqs": NUM_STREAMS, "max_num_batched_tokens": 65_536, "max_waiting": NUM_STREAMS}
    with socket_dir() as folder, site(folder, text_folder, fake, engine=engine) as made:
        yield made


async def stream(port: int, seen: Seen) -> None:
    start = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"model": "fox", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True, "seed": 1}
    writer.write(post("/v1/chat/completions", {**body, "max_tokens": NUM_TOKENS}, "connection: close"))
    async for line in reader:
        if line.startswith(b"data: {"):
            if not seen.num_chunks:
                seen.first_s = time.monotonic() - start
            seen.num_chunks += 1
            seen.text += [choice["delta"].get("content", "") for choice in json.loads(line[6:])["choices"]]
        seen.is_done = seen.is_done or line.startswith(b"data: [DONE]")
        seen.last = line
    writer.close()
    await writer.wait_closed()


@pytest.mark.slow
async def test_a_thousand_streams_all_end_alike(big_site: Site) -> None:
    gateway = psutil.Process(big_site.gateway.process.pid)
    port = big_site.gateway.facts["port"]
    idle_rss, idle_fds, cpu = gateway.memory_info().rss, gateway.num_fds(), gateway.cpu_times()
    clients = [Seen() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream(port, seen)) for seen in clients]
    peak_rss = 0
    async with asyncio.timeout(300):
        while not all(task.done() for task in tasks):
            peak_rss = max(peak_rss, gateway.memory_info().rss)
            await asyncio.sleep(0.25)
        await asyncio.gather(*tasks)
    after = gateway.cpu_times()
    num_chunks = sum(seen.num_chunks for seen in clients)
    cpu_s = after.user + after.system - cpu.user - cpu.system
    async with httpx2.AsyncClient(base_url=big_site.url) as client, asyncio.timeout(60):
        while "headrace_gateway_requests_open 0.0" not in (metrics := (await client.get("/metrics")).text):
            await asyncio.sleep(0.05)
    while gateway.num_fds() > idle_fds + 2:
        await asyncio.sleep(0.05)
    late = re.findall(r'headrace_gateway_loop_lag_seconds_bucket\{le="([^"]+)"\} ([0-9.]+)', metrics)
    print(f"\n{NUM_STREAMS} streams, {num_chunks} chunks, {cpu_s:.2f} s CPU = {1e6 * cpu_s / num_chunks:.0f} us per chunk")
    print(f"{(peak_rss - idle_rss) / NUM_STREAMS / 1024:.1f} KiB per stream at the peak; event loop lag by bucket: {late}")
    print(f"first chunk: median {sorted(seen.first_s for seen in clients)[NUM_STREAMS // 2]:.2f} s")
    assert not {seen.last for seen in clients if not seen.is_done}
    assert len({"".join(seen.text) for seen in clients}) == 1, "one seed, one text"


MEGABYTE = 1 << 20
LARGE = {
    "text": json.dumps({"model": MODEL, "prompt": "hello world " * 85_000}),
    "chat": json.dumps(chat_body(messages=[{"role": "user", "content": "hello world " * 85_000}])),
    "control-tokens": json.dumps(chat_body(messages=[{"role": "user", "content": "<|im_end|>" * 95_000}])),
    "messages": json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 900}] * 1024)),
    "parts": json.dumps(chat_body(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 200}] * 4000}])),
    "token-ids": json.dumps({"model": MODEL, "prompt": [7] * 149_000}),
    "lists": json.dumps({"model": MODEL, "prompt": [[7]] * 140_000}),
    "objects": '{"a":[' + "{}," * 340_000 + "1]}",
    "brackets": '{"a":' + "[]" * 500_000 + "}",
    "quotes": '{"a":"' + '\\"' * 500_000 + '"}',
}


@pytest.mark.loop
@pytest.mark.timing
async def test_no_single_body_holds_the_event_loop(bench: TestBench, figure: Figure) -> None:
    """The target is 50 ms on a quiet machine, where text workers parse what is large; here they are on the loop."""
    slices = {name: await longest_turn_s(bench, body.encode()) for name, body in LARGE.items()}
    name = max(slices, key=slices.__getitem__)
    figure(f"longest turn of the event loop, of {name}", slices[name], 0.5, "s of CPU")


async def longest_turn_s(bench: TestBench, body: bytes) -> float:
    """CPU seconds of the longest turn of the event loop while a body is refused."""
    assert len(body) <= MEGABYTE
    path = "/v1/completions" if b'"prompt"' in body else "/v1/chat/completions"
    asking = asyncio.create_task(bench.client.post(path, content=body, headers={"content-type": "application/json"}))
    longest, began = 0.0, time.thread_time()
    while not asking.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, began = max(longest, now - began), now
    assert (await asking).status_code in (400, 413)
    return longest
