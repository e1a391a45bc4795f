"""Engines killed and stopped while streams run, in real processes: every stream ends, with the answer it has without a fault.

The storm over thousands of streams and every kind of request is `bench/storms/failover.py`. How long streams wait is asserted on virtual
time in tests/gateway.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import grpc
import pytest
from http_kit import COMPLETIONS, Answer, stream
from server_kit import EngineLoad, Server

pytestmark = pytest.mark.process

COUNT = 300
NUM_STREAMS = 3
BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "n": 2, "stop": ["qq", "zz"]},
    {"temperature": 0.9, "logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1},
)


def ask(server: Server, number: int) -> Any:
    fields = {"model": "pair", "prompt": f"Story {number}:", "max_tokens": COUNT, "ignore_eos": True, "seed": number}
    return stream(server.port, COMPLETIONS, {**fields, **BODIES[number % len(BODIES)]})


async def answers_of(server: Server) -> list[object]:
    return [seen(answer) for answer in await asyncio.gather(*(ask(server, number) for number in range(NUM_STREAMS)))]


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


async def test_streams_of_an_engine_that_is_killed_or_hangs_are_the_unbroken_ones(pair: Server) -> None:
    unbroken = await answers_of(pair)
    for fault in (signal.SIGKILL, signal.SIGSTOP):
        resumed = pair.metric("headrace_sequences_resumed_total")
        broken = asyncio.create_task(answers_of(pair))
        name = await running(pair)
        pid = pair.pids()[name]
        os.kill(pid, fault)
        try:
            assert await broken == unbroken
        finally:
            if fault is signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
        assert pair.metric("headrace_sequences_resumed_total") > resumed, fault
        await pair.eventually(lambda: [load.is_idle for load in loads(pair).values()] == [True, True])
        await pair.eventually(lambda: pair.get("/ready?strict")[0] == 200)
        assert (pair.pids()[name] == pid) is (fault is signal.SIGSTOP)
