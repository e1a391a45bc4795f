"""Runs many streams at once through the real gateway, over sockets on both sides; the engine is real but for its model, which is paced.

Every stream has its own seed and must get exactly its tokens. The slow test also reports what a chunk and a stream cost.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import pytest
from http_kit import COMPLETIONS, Answer, stream
from plain_loop import Checkpoint
from results import save_result
from server_kit import CROWD, CROWD_ENGINE, MEASURE, Server, serving_fake

from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.lab.fake_runner import FakeOptions, fake_answer

pytestmark = pytest.mark.process

PROMPT = (5, 6, 7, 8)
OPTIONS = FakeOptions(**CROWD)
RAMP_S = 3.0
SAMPLE_S = 0.25


@dataclass(slots=True)
class Costs:
    """What the gateway's process spent. lag: how late its event loop ran a timer due every 10 ms.

    kib_per_stream  growth of memory that belongs to this process alone, at its peak, per stream
    """

    num_streams: int
    tokens_per_stream: int
    step_seconds: float
    num_dropped: int = 0
    num_chunks: int = 0
    seconds: float = 0.0
    gateway_cpu_seconds: float = 0.0
    cpu_us_per_chunk: float = 0.0
    gateway_cpu_share: float = 0.0
    kib_per_stream: float = 0.0
    lag_ms: dict[str, float] = field(default_factory=dict)


def expected_text(checkpoint: Checkpoint, seed: int, num_tokens: int) -> str:
    """By the fake model's oracle, spelled by the tokenizer's own library."""
    request = EngineRequest(request_id=RequestId("x"), prompt_ids=PROMPT, params=SamplingParams(seed=seed))
    return checkpoint.plain.text(fake_answer(request, 0, num_tokens, OPTIONS))


async def run_streams(server: Server, count: int, num_tokens: int, *, ramp_s: float) -> list[Answer | Exception]:
    async def one(seed: int) -> Answer | Exception:
        await asyncio.sleep(ramp_s * seed / count)
        body = {"model": "fake", "prompt": list(PROMPT), "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
        try:
            return await stream(server.port, COMPLETIONS, {**body, "stream_options": {"include_usage": True}}, patience_s=300.0)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            return error

    return list(await asyncio.gather(*(one(seed) for seed in range(count))))


def dropped(checkpoint: Checkpoint, answers: list[Answer | Exception], num_tokens: int) -> list[str]:
    wrong = []
    for seed, answer in enumerate(answers):
        if isinstance(answer, Exception):
            wrong.append(f"{seed}: {answer!r}")
        elif not answer.is_done or answer.error or answer.usage.get("completion_tokens") != num_tokens:
            wrong.append(f"{seed}: status {answer.status}, done {answer.is_done}, {answer.error}, {answer.usage}")
        elif answer.text[0] != expected_text(checkpoint, seed, num_tokens):
            wrong.append(f"{seed}: other tokens")
    return wrong


@pytest.fixture
def paced(random_folder: Path) -> Iterator[Server]:
    with serving_fake(random_folder, fake={**CROWD, "step_seconds": 0.5}, engine=CROWD_ENGINE) as server:
        yield server


async def test_100_streams_at_once_are_all_whole(fake_server: Server, random_checkpoint: Checkpoint) -> None:
    answers = await run_streams(fake_server, 100, 30, ramp_s=0.3)
    assert not (wrong := dropped(random_checkpoint, answers, 30)), "\n".join(wrong[:10])
    await fake_server.eventually(lambda: fake_server.load().is_idle)


class Watch:
    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.peak_bytes = 0

    async def run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(lambda: self._process.memory_full_info().uss))
            await asyncio.sleep(SAMPLE_S)


@pytest.mark.slow
async def test_1000_streams_at_once_are_all_whole_and_what_they_cost(paced: Server, random_checkpoint: Checkpoint) -> None:
    costs = Costs(num_streams=1000, tokens_per_stream=60, step_seconds=0.5)
    await run_streams(paced, 20, 4, ramp_s=0.1)
    gateway = psutil.Process(paced.pids()["gateway"])
    os.kill(gateway.pid, MEASURE)
    idle_bytes, cpu = gateway.memory_full_info().uss, gateway.cpu_times()
    watch = Watch(gateway)
    watching = asyncio.create_task(watch.run())
    began = time.monotonic()
    answers = await run_streams(paced, costs.num_streams, costs.tokens_per_stream, ramp_s=RAMP_S)
    costs.seconds = time.monotonic() - began
    spent = gateway.cpu_times()
    watching.cancel()
    lags = sorted(1000 * lag for lag in paced.probe(gateway.pid)["lags_s"])
    wrong = dropped(random_checkpoint, answers, costs.tokens_per_stream)
    costs.num_dropped = len(wrong)
    costs.num_chunks = sum(answer.num_chunks for answer in answers if isinstance(answer, Answer))
    costs.gateway_cpu_seconds = spent.user + spent.system - cpu.user - cpu.system
    costs.cpu_us_per_chunk = 1e6 * costs.gateway_cpu_seconds / max(costs.num_chunks, 1)
    costs.gateway_cpu_share = costs.gateway_cpu_seconds / costs.seconds
    costs.kib_per_stream = (watch.peak_bytes - idle_bytes) / costs.num_streams / 1024
    costs.lag_ms = {name: lags[min(int(share * len(lags)), len(lags) - 1)] for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    save_result("streams-1000", asdict(costs))
    assert not wrong, "\n".join(wrong[:10])
    await paced.eventually(lambda: paced.load().is_idle)
