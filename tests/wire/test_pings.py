"""Tests that pings find a link that is cut from the gateway to the engine alone: the engine is heard, and what is sent to it is lost."""

from __future__ import annotations

import asyncio

import pytest
from patience import eventually
from virtual_wire import linked_virtually
from wire_kit import read_all, request

from bench.network_faults import Direction
from headrace.core.errors import Unavailable
from headrace.lab.fake_runner import fake_answer
from headrace.wire import session
from headrace.wire.client import ConnectionState, ReplicaClient
from headrace.wire.service import HEARTBEAT_S, LEASE_S, NOT_READING_AFTER_S

pytestmark = pytest.mark.loop


async def seconds_until_it_is(state: ConnectionState, replica: ReplicaClient) -> float:
    clock = asyncio.get_running_loop().time
    began = clock()
    await eventually(lambda: replica.state is state)
    return clock() - began


async def test_an_engine_that_is_heard_and_does_not_read_gets_no_new_work_until_the_link_is_good_again() -> None:
    async with linked_virtually() as (engine, replica):
        running = request("running", max_tokens=200)
        reading = asyncio.create_task(read_all(replica.submit(running)))
        await eventually(lambda: engine.engine.snapshot().num_running == 1 and not replica.sent_since_snapshot())
        engine.link.cut(Direction.TO_SERVER)
        lost = replica.submit(request("lost"))
        cut_s = await seconds_until_it_is(ConnectionState.NOT_READING, replica)
        assert NOT_READING_AFTER_S - HEARTBEAT_S <= cut_s <= NOT_READING_AFTER_S + HEARTBEAT_S
        assert replica.silent_s < HEARTBEAT_S, "a frame came after the cut: the engine is heard"
        with pytest.raises(Unavailable, match="not reading"):
            replica.submit(request("new"))
        assert replica.abandon(lambda: Unavailable("moved"), lambda stream: stream.handle in replica.unseen_handles) == 1
        with pytest.raises(Unavailable, match="moved"):
            await read_all(lost)
        assert await reading == {0: fake_answer(running, 0, 200, engine.options)}, "what the engine computes already goes on"
        engine.link.heal()
        assert await seconds_until_it_is(ConnectionState.CONNECTED, replica) <= HEARTBEAT_S
        await eventually(lambda: engine.is_idle)
        assert await read_all(replica.submit(request("after")))
        assert not replica.unseen_handles


async def test_an_engine_that_reads_nothing_for_a_lease_is_given_up() -> None:
    async with linked_virtually(step_s=0.1) as (engine, replica):
        reading = asyncio.create_task(read_all(replica.submit(request("long", max_tokens=2000))))
        await eventually(lambda: engine.engine.snapshot().num_running == 1 and not replica.sent_since_snapshot())
        engine.link.cut(Direction.TO_SERVER)
        began = engine.loop.time()
        with pytest.raises(Unavailable, match="the engine has read nothing for 10 s"):
            await reading
        assert LEASE_S - HEARTBEAT_S <= engine.loop.time() - began <= LEASE_S + 2 * HEARTBEAT_S
        engine.link.heal()
        await eventually(lambda: replica.state is ConnectionState.CONNECTED)
        await eventually(lambda: engine.is_idle)


async def test_pings_wait_behind_a_large_prompt_for_as_long_as_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt tokens on their way are time that the link may need for them."""
    monkeypatch.setattr(session, "READ_TOKENS_PER_S", 1000)
    async with linked_virtually() as (engine, replica):
        engine.link.cut(Direction.TO_SERVER)
        replica.submit(request("large", prompt=tuple(range(1, 3001))))
        await asyncio.sleep(3.0)
        assert (replica.state, replica.unread_s) == (ConnectionState.CONNECTED, 0.0)
        more_s = await seconds_until_it_is(ConnectionState.NOT_READING, replica)
        assert NOT_READING_AFTER_S - HEARTBEAT_S <= more_s <= NOT_READING_AFTER_S + HEARTBEAT_S
        engine.link.heal()
        await eventually(lambda: engine.service.num_open == 1)
        assert replica.abandon(lambda: Unavailable("the end of this test"), lambda _: True) == 1
        await eventually(lambda: engine.is_idle)


async def test_an_engine_that_reads_is_not_given_up_while_this_end_reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that reads ten frames a second, of an engine that sends more than twice as many, soon reads what was sent seconds ago."""
    next_frame = session.Session._next_frame

    async def late_frame(self: session.Session, call: object) -> object:
        await asyncio.sleep(0.1)
        return await next_frame(self, call)

    monkeypatch.setattr(session.Session, "_next_frame", late_frame)
    async with linked_virtually(step_s=0.04) as (engine, replica):
        reading = asyncio.create_task(read_all(replica.submit(request("long", max_tokens=500))))
        await eventually(lambda: engine.engine.snapshot().num_running == 1)
        states = set()
        while not engine.is_idle:
            await asyncio.sleep(0.05)
            states.add(replica.state)
        assert states == {ConnectionState.CONNECTED}
        await reading
