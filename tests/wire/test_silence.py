"""Tests that a replica without heartbeats gets no new work and is given up after a lease, but not while the gateway itself was held up."""

from __future__ import annotations

import asyncio
import logging

import pytest
from patience import eventually
from virtual_wire import linked_virtually
from wire_kit import read_all, request

from bench.network_faults import Direction
from headrace.core.errors import Unavailable
from headrace.wire.client import ConnectionState, ReplicaClient
from headrace.wire.service import HEARTBEAT_S, LEASE_S, SILENT_AFTER_S

pytestmark = pytest.mark.loop


def is_silent(replica: ReplicaClient) -> bool:
    assert replica.state in (ConnectionState.CONNECTED, ConnectionState.SILENT)
    return replica.state is ConnectionState.SILENT


async def test_three_missed_heartbeats_are_silence_until_one_comes() -> None:
    async with linked_virtually() as (engine, replica):
        await eventually(lambda: replica.snapshot is not None)
        engine.link.cut(Direction.TO_CLIENT)
        await asyncio.sleep(SILENT_AFTER_S - replica.silent_s - 0.01)
        assert not is_silent(replica)
        await asyncio.sleep(0.02)
        assert is_silent(replica)
        assert replica.silent_s < 1.0, "before a second is over"
        with pytest.raises(Unavailable, match="silent"):
            replica.submit(request("r"))
        engine.link.heal()
        await eventually(lambda: replica.state is ConnectionState.CONNECTED)
        assert replica.silent_s < HEARTBEAT_S


async def test_a_replica_that_is_silent_for_a_lease_is_given_up_and_its_streams_end() -> None:
    async with linked_virtually(step_s=0.1) as (engine, replica):
        reading = asyncio.create_task(read_all(replica.submit(request("r", max_tokens=4000))))
        await eventually(lambda: engine.engine.snapshot().num_running == 1)
        engine.link.cut(Direction.TO_CLIENT)
        began = engine.loop.time()
        with pytest.raises(Unavailable, match="no heartbeat for 10 s"):
            await reading
        assert LEASE_S - HEARTBEAT_S <= engine.loop.time() - began <= LEASE_S + HEARTBEAT_S
        engine.link.heal()
        await eventually(lambda: replica.state is ConnectionState.CONNECTED)
        await eventually(lambda: engine.is_idle)


@pytest.mark.parametrize("late_s", [2 * SILENT_AFTER_S, 2 * LEASE_S])
async def test_a_gateway_that_was_held_up_itself_does_not_call_its_replicas_silent(late_s: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with linked_virtually() as (engine, replica):
            stream = replica.submit(request("r", max_tokens=60))
            await stream.__anext__()
            engine.loop.be_late(late_s)
            assert replica.state is ConnectionState.CONNECTED, "asked at once: nothing that waits could be read yet"
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert replica.state is ConnectionState.CONNECTED
            assert len((await read_all(stream))[0]) == 59
    assert "silent" not in caplog.text


async def test_time_in_which_the_gateway_was_held_up_counts_for_no_silence_that_goes_on() -> None:
    async with linked_virtually() as (engine, replica):
        await eventually(lambda: replica.snapshot is not None)
        engine.link.cut(Direction.TO_CLIENT)
        engine.loop.be_late(LEASE_S)
        assert replica.silent_s <= 2 * HEARTBEAT_S
        await asyncio.sleep(0.01)
        assert not is_silent(replica)
        await asyncio.sleep(SILENT_AFTER_S)
        assert is_silent(replica)
