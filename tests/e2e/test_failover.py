"""Engines killed and stopped while streams run, in real processes: every stream ends, with the answer it has without a fault.

The storm over thousands of streams and every kind of request is `bench/storms/failover.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from http_kit import COMPLETIONS, Answer, stream
from server_kit import KEY, EngineLoad, Server, serving

from headrace.bundled import bundled_path

COUNT = 1200
BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "n": 2, "stop": ["qq", "zz"]},
    {"temperature": 0.9, "logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1},
)


@pytest.fixture(scope="module")
def two_engines() -> Iterator[Server]:
    folder = bundled_path("headrace-tiny")
    assert folder is not None
    engine = {"model": str(folder), "dtype": "float32", "num_threads": 1, "max_num_seqs": 16, "num_kv_blocks": 400, "deterministic": True}
    models = [{"name": "tiny", "replicas": 2, "engine": engine}]
    config = {"models": models, "gateway": {"api_keys": [{"key": KEY}], "request_log": "off"}}
    with serving(config) as server:
        yield server


def ask(server: Server, number: int) -> Any:
    fields = {"model": "tiny", "prompt": f"Story {number}:", "max_tokens": COUNT, "ignore_eos": True, "seed": number}
    return stream(server.port, COMPLETIONS, {**fields, **BODIES[number % len(BODIES)]}, key=KEY)


def seen(answer: Answer) -> object:
    assert answer.error is None
    assert answer.is_done
    return dict(answer.text), dict(answer.finish)


def loads(server: Server) -> dict[str, EngineLoad]:
    """Of the engines that answer."""
    found = {}
    for name in ("e0", "e1"):
        with suppress(grpc.RpcError):
            found[name] = server.load(name)
    return found


async def running(server: Server) -> str:
    """Name of an engine that has work."""
    busy: list[str] = []

    def find() -> bool:
        busy[:] = [name for name, load in loads(server).items() if load.num_running > 1]
        return bool(busy)

    await server.eventually(find)
    return busy[0]


@pytest.fixture(scope="module")
def unbroken(two_engines: Server) -> list[object]:
    """One after the other."""
    return [seen(asyncio.run(ask(two_engines, number))) for number in range(6)]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_streams_of_an_engine_that_dies_or_hangs_are_the_unbroken_ones(
    two_engines: Server, unbroken: list[object], fault: signal.Signals
) -> None:
    server = two_engines
    resumed = server.metric("headrace_sequences_resumed_total")
    tasks = [asyncio.create_task(ask(server, number)) for number in range(6)]
    name = await running(server)
    pid = server.pids()[name]
    os.kill(pid, fault)
    try:
        answers = [seen(answer) for answer in await asyncio.gather(*tasks)]
    finally:
        if fault is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    assert answers == unbroken
    assert server.metric("headrace_sequences_resumed_total") > resumed
    await server.eventually(lambda: [load.is_idle for load in loads(server).values()] == [True, True], 60)
    await server.eventually(lambda: server.get("/ready?strict")[0] == 200)
