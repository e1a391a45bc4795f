"""Tests that a connection counts its own submits, since a load may be older than they are."""

from __future__ import annotations

import asyncio

import pytest
from wire_kit import request

from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.wire import headrace_pb2 as pb
from headrace.wire.codec import encode_load
from headrace.wire.dial import Dialer
from headrace.wire.service import Expectation
from headrace.wire.session import Session
from headrace.wire.target import parse_target

pytestmark = pytest.mark.loop


class Call:
    """Takes every frame."""

    async def write(self, frame: pb.ClientFrame) -> None:
        await asyncio.sleep(0)


def load(submits_seen: int) -> pb.EngineFrame:
    snapshot = LoadSnapshot(
        num_running=0,
        num_waiting=submits_seen,
        kv_blocks_free=9,
        kv_blocks_cached=0,
        kv_blocks_used=1,
        kv_blocks_total=10,
        counters=EngineCounters(),
    )
    return pb.EngineFrame(load=encode_load(snapshot), submits_seen=submits_seen)


async def test_a_load_counts_only_the_submits_that_it_has_seen() -> None:
    """The router adds what was sent since to the last load: forgotten too early, a replica looks free while a burst is on its way to it."""
    loads: list[int] = []
    session = Session(
        Dialer(parse_target("unix:/nowhere", None)),
        Expectation(),
        on_hello=lambda _: None,
        on_load=lambda snapshot: loads.append(snapshot.num_waiting),
        on_weights_digest=lambda _: None,
        on_adapters=lambda _: None,
        on_beat=lambda: None,
        clock=asyncio.get_running_loop().time,
    )
    writing = asyncio.create_task(session._write(Call()))
    for number in range(3):
        session.send_submit(request(f"r{number}", prompt=tuple(range(number + 1))))
    assert (len(session.unseen_handles), session.num_unseen_tokens) == (3, 6), "counted before they are written"
    for _ in range(10):
        await asyncio.sleep(0)
    seen: list[tuple[int, int]] = []
    for submits_seen in (0, 1, 1, 3):
        await session._take(load(submits_seen))
        seen.append((len(session.unseen_handles), session.num_unseen_tokens))
    assert seen == [(3, 6), (2, 5), (2, 5), (0, 0)]
    assert loads == [0, 1, 1, 3]
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
