"""Tests engines, or a rank of one, killed and stopped while streams run, in real processes: every stream ends, with the answer it has
without a fault.

The storm over thousands of streams and every kind of request is `bench/storms/failover.py`. How long streams wait is asserted on virtual
time in tests/gateway.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from http_kit import COMPLETIONS, Answer, Connection, request_bytes
from server_kit import PATIENCE_S, Server

from headrace.cli.admin.client import AdminClient

pytestmark = pytest.mark.process

COUNT = 500
NUM_STREAMS = 3
BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "n": 2, "stop": ["qq", "zz"]},
    {"temperature": 0.9, "logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1},
)
Begun = tuple[Answer, AsyncIterator[str]]
"""A stream that has begun: what came of it, and what comes."""


async def begin_all(server: Server, stack: AsyncExitStack) -> list[Begun]:
    async def begin(number: int) -> Begun:
        fields = {"model": "pair", "prompt": f"Story {number}:", "max_tokens": COUNT, "ignore_eos": True, "seed": number, "stream": True}
        connection = await stack.enter_async_context(Connection(server.port))
        await connection.send(request_bytes("POST", COMPLETIONS, {**fields, **BODIES[number % len(BODIES)]}))
        answer, events = Answer((await connection.head())[0]), connection.events()
        answer.take(await anext(events))
        return answer, events

    return list(await asyncio.gather(*(begin(number) for number in range(NUM_STREAMS))))


async def end_all(streams: list[Begun]) -> list[object]:
    async def end(answer: Answer, events: AsyncIterator[str]) -> object:
        async for event in events:
            answer.take(event)
        assert answer.error is None
        assert answer.is_done
        return dict(answer.text), dict(answer.finish)

    return list(await asyncio.gather(*(end(*each) for each in streams)))


async def open_streams(server: Server) -> list[int]:
    """How many streams each replica has, as the gateway sees it."""
    (model,) = (await asyncio.to_thread(AdminClient(server.run_dir).status))["models"]
    return [replica["open"] for replica in model["replicas"]]


async def begin_and_halt(server: Server, stack: AsyncExitStack, engines: list[int]) -> tuple[list[Begun], int]:
    """All streams begun, both engines stopped before any of them ended, and which has most: begun anew where one was faster."""
    while True:
        streams = await begin_all(server, stack)
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        num_open = await open_streams(server)
        if sum(num_open) == NUM_STREAMS:
            return streams, num_open.index(max(num_open))
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
        await end_all(streams)


async def read_unbroken(server: Server) -> list[object]:
    async with AsyncExitStack() as stack:
        return await end_all(await begin_all(server, stack))


@pytest.fixture(scope="module")
def unbroken(pair: Server) -> list[object]:
    return asyncio.run(read_unbroken(pair))


@pytest.fixture(scope="module")
def unbroken_of_ranks(ranked_pair: Server) -> list[object]:
    return asyncio.run(read_unbroken(ranked_pair))


async def check_fault(server: Server, fault: signal.Signals, rank: str, unbroken: list[object]) -> bool:
    """Both engines stand still until it is known which of them has most streams; the fault is that one's. Returns whether it was replaced.

    rank: "" or ".r1"
    """
    resumed = server.metric("headrace_sequences_resumed_total")
    before = server.pids()
    engines = [before[name] for name in ("e0", "e1")]
    async with AsyncExitStack() as stack:
        try:
            streams, bad = await begin_and_halt(server, stack, engines)
            os.kill(before[f"e{bad}{rank}"], fault)
            for pid in engines:
                if pid != before[f"e{bad}{rank}"]:
                    with suppress(ProcessLookupError):  # the ranks of the killed one are killed
                        os.kill(pid, signal.SIGCONT)
            assert await end_all(streams) == unbroken
            if rank:
                await server.eventually(lambda: not {before[f"e{bad}"], before[f"e{bad}{rank}"]} & {*server.pids().values()})
        finally:
            for pid in engines:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
    assert server.metric("headrace_sequences_resumed_total") > resumed
    await server.eventually(lambda: server.get("/ready?strict")[0] == 200)
    await server.eventually(lambda: all(server.load(name).is_idle for name in ("e0", "e1")))
    assert server.pids().keys() == before.keys()
    return server.pids()[f"e{bad}"] != engines[bad]


FAULTS = pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])


@FAULTS
async def test_streams_of_an_engine_that_is_killed_or_hangs_are_the_unbroken_ones(
    pair: Server, unbroken: list[object], fault: signal.Signals
) -> None:
    async with asyncio.timeout(4 * PATIENCE_S):
        assert await check_fault(pair, fault, "", unbroken) is (fault is signal.SIGKILL)


@FAULTS
async def test_streams_of_a_replica_one_of_whose_ranks_is_killed_or_hangs_are_the_unbroken_ones(
    ranked_pair: Server, unbroken_of_ranks: list[object], fault: signal.Signals
) -> None:
    """The replica's other rank is ended with it, and both are started again."""
    async with asyncio.timeout(4 * PATIENCE_S):
        assert await check_fault(ranked_pair, fault, ".r1", unbroken_of_ranks)
