"""Tests a replica behind a link that is cut, in either direction or both, or that flaps: after two seconds it gets no request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from virtual_time import virtual_loop
from virtual_wire import MemoryLink, VirtualServed
from wire_kit import request

from bench.network_faults import Direction
from headrace.core.request import EngineRequest
from headrace.gateway.upstream.own.attempts import CallAttempts, PromptCall
from headrace.gateway.upstream.own.replica_health import Replica
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.policy.routing.choice import ReplicaId
from headrace.policy.routing.failures import REPLICA_LIMITS
from headrace.wire.client import ReplicaClient
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop

OPTIONS = FakeOptions(numerics={"weights": "ab"})
STEP_S = 0.02
NUM_TOKENS = 3
DEAD_AFTER_S = 2.0
FAULT_S = 4.0
PACE_S = 0.04
LOOK_S = 0.3
"""More than passes between two looks of the gateway at its replicas."""


class NotedClient(ReplicaClient):
    """submits: when each request was sent there"""

    submits: list[float]

    def submit(self, request: EngineRequest) -> ReplicaStream:
        stream = super().submit(request)
        self.submits.append(virtual_loop().time())
        return stream


@dataclass
class TwoEngines:
    """A pool over two engines, the first one behind `link`."""

    pool: ReplicaPool
    link: MemoryLink
    bad: NotedClient

    async def ask(self, number: int) -> float:
        """One request, to its end. Returns the seconds it took."""
        whole = request(f"r{number}", max_tokens=NUM_TOKENS)
        call = PromptCall(request=whole, max_output_tokens=NUM_TOKENS)
        attempts = CallAttempts(self.pool, call)
        began = virtual_loop().time()
        try:
            while updates := await attempts.batch():
                for update in updates:
                    attempts.keep(update.index, update.token_ids)
                    if update.finish is not None:
                        attempts.end(update.index, update.finish)
        finally:
            await attempts.close()
        assert list(attempts.output_ids[0]) == fake_answer(whole, 0, NUM_TOKENS, OPTIONS), "nothing lost, repeated or changed"
        return virtual_loop().time() - began

    async def ask_for(self, seconds: float) -> list[float]:
        """A request every PACE_S. Returns how long each took."""
        began, asked = virtual_loop().time(), list[asyncio.Task[float]]()
        while virtual_loop().time() - began < seconds:
            asked.append(asyncio.create_task(self.ask(random.getrandbits(48))))
            await asyncio.sleep(PACE_S)
        return await asyncio.gather(*asked)


@asynccontextmanager
async def two_engines() -> AsyncIterator[TwoEngines]:
    async with AsyncExitStack() as stack:
        engines = [VirtualServed(step_s=STEP_S, options=OPTIONS) for _ in range(2)]
        for engine in engines:
            stack.callback(asyncio.create_task(engine.run()).cancel)
        clients = [
            NotedClient(f"127.0.0.1:{number}", name=f"r{number}", token="0" * 20, clock=engine.loop.time)
            for number, engine in enumerate(engines, 1)
        ]
        for client, engine in zip(clients, engines, strict=True):
            client.submits, client._dialer = [], engine.link  # type: ignore[assignment]
        replicas = [Replica(ReplicaId(f"r{number}"), client) for number, client in enumerate(clients)]
        pool = ReplicaPool("fake", replicas, random=random.Random(3), failover_s=20.0, clock=virtual_loop().time)
        await stack.enter_async_context(pool)
        for client in clients:
            await client.wait_connected(10.0)
        await asyncio.sleep(0.3)
        both = TwoEngines(pool, engines[0].link, clients[0])
        await both.ask_for(0.6)
        assert both.bad.submits, "both are used while all is well"
        yield both


async def cut(both: TwoEngines, *directions: Direction) -> None:
    for direction in directions:
        both.link.cut(direction)
    began = virtual_loop().time()
    took = await both.ask_for(FAULT_S)
    late = [at - began for at in both.bad.submits if at > began + DEAD_AFTER_S]
    assert not late, f"requests went to a dead replica {late} s after it died"
    assert max(took) < DEAD_AFTER_S + LOOK_S, "what was sent there before that moved"
    both.link.heal()


async def flap(both: TwoEngines) -> None:
    """It says hello, lives for a moment and is gone, again and again: its circuit keeps requests away."""
    asking = asyncio.create_task(both.ask_for(FAULT_S))
    before = len(both.bad.submits)
    while not asking.done():
        both.link.refuses = True
        both.link.reset()
        await asyncio.sleep(0.1)
        both.link.refuses = False
        both.link.cut(Direction.TO_CLIENT)  # connections are made, and nothing is answered on them
        await asyncio.sleep(0.2)
        both.link.heal()
        await asyncio.sleep(0.05)
    await asking
    lost = len(both.bad.submits) - before
    assert lost <= 30, "half of the requests would be 50"


FAULTS: dict[str, Callable[[TwoEngines], Awaitable[None]]] = {
    "cut": lambda both: cut(both, *Direction),
    "cut to the engine": lambda both: cut(both, Direction.TO_SERVER),
    "cut to the gateway": lambda both: cut(both, Direction.TO_CLIENT),
    "flapping": flap,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_dead_replica_gets_no_request_beyond_two_seconds_and_comes_back(fault: str) -> None:
    async with two_engines() as both:
        await FAULTS[fault](both)
        before = len(both.bad.submits)
        async with asyncio.timeout(REPLICA_LIMITS.cooldown_s + 1.0):
            while len(both.bad.submits) == before:
                await both.ask_for(0.2)


async def test_a_replica_that_loses_what_it_is_sent_gets_three_requests() -> None:
    """Each is lost before its first token, with its connection; each ends whole at the other replica."""
    async with two_engines() as both:
        submit = both.bad.submit

        def submit_and_reset(request: EngineRequest) -> ReplicaStream:
            stream = submit(request)
            asyncio.get_running_loop().call_soon(both.link.reset)
            return stream

        both.bad.submit = submit_and_reset  # type: ignore[method-assign]
        before = len(both.bad.submits)
        took = await both.ask_for(REPLICA_LIMITS.cooldown_s - 1.0)
        assert len(both.bad.submits) - before == REPLICA_LIMITS.max_failures
        assert max(took) < 0.5
