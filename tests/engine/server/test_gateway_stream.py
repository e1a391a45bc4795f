"""Tests the lease of a gateway that does not read, beat by beat."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.ids import RequestId
from headrace.core.update import SequenceUpdate
from headrace.engine.server.gateway_stream import GatewayStream, StreamLost
from headrace.engine.server.unread import UPDATE_UNITS
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import encode_cancel
from headrace.wire.service import Handle
from headrace.wire.stream import SLICE_S

pytestmark = pytest.mark.loop

BEAT_S = 0.25


class Gateway:
    """A peer that takes a frame per `reads.release()` and sends nothing."""

    def __init__(self) -> None:
        self.reads = asyncio.Semaphore(0)
        self.closed = asyncio.Event()

    async def read(self) -> object:
        await self.closed.wait()
        return grpc.aio.EOF

    async def write(self, _data: bytes) -> None:
        await self.reads.acquire()


@asynccontextmanager
async def pumping(gateway: Gateway) -> AsyncIterator[tuple[GatewayStream, asyncio.Task[None]]]:
    stream = GatewayStream(gateway, on_command=ignore)
    task = asyncio.create_task(stream.pump())
    await turns()
    yield stream, task
    gateway.closed.set()
    await asyncio.gather(task, return_exceptions=True)


def ignore(_stream: GatewayStream, _command: pb.Command) -> None: ...


async def turns() -> None:
    """Lets everything that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def say(stream: GatewayStream) -> None:
    stream.unsent.put_rejected(Handle(1), InvalidRequest("x", "y", "z"))
    stream.wake()


async def beats(stream: GatewayStream, count: int, *, lease_s: float = 1.0) -> None:
    for _ in range(count):
        await turns()
        stream.check_lease(BEAT_S, lease_s, 1000)
    await turns()


async def test_one_write_longer_than_the_lease_ends_the_stream() -> None:
    gateway = Gateway()
    async with pumping(gateway) as (stream, task):
        say(stream)
        await beats(stream, 4)
        assert not task.done()
        await beats(stream, 1)
        with pytest.raises(StreamLost, match=r"not read for 1\.2 s"):
            task.result()


async def test_a_slow_gateway_that_takes_a_frame_now_and_then_keeps_its_lease() -> None:
    gateway = Gateway()
    async with pumping(gateway) as (stream, task):
        for _ in range(20):
            say(stream)
            await beats(stream, 3)
            gateway.reads.release()
        assert not task.done()


async def test_a_quiet_stream_keeps_its_lease_for_ever() -> None:
    async with pumping(Gateway()) as (stream, task):
        await beats(stream, 100)
        assert not task.done()
        assert stream.is_flushed


async def test_too_much_unread_ends_the_stream_at_the_next_beat() -> None:
    async with pumping(Gateway()) as (stream, task):
        say(stream)
        await turns()  # it is being written: what follows waits
        stream.unsent.put(Handle(2), SequenceUpdate(RequestId("r"), 0, 0, token_ids=tuple(range((1000 - UPDATE_UNITS) // 2))))
        await beats(stream, 1)
        assert not task.done()
        stream.unsent.put(Handle(3), SequenceUpdate(RequestId("r"), 0, 0, token_ids=(1,)))
        await beats(stream, 1)
        with pytest.raises(StreamLost, match=f"{1000 + UPDATE_UNITS + 2} unread units exceed 1000"):
            task.result()


class Flood:
    """A peer whose next frame is full of cancels."""

    def __init__(self, num_commands: int) -> None:
        self.frames = [pb.ClientFrame(commands=[encode_cancel(Handle(1))] * num_commands).SerializeToString()]

    async def read(self) -> object:
        return self.frames.pop() if self.frames else grpc.aio.EOF


@pytest.mark.parametrize(("num_commands", "command_s"), [(10_000, SLICE_S / 40), (20, 0.1)], ids=["many", "slow"])
async def test_a_frame_full_of_commands_leaves_the_event_loop_to_others_in_between(num_commands: int, command_s: float) -> None:
    """By the time they take: twenty long prompts are more work than a thousand cancels."""
    turn, taken_in, now = 0, list[int](), 0.0

    def take(_stream: GatewayStream, _command: pb.Command) -> None:
        nonlocal now
        now += command_s
        taken_in.append(turn)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await GatewayStream(Flood(num_commands), on_command=take, clock=lambda: now).pump()
    counting.cancel()
    assert len(taken_in) == num_commands
    assert (max(Counter(taken_in).values()) - 1) * command_s <= SLICE_S * 1.01
