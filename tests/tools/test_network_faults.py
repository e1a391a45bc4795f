"""Tests the proxy that makes links bad: each fault does what it says, to bytes and to ends of connections, and goes when it is healed.

On virtual time, but for what the kernel does to ends of connections.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from patience import eventually

from bench import network_faults
from bench.network_faults import CUT, HEALTHY, RETRANSMIT_S, SEGMENT_BYTES, Direction, FaultyLink, LinkFault

pytestmark = pytest.mark.loop

LONG_S = 30.0
"""Bytes that are held back for this long are held back."""


class Far:
    """The server behind the link: what it read, and when; and how its connections ended."""

    def __init__(self) -> None:
        self.data = b""
        self.arrived_s: list[float] = []
        self.ends: list[str] = []
        self.writers: list[Writer] = []
        self.clients: list[Writer] = []

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.writers.append(writer)
        try:
            while data := await reader.read(4096):
                self.data += data
                self.arrived_s.append(now())
            self.ends.append("end")
        except ConnectionResetError:
            self.ends.append("reset")
        except asyncio.CancelledError:
            self.ends.append("left")


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[FaultyLink, Far]]:
    far = Far()
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    try:
        async with FaultyLink("127.0.0.1", server.sockets[0].getsockname()[1], seed=1) as link:
            yield link, far
    finally:
        server.close()
        for writer in (*far.clients, *far.writers):
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def dial(link: FaultyLink, far: Far) -> tuple[Reader, Writer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    far.clients.append(writer)
    return reader, writer


async def greet(link: FaultyLink, far: Far) -> tuple[Reader, Writer]:
    reader, writer = await dial(link, far)
    num_before = len(far.data)
    writer.write(b"hello ")
    await eventually(lambda: len(far.data) == num_before + 6)
    return reader, writer


@pytest.mark.socket
async def test_a_healthy_link_passes_bytes_both_ways_and_each_end_by_itself() -> None:
    async with linked() as (link, far):
        reader, writer = await greet(link, far)
        writer.write(bytes(1_000_000))
        writer.write_eof()
        await eventually(lambda: far.ends == ["end"])
        assert len(far.data) == 1_000_006
        far.writers[0].write(b"answer")
        far.writers[0].close()
        assert await reader.read() == b"answer"
        await eventually(lambda: not link.num_open)
        assert link.num_accepted == 1


async def test_bytes_are_late_by_the_delay_in_the_named_direction_alone() -> None:
    async with linked() as (link, far):
        reader, writer = await greet(link, far)
        link.set(LinkFault(delay_s=0.2), Direction.TO_SERVER)
        began = now()
        writer.write(b"late")
        far.writers[0].write(b"x")
        assert await reader.read(1) == b"x"
        assert now() == began
        await eventually(lambda: far.data.endswith(b"late"))
        assert far.arrived_s[-1] - began == pytest.approx(0.2)


async def test_a_cut_in_one_direction_holds_its_bytes_until_it_heals() -> None:
    async with linked() as (link, far):
        reader, writer = await greet(link, far)
        link.set(CUT, Direction.TO_SERVER)
        writer.write(b"held")
        far.writers[0].write(b"passes")
        assert await reader.read(6) == b"passes"
        await asyncio.sleep(LONG_S)
        assert far.data == b"hello "
        link.set(HEALTHY)
        healed = now()
        await eventually(lambda: far.data == b"hello held")
        assert far.arrived_s[-1] == healed


async def test_a_cut_hides_that_the_other_end_has_left() -> None:
    async with linked() as (link, far):
        reader, _ = await greet(link, far)
        link.set(CUT)
        far.writers[0].close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), LONG_S)
        link.set(HEALTHY)
        assert await reader.read() == b""


@pytest.mark.socket
async def test_a_cut_hides_that_the_other_end_has_broken_off() -> None:
    async with linked() as (link, far):
        reader, _ = await greet(link, far)
        link.set(CUT)
        network_faults._reset(far.writers[0])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.15)
        link.set(HEALTHY)
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_connection_that_is_made_while_the_link_is_cut_reaches_the_server_once_it_heals() -> None:
    async with linked() as (link, far):
        link.set(CUT)
        _, writer = await dial(link, far)
        writer.write(b"early")
        await asyncio.sleep(LONG_S)
        assert not far.writers
        link.set(HEALTHY)
        await eventually(lambda: far.data == b"early")


@pytest.mark.socket
async def test_a_reset_breaks_every_connection_off_at_both_ends() -> None:
    async with linked() as (link, far):
        (first, _), (second, _) = await greet(link, far), await greet(link, far)
        link.reset()
        for reader in (first, second):
            with pytest.raises(ConnectionResetError):
                await reader.read()
        await eventually(lambda: far.ends == ["reset", "reset"])
        assert not link.num_open
        await greet(link, far)


@pytest.mark.socket
async def test_a_link_that_refuses_resets_what_is_new_and_keeps_what_stands() -> None:
    async with linked() as (link, far):
        _, writer = await greet(link, far)
        link.refuses = True
        with pytest.raises(ConnectionResetError):
            await (await dial(link, far))[0].read()
        writer.write(b"goes on")
        await eventually(lambda: far.data.endswith(b"goes on"))


async def test_a_slow_link_takes_the_time_of_its_rate() -> None:
    async with linked() as (link, far):
        _, writer = await greet(link, far)
        link.set(LinkFault(bytes_per_s=200_000))
        began = now()
        for _ in range(2):
            writer.write(bytes(60_000))
            await asyncio.sleep(0.1)
        await eventually(lambda: len(far.data) == 60_006)
        assert far.arrived_s[-1] - began == pytest.approx(0.3)
        await eventually(lambda: len(far.data) == 120_006)
        assert far.arrived_s[-1] - began == pytest.approx(0.6), "what is behind it waits for the link"


async def test_loss_and_jitter_keep_the_order() -> None:
    """A word that is lost holds up those behind it, which come with it."""
    async with linked() as (link, far):
        _, writer = await greet(link, far)
        link.set(LinkFault(loss=0.3, jitter_s=0.005))
        words = [b"%04d " % number for number in range(200)]
        for word in words:
            writer.write(word)
            await asyncio.sleep(0.0005)
        last_sent = now()
        await eventually(lambda: len(far.data) == 6 + 5 * len(words))
        assert far.data == b"hello " + b"".join(words)
        assert far.arrived_s == sorted(far.arrived_s)
        assert far.arrived_s[-1] - last_sent > RETRANSMIT_S
        assert len(far.arrived_s) < len(words)


@pytest.mark.pure
def test_a_lost_segment_costs_the_time_until_it_is_sent_again() -> None:
    """Of single segments 30 % are late, a third of these twice; of ten segments the latest counts."""
    fault, draw = LinkFault(loss=0.3), random.Random(1)
    single = [fault.lateness_s(100, draw) for _ in range(20_000)]
    assert set(single) >= {0.0, RETRANSMIT_S, RETRANSMIT_S * 3}
    assert statistics.mean(late > 0 for late in single) == pytest.approx(0.3, abs=0.02)
    assert statistics.mean(late > RETRANSMIT_S for late in single) == pytest.approx(0.09, abs=0.01)
    many = [fault.lateness_s(10 * SEGMENT_BYTES, draw) for _ in range(2_000)]
    assert statistics.mean(late > 0 for late in many) == pytest.approx(1 - 0.7**10, abs=0.02)


async def test_a_link_leaves_nothing_behind() -> None:
    """Connections that are open, cut or late when the link is left end with it."""
    async with linked() as (link, far):
        await greet(link, far)
        link.set(CUT)
        _, writer = await dial(link, far)
        writer.write(b"never")
        await eventually(lambda: link.num_open == 2)
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and "serve" not in str(task.get_coro())]
