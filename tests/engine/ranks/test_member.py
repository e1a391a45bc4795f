"""Tests that a member ends for what rank 0 may not send, and says why before it wakes the other ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE_S

from headrace.core.errors import CheckpointError, ConfigError, EngineFatal
from headrace.core.parallelism import ALONE
from headrace.core.regular_files import FileThread
from headrace.engine.ranks.adapters import FAILED, MAX_READS, MemberAdapters
from headrace.engine.ranks.frames import (
    HEADER,
    MAGIC,
    AdapterOrder,
    FrameKind,
    LoadedAdapter,
    RankFailure,
    StepLimits,
    frame,
    int_frame,
    read_json,
)
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
        (int_frame(FrameKind.STEP, 9, 1, -1, 9, 0, 0, 1), "a step's num_tokens is 9, outside 1..8"),
        (int_frame(FrameKind.STEP, 1, 1, -1, 1, 0, 0, 1), "a step of 1 tokens has 56 bytes instead of"),
        (int_frame(FrameKind.LOGITS, 0), "logits of 0 rows are asked for, outside 1..8"),
        (int_frame(FrameKind.LOGITS, 9), "logits of 9 rows are asked for, outside 1..8"),
        (int_frame(FrameKind.STEP, 1, 1, -1, 1, 0, 1, 1), "a step's num_places is 1, outside 0..0"),
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


ZERO_PART, PART = SimpleNamespace(num_bytes=1), SimpleNamespace(num_bytes=2)


class Loader:
    """answered: set once a read may end"""

    max_bytes = 10

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.error: Exception | None = None

    def inspect(self, folder: Path) -> str:
        raise AssertionError("only rank 0 inspects")

    def zeros(self) -> Any:
        return ZERO_PART

    def load(self, folder: Path, digest: str) -> Any:
        assert self.answered.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        assert (folder, digest) == (Path("/a"), "ab")
        return PART


@pytest.fixture
def loader() -> Iterator[Loader]:
    made = Loader()
    yield made
    made.answered.set()


def order(number: int) -> AdapterOrder:
    return AdapterOrder(number, "/a", "ab")


def answer(rank_0: socket.socket) -> LoadedAdapter:
    link = RankLink(rank_0, {FrameKind.LOADED: 1 << 16})
    return read_json(LoadedAdapter, link.receive()[1])


def test_a_member_reads_beside_its_steps_and_answers(loader: Loader) -> None:
    rank_0, theirs = socket.socketpair()
    adapters = MemberAdapters(loader, RankLink(theirs, {}))
    adapters.load(order(1))
    assert adapters.parts == {0: ZERO_PART, 1: None}
    loader.answered.set()
    assert answer(rank_0) == LoadedAdapter(1, "")
    assert adapters.parts == {0: ZERO_PART, 1: PART}
    loader.error = CheckpointError("/a", "cannot be read")
    adapters.load(order(2))
    assert answer(rank_0) == LoadedAdapter(2, "cannot be read")
    loader.error = ZeroDivisionError("x")
    adapters.load(order(3))
    assert answer(rank_0) == LoadedAdapter(3, FAILED)
    for number in (0, 1, 2, 3):
        adapters.drop(number)
    assert not adapters.parts


def test_what_rank_0_may_not_ask_of_adapters_ends_a_member(loader: Loader) -> None:
    _, theirs = socket.socketpair()
    adapters = MemberAdapters(loader, RankLink(theirs, {}))
    for number in range(1, 1 + MAX_READS):
        adapters.load(order(number))
    for number, words in ((0, "adapter 0 is to be loaded twice"), (99, f"more than {MAX_READS} adapters are to be read at once")):
        with pytest.raises(EngineFatal, match=words):
            adapters.load(order(number))
    for number in (1, 99):
        with pytest.raises(EngineFatal, match=f"adapter {number} is to be dropped, and is not loaded"):
            adapters.drop(number)


def test_a_thread_that_cannot_be_started_refuses_the_adapter_alone(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: FileThread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(FileThread, "start", none_left)
    rank_0, theirs = socket.socketpair()
    adapters = MemberAdapters(loader, RankLink(theirs, {}))
    adapters.load(order(1))
    assert answer(rank_0) == LoadedAdapter(1, "can't start new thread")
    adapters.drop(1)


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
