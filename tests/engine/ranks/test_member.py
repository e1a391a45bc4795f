"""Tests that a member ends for what rank 0 may not send, and says why before it wakes the other ranks."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.errors import ConfigError, EngineFatal
from headrace.core.parallelism import ALONE
from headrace.engine.ranks.frames import HEADER, MAGIC, FrameKind, RankFailure, StepLimits, frame, int_frame, read_json
from headrace.engine.ranks.link import RankLink
from headrace.engine.ranks.member import RankMember, _beating, _saying_why
from headrace.tensor.peers import NoPeers

pytestmark = pytest.mark.pure

LIMITS = StepLimits(max_tokens=8, max_rows=4, table_width=3, num_groups=1)
NONE: Any = SimpleNamespace(copy_block=None, forward=None, place=ALONE)


class WatchedPeers(NoPeers):
    """received: what rank 0 had from the member when it woke the others"""

    def __init__(self, rank_0: socket.socket) -> None:
        self._rank_0 = rank_0
        self.received: list[bytes] = []

    def abort(self) -> None:
        try:
            self.received.append(self._rank_0.recv(1 << 16, socket.MSG_DONTWAIT))
        except OSError:
            self.received.append(b"")


def made() -> tuple[RankMember, WatchedPeers, socket.socket]:
    rank_0, theirs = socket.socketpair()
    link, peers, closing = RankLink(theirs, {}), WatchedPeers(rank_0), ExitStack()
    closing.callback(link.close)
    closing.enter_context(_saying_why(link, peers))
    return RankMember(link, NONE, NONE, peers, LIMITS, closing), peers, rank_0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame begins with"),
        (frame(FrameKind.BEAT), "a frame of kind 7 where only STEP, LOGITS, COPY, CLEAR, END may come"),
        (HEADER.pack(MAGIC, FrameKind.STEP, 1 << 40), "a frame of kind STEP has 1099511627776 bytes, more than"),
        (int_frame(FrameKind.STEP, 9, 1, -1, 9, 0, 1), "a step's num_tokens is 9, outside 1..8"),
        (int_frame(FrameKind.STEP, 1, 1, -1, 1, 0, 1), "a step of 1 tokens has 48 bytes instead of"),
        (int_frame(FrameKind.LOGITS, 0), "logits of 0 rows are asked for, outside 1..8"),
        (int_frame(FrameKind.LOGITS, 9), "logits of 9 rows are asked for, outside 1..8"),
        (int_frame(FrameKind.COPY, 1, 2), "a frame has 16 bytes instead of 3 numbers"),
        (b"", "its link is closed"),
    ],
)
def test_anything_else_than_a_frame_of_a_step_ends_a_member(data: bytes, why: str) -> None:
    member, peers, rank_0 = made()
    rank_0.sendall(data)
    rank_0.shutdown(socket.SHUT_WR)
    with pytest.raises(EngineFatal) as error:
        member.run()
    assert why in str(error.value)
    [received] = peers.received
    assert received.startswith(frame(FrameKind.READY))
    failed = received.removeprefix(frame(FrameKind.READY))
    assert read_json(RankFailure, bytearray(failed[HEADER.size :])) == RankFailure(str(error.value), is_refused=False)
    assert member.is_over


def test_an_end_in_order_is_no_failure() -> None:
    member, peers, rank_0 = made()
    rank_0.sendall(frame(FrameKind.END))
    member.run()
    assert not peers.received
    assert rank_0.recv(1 << 16) == frame(FrameKind.READY)
    assert rank_0.recv(1) == b""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("memory_fraction", "is too small"), RankFailure("memory_fraction: is too small.", is_refused=True)),
        (ZeroDivisionError("x"), RankFailure("ZeroDivisionError('x')", is_refused=False)),
    ],
)
def test_a_start_that_fails_says_whether_another_one_would(error: Exception, said: RankFailure) -> None:
    rank_0, theirs = socket.socketpair()
    peers = WatchedPeers(rank_0)
    with pytest.raises(type(error)), _saying_why(RankLink(theirs, {}), peers):
        raise error
    assert read_json(RankFailure, bytearray(peers.received[0][HEADER.size :])) == said


def test_a_member_beats_until_rank_0_is_gone_and_then_wakes_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.ranks.member.BEAT_S", 0.001)
    rank_0, theirs = socket.socketpair()
    peers = WatchedPeers(rank_0)
    with _beating(RankLink(theirs, {}), peers):
        for _ in range(3):
            assert rank_0.recv(HEADER.size, socket.MSG_WAITALL) == frame(FrameKind.BEAT)
        rank_0.close()
        while not peers.received:
            pass
