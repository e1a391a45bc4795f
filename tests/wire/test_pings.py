"""A link that is cut from the gateway to the engine alone: the engine is heard, and what is sent to it is lost. Pings find it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from wire_kit import Served, connected, read_all, request, served, until

from headrace.core.errors import Unavailable
from headrace.engine.config import EngineConfig
from headrace.engine.server import service
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.lab.network_faults import CUT, HEALTHY, Direction, FaultyLink
from headrace.wire import client, session
from headrace.wire.client import ConnectionState, ReplicaClient

TOKEN = "0123456789abcdef-of-tests"
BEAT_S = 0.02
PACED = FakeOptions(step_seconds=0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire's times, divided by about ten."""
    for module in (session, service):
        monkeypatch.setattr(module, "HEARTBEAT_S", BEAT_S)
    monkeypatch.setattr(client, "NOT_READING_AFTER_S", 6 * BEAT_S)


@asynccontextmanager
async def linked(options: FakeOptions = PACED) -> AsyncIterator[tuple[FaultyLink, Served, ReplicaClient]]:
    engine = Served(options, EngineConfig(model="fake"), "127.0.0.1:0", token=TOKEN)
    await engine.start()
    try:
        async with FaultyLink("127.0.0.1", int(engine.service.address.rpartition(":")[2])) as link:
            engine.address = f"127.0.0.1:{link.port}"
            async with connected(engine, token=TOKEN) as replica:
                yield link, engine, replica
    finally:
        await engine.stop()
        engine.check()


async def test_an_engine_that_is_heard_and_does_not_read_gets_no_new_work_until_the_link_is_good_again() -> None:
    async with linked() as (link, engine, replica):
        running = request("running", max_tokens=200)
        stream = replica.submit(running)
        reading = asyncio.create_task(read_all(stream))
        await until(lambda: engine.engine.snapshot().num_running == 1)
        await until(lambda: not replica.sent_since_snapshot())
        link.set(CUT, Direction.TO_SERVER)
        lost = replica.submit(request("lost"))
        await until(lambda: replica.state is ConnectionState.NOT_READING)
        await until(lambda: replica.silent_s < 2 * BEAT_S)  # a frame came after the cut: the engine is heard
        with pytest.raises(Unavailable, match="not reading"):
            replica.submit(request("new"))
        assert replica.abandon_unseen("moved") == 1
        with pytest.raises(Unavailable, match="moved"):
            await read_all(lost)
        assert await reading == {0: fake_answer(running, 0, 200, PACED)}, "what the engine computes already goes on"
        link.set(HEALTHY)
        await until(lambda: replica.state is ConnectionState.CONNECTED)
        await until(lambda: engine.is_idle)
        await until(lambda: replica.state is ConnectionState.CONNECTED)  # again: a beat may have been late
        assert await read_all(replica.submit(request("after")))
        assert replica.abandon_unseen("nothing is left") == 0


async def test_an_engine_that_reads_nothing_for_a_lease_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LEASE_S", 20 * BEAT_S)
    async with linked() as (link, _, replica):
        stream = replica.submit(request("long", max_tokens=2000))
        reading = asyncio.create_task(read_all(stream))
        await until(lambda: not replica.sent_since_snapshot())
        link.set(CUT, Direction.TO_SERVER)
        with pytest.raises(Unavailable, match="the engine has read nothing for"):
            await reading
        link.set(HEALTHY)
        await until(lambda: replica.state is ConnectionState.CONNECTED)


async def test_an_engine_of_an_older_version_gets_no_pings_and_is_never_found_not_to_read() -> None:
    async with served() as engine:
        engine.service.hello.counts_pings = False
        async with connected(engine) as replica:
            await asyncio.sleep(10 * BEAT_S)
            assert (replica.state, replica.unread_s) == (ConnectionState.CONNECTED, 0.0)
            assert [stream.last_ping for stream in engine.service._streams] == [0]


async def test_pings_wait_behind_a_large_prompt_for_as_long_as_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt tokens on their way are time that the link may need for them."""
    monkeypatch.setattr(session, "READ_TOKENS_PER_S", 1000)
    async with linked() as (link, _, replica):
        link.set(CUT, Direction.TO_SERVER)
        replica.submit(request("large", prompt=tuple(range(1, 1001))))
        await asyncio.sleep(15 * BEAT_S)
        assert replica.state is ConnectionState.CONNECTED
        assert replica.unread_s == 0.0
