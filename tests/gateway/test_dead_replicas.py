"""A replica behind a link that is cut, in either direction or both, or that flaps: it gets no request beyond two seconds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from lateness import machine_lateness
from wire_kit import Served, request

from headrace.core.request import EngineRequest
from headrace.engine.config import EngineConfig
from headrace.gateway.upstream.attempts import CallAttempts
from headrace.gateway.upstream.replicas import Replica, ReplicaPool
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.lab.network_faults import CUT, HEALTHY, Direction, FaultyLink
from headrace.policy.routing.choice import ReplicaId
from headrace.policy.routing.ejection import REPLICA_LIMITS
from headrace.wire.client import ReplicaClient
from headrace.wire.stream import ReplicaStream

TOKEN = "0123456789abcdef-of-tests"
PACED = FakeOptions(step_seconds=0.005, numerics={"weights": "ab"})
NUM_TOKENS = 3
DEAD_AFTER_S = 2.0
FAULT_S = 4.0
PACE_S = 0.04


class NotedClient(ReplicaClient):
    """submits: when each request was sent there"""

    submits: list[float]

    def submit(self, request: EngineRequest) -> ReplicaStream:
        stream = super().submit(request)
        self.submits.append(time.monotonic())
        return stream


@dataclass
class TwoEngines:
    """A pool over two engines, the first one behind `link`."""

    pool: ReplicaPool
    link: FaultyLink
    bad: NotedClient
    good: NotedClient

    async def ask(self, number: int) -> float:
        """One request, to its end. Returns the seconds it took."""
        whole = request(f"r{number}", max_tokens=NUM_TOKENS)
        attempts = CallAttempts(self.pool, lambda epoch: replace(whole, epoch=epoch), num_sequences=1, max_output_tokens=NUM_TOKENS)
        began = time.monotonic()
        try:
            while updates := await attempts.batch():
                for update in updates:
                    attempts.keep(update.index, update.token_ids)
                    if update.finish is not None:
                        attempts.end(update.index)
        finally:
            await attempts.close()
        assert list(attempts.output_ids[0]) == fake_answer(whole, 0, NUM_TOKENS, PACED), "nothing lost, repeated or changed"
        return time.monotonic() - began

    async def ask_for(self, seconds: float) -> list[float]:
        """A request every PACE_S. Returns how long each took."""
        began, asked = time.monotonic(), list[asyncio.Task[float]]()
        while time.monotonic() - began < seconds:
            asked.append(asyncio.create_task(self.ask(random.getrandbits(48))))
            await asyncio.sleep(PACE_S)
        return await asyncio.gather(*asked)


@asynccontextmanager
async def two_engines() -> AsyncIterator[TwoEngines]:
    async with AsyncExitStack() as stack:
        engines = [Served(PACED, EngineConfig(model="fake"), "127.0.0.1:0", token=TOKEN) for _ in range(2)]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        ports = [int(engine.service.address.rpartition(":")[2]) for engine in engines]
        link = await stack.enter_async_context(FaultyLink("127.0.0.1", ports[0]))
        clients = [NotedClient(f"127.0.0.1:{port}", name=f"r{port}", token=TOKEN) for port in (link.port, ports[1])]
        replicas = [Replica(ReplicaId(f"r{number}"), client) for number, client in enumerate(clients)]
        for client in clients:
            client.submits = []
        pool = ReplicaPool("fake", replicas, random=random.Random(3), failover_s=20.0)
        await stack.enter_async_context(pool)
        for client in clients:
            await client.wait_connected(10.0)
        await asyncio.sleep(0.3)
        yield TwoEngines(pool, link, clients[0], clients[1])


async def cut(both: TwoEngines, *directions: Direction) -> None:
    both.link.set(CUT, *directions)
    began = time.monotonic()
    with machine_lateness() as lateness:
        took = await both.ask_for(FAULT_S)
    late = [at - began for at in both.bad.submits if at > began + DEAD_AFTER_S + lateness.late_s]
    assert not late, f"requests went to a dead replica {late} s after it died; the machine was {lateness.late_s:.2f} s late"
    assert max(took) < DEAD_AFTER_S + 2.5 + lateness.late_s, "what was sent there before that moved"
    both.link.set(HEALTHY)


async def flap(both: TwoEngines) -> None:
    """It says hello, lives for a moment and is gone, again and again: its circuit keeps requests away."""
    asking = asyncio.create_task(both.ask_for(FAULT_S))
    before = len(both.bad.submits)
    while not asking.done():
        both.link.refuses = True
        both.link.reset()
        await asyncio.sleep(0.1)
        both.link.refuses = False
        both.link.set(CUT, Direction.TO_CLIENT)  # connections are made, and nothing is answered on them
        await asyncio.sleep(0.2)
        both.link.set(HEALTHY)
        await asyncio.sleep(0.05)
    await asking
    lost = len(both.bad.submits) - before
    assert lost <= 30, "half of the requests would be 50"


FAULTS: dict[str, Callable[[TwoEngines], Awaitable[None]]] = {
    "cut": cut,
    "cut to the engine": lambda both: cut(both, Direction.TO_SERVER),
    "cut to the gateway": lambda both: cut(both, Direction.TO_CLIENT),
    "flapping": flap,
}


async def test_a_dead_replica_gets_no_request_beyond_two_seconds_and_comes_back() -> None:
    """All faults at once, each between engines of its own: the test takes the time of one."""

    async def one(name: str) -> None:
        async with two_engines() as both:
            await both.ask_for(0.6)
            async with asyncio.timeout(30.0):
                while not both.bad.submits:  # both are used while all is well
                    await both.ask_for(0.2)
            await FAULTS[name](both)
            before = len(both.bad.submits)
            async with asyncio.timeout(REPLICA_LIMITS.cooldown_s + 10.0):
                while len(both.bad.submits) == before:
                    await both.ask_for(0.2)

    async with asyncio.TaskGroup() as group:
        for name in FAULTS:
            group.create_task(one(name), name=name)


@pytest.mark.parametrize("num_failures", [REPLICA_LIMITS.max_failures])
async def test_a_replica_that_loses_what_it_is_sent_gets_three_requests(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is lost before its first token, with its connection; each ends whole at the other replica.

    Its circuit stays open for an hour: on no machine does the test last until a request tries it again.
    """
    limits = replace(REPLICA_LIMITS, cooldown_s=3600.0, max_cooldown_s=3600.0)
    monkeypatch.setattr("headrace.gateway.upstream.replica_circuit.REPLICA_LIMITS", limits)
    async with two_engines() as both:
        submit = both.bad.submit

        def submit_and_reset(request: EngineRequest) -> ReplicaStream:
            stream = submit(request)
            both.link.reset()
            return stream

        both.bad.submit = submit_and_reset  # type: ignore[method-assign]
        submits, took = both.bad.submits, list[float]()
        with machine_lateness() as lateness:
            async with asyncio.timeout(30.0):
                while len(submits) < num_failures:
                    took += await both.ask_for(0.2)
            took += await both.ask_for(2.5)
        assert len(submits) == num_failures
        assert max(took) < 2.0 + lateness.late_s
