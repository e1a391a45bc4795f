"""Tests requests that wait at one replica when another one becomes ready: they move, none is lost, and none is answered twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import VirtualTimeLoop, virtual_loop
from virtual_wire import VirtualServed
from wire_kit import request

from headrace.core.request import PriorityClass
from headrace.engine.config import EngineConfig
from headrace.gateway.upstream.own.attempts import CallAttempts, PromptCall
from headrace.gateway.upstream.own.replica_health import Replica
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.gateway.upstream.own.submissions import SubmissionResult
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.policy.routing.choice import ReplicaId
from headrace.wire.client import ReplicaClient

OPTIONS = FakeOptions(numerics={"weights": "ab"}, step_seconds=0.18)
NUM_TOKENS = 12
NUM_SLOTS = 2
ANSWER_S = NUM_TOKENS * 0.2


@dataclass
class Site:
    """A pool whose replicas run two sequences each, and the requests that were asked of it."""

    pool: ReplicaPool
    engines: list[VirtualServed] = field(default_factory=list)
    running: list[asyncio.Task[None]] = field(default_factory=list)
    asked: list[asyncio.Task[float]] = field(default_factory=list)
    calls: list[CallAttempts] = field(default_factory=list)

    async def add_replica(self) -> None:
        engine = VirtualServed(EngineConfig(model="", max_num_seqs=NUM_SLOTS), step_s=0.02, options=OPTIONS)
        self.engines.append(engine)
        self.running.append(asyncio.create_task(engine.run()))
        replica = Replica(ReplicaId(f"r{len(self.engines)}"), engine.client(name=f"r{len(self.engines)}"))
        self.pool.change(add=[replica])
        assert isinstance(replica.connection, ReplicaClient)
        await replica.connection.wait_connected(10.0)

    def ask(self, num_tokens: int = NUM_TOKENS, n: int = 1, priority: PriorityClass = PriorityClass.STANDARD) -> asyncio.Task[float]:
        whole = request(f"q{len(self.asked)}", max_tokens=num_tokens, n=n, seed=len(self.asked), priority=priority)
        attempts = CallAttempts(self.pool, PromptCall(request=whole, max_output_tokens=num_tokens))
        self.calls.append(attempts)
        self.asked.append(asyncio.create_task(self._read(attempts, num_tokens)))
        return self.asked[-1]

    async def _read(self, attempts: CallAttempts, num_tokens: int) -> float:
        """To its end. Returns when the first token came."""
        whole, first = attempts._call.request, 0.0
        ended: set[int] = set()
        try:
            while updates := await attempts.batch():
                for update in updates:
                    first = first or virtual_loop().time()
                    attempts.keep(update.index, update.token_ids)
                    if update.finish is not None:
                        assert update.index not in ended
                        ended.add(update.index)
                        attempts.end(update.index, update.finish)
        finally:
            await attempts.close()
        for index in range(whole.params.n):
            assert list(attempts.output_ids[index]) == fake_answer(whole, index, num_tokens, OPTIONS), "as if nothing had moved"
        return first

    def num_moves(self, place: int) -> int:
        return sum(each.result is SubmissionResult.MOVED for each in self.calls[place].submissions._kept)

    def check(self) -> None:
        self.pool.check()
        for number, call in enumerate(self.calls):
            kept = call.submissions._kept
            names = [each.choice.replica_id for each in kept]
            assert len(set(names)) == len(names), f"request {number} came twice to one replica: {names}"
            assert call.num_resumes == 0, "a move is no resume"


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    async with ReplicaPool("fake", [], random=random.Random(3), failover_s=20.0, clock=virtual_loop().time) as pool:
        opened = Site(pool)
        await opened.add_replica()
        yield opened
        opened.check()
        await asyncio.sleep(1.0)
        assert all(engine.is_idle for engine in opened.engines)
        for task in opened.running:
            task.cancel()
        await asyncio.gather(*opened.running, return_exceptions=True)
        for engine in opened.engines:
            engine.service.check()


@pytest.mark.loop
async def test_requests_that_wait_move_to_a_new_replica_and_those_that_wait_longest_go_first() -> None:
    async with site() as opened:
        await opened.ask()  # the speed is known then
        asked = [opened.ask() for _ in range(12)]
        await asyncio.sleep(ANSWER_S / 2)
        await opened.add_replica()
        firsts = await asyncio.gather(*asked)
        moved = [place for place in range(1, 13) if opened.num_moves(place)]
        assert 4 <= len(moved) <= 8, "about half of them"
        times = [firsts[place - 1] for place in moved]
        assert (times[0], times[-1]) == (min(times), max(times))
        assert all(opened.calls[place].replicas == ["r2"] for place in moved)
        assert not any(opened.num_moves(place) for place in (1, 2)), "what runs stays"
        handling = opened.calls[moved[0]].submissions.handling()
        assert [attempt.result for attempt in handling.attempts] == ["moved", "answered"]
        assert [span.name for span in handling.spans][:2] == ["queue", "queue"], "at both replicas"


@pytest.mark.loop
async def test_nothing_moves_where_the_wait_is_short() -> None:
    async with site() as opened:
        await opened.ask(num_tokens=1)
        asked = [opened.ask(num_tokens=1) for _ in range(6)]
        await asyncio.sleep(0.05)
        await opened.add_replica()
        await asyncio.gather(*asked)
        assert not any(map(opened.num_moves, range(7)))


@pytest.mark.loop
async def test_a_replica_that_leaves_at_once_costs_no_request() -> None:
    async with site() as opened:
        await opened.ask()
        asked = [opened.ask() for _ in range(8)]
        await asyncio.sleep(0.3)
        await opened.add_replica()
        await asyncio.sleep(0.7)
        opened.engines[1].link.refuses = True
        opened.engines[1].link.reset()
        await asyncio.gather(*asked)
        opened.calls.clear()  # they were lost there, and resumed


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 20), st.integers(1, 3), st.sampled_from(PriorityClass)),
        st.tuples(st.just("wait"), st.floats(0.0, 3.0)),
        st.tuples(st.just("add")),
        st.tuples(st.just("leave"), st.integers(0, 30)),
    ),
    max_size=16,
)


@contextmanager
def on_virtual_time() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        yield runner


@pytest.mark.pure
@settings(max_examples=25)
@given(EVENTS)
def test_whatever_comes_and_leaves_each_request_is_answered_once_as_if_alone(events: list[tuple[object, ...]]) -> None:
    async def run() -> None:
        async with site() as opened:
            for event in events:
                match event:
                    case ("ask", int(num_tokens), int(n), PriorityClass() as priority):
                        opened.ask(num_tokens, n, priority)
                    case ("wait", float(seconds)):
                        await asyncio.sleep(seconds)
                    case ("add",) if len(opened.engines) < 4:
                        await opened.add_replica()
                    case ("leave", int(number)) if opened.asked:
                        opened.asked[number % len(opened.asked)].cancel()
                opened.pool.check()
            ended = await asyncio.gather(*opened.asked, return_exceptions=True)
            assert all(isinstance(each, float | asyncio.CancelledError) for each in ended), ended

    with on_virtual_time() as runner:
        runner.run(run())
