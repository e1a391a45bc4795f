"""Tests rank 0's watch over the others: every fault of a rank ends the replica with its reason, and nothing else does.

Looks are made by hand: no test waits for one.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_kit import DrivenEngine

from headrace.core.errors import CheckpointError, ConfigError, EngineFatal, HeadraceError
from headrace.core.parallelism import Parallelism
from headrace.engine.ranks import leader
from headrace.engine.ranks.adapters import DividingLoader
from headrace.engine.ranks.frames import (
    HEADER,
    MAGIC,
    AdapterOrder,
    FrameKind,
    LoadedAdapter,
    RankFailure,
    RankSizes,
    frame,
    int_frame,
    json_frame,
    read_ints,
    read_json,
)
from headrace.engine.ranks.leader import MAX_MISSED, MAX_MISSED_AT_START, RankGroup
from headrace.engine.ranks.link import RankLink
from headrace.tensor.peers import NoPeers

pytestmark = pytest.mark.pure

BEAT = frame(FrameKind.BEAT)
OWN = RankSizes(num_blocks=100, weight_bytes=10, checkpoint_digest="ab")


class AbortedPeers(NoPeers):
    def __init__(self) -> None:
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


class Group:
    """Rank 0 of three, and the members' ends of its links."""

    def __init__(self) -> None:
        self.peers = AbortedPeers()
        pairs = {rank: socket.socketpair() for rank in (1, 2)}
        self.members = {rank: mine for rank, (mine, _) in pairs.items()}
        self.leader = RankGroup({rank: RankLink(theirs, {}) for rank, (_, theirs) in pairs.items()}, Parallelism(3).place(0), self.peers)
        self.faults: list[HeadraceError] = []
        self.leader.watch_beats(self.faults.append)

    def say(self, *data: bytes) -> None:
        for member, each in zip(self.members.values(), data, strict=True):
            member.sendall(each)

    def start(self) -> None:
        """Sizes are agreed and all ranks ready. The watch's thread is not needed: tests look by hand."""
        self.say(json_frame(FrameKind.SIZES, OWN), json_frame(FrameKind.SIZES, OWN))
        self.leader.agree(OWN)
        for member in self.members.values():
            member.recv(1 << 16)
        self.say(frame(FrameKind.READY), frame(FrameKind.READY))
        self.leader.wait_until_ready()

    def check_fault(self, words: str) -> None:
        assert [str(fault) for fault in self.faults] == [str(self.leader.fault)], "said once"
        assert words in str(self.leader.fault)
        assert self.peers.num_aborts == 1
        for member in self.members.values():
            if member.fileno() >= 0:
                assert member.recv(1) == b"", "members end once their link is closed"


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(RankGroup, "_keep_looking", lambda self: None)
    monkeypatch.setattr(leader, "JOIN_S", 0.0)
    made = Group()
    yield made
    made.leader.close()


def test_the_least_number_of_blocks_is_that_of_all(group: Group) -> None:
    group.say(BEAT + json_frame(FrameKind.SIZES, RankSizes(70, 12, "ab")), json_frame(FrameKind.SIZES, RankSizes(90, 9, "ab")) + BEAT)
    num_blocks, sizes = group.leader.agree(OWN)
    assert num_blocks == 70
    assert [its.num_blocks for its in sizes.values()] == [100, 70, 90]
    for member in group.members.values():
        assert read_ints(bytearray(member.recv(1 << 16)[HEADER.size :]), 1) == [70]


@pytest.mark.parametrize("own", [OWN, replace(OWN, weights_digest="ef")], ids=["sampled", "hashed"])
def test_a_rank_with_other_weights_is_refused(group: Group, own: RankSizes) -> None:
    other = replace(own, weights_digest="01") if own.weights_digest else RankSizes(100, 10, "cd")
    group.say(json_frame(FrameKind.SIZES, OWN), json_frame(FrameKind.SIZES, other))
    with pytest.raises(ConfigError, match="model: the weights that rank 2 reads are not those of rank 0"):
        group.leader.agree(own)


@pytest.mark.parametrize(("is_refused", "kind"), [(True, ConfigError), (False, EngineFatal)])
def test_a_rank_that_fails_at_its_start_fails_the_start_of_rank_0(group: Group, is_refused: bool, kind: type[Exception]) -> None:
    group.say(json_frame(FrameKind.SIZES, OWN), json_frame(FrameKind.FAILED, RankFailure("memory_fraction: too small.", is_refused)))
    with pytest.raises(kind, match=r"rank 2.*memory_fraction: too small"):
        group.leader.agree(OWN)
    group.check_fault("memory_fraction: too small")


def test_a_rank_that_leaves_while_it_loads_fails_the_start(group: Group) -> None:
    group.members[1].close()
    with pytest.raises(EngineFatal, match="rank 1: its link is closed"):
        group.leader.agree(OWN)


FAULTS = [
    (json_frame(FrameKind.FAILED, RankFailure("ZeroDivisionError()", is_refused=False)), "rank 2 failed: ZeroDivisionError()"),
    (b"\0" * 64, "rank 2: a frame begins with"),
    (frame(FrameKind.READY), "rank 2: a frame of kind 6 where only BEAT, FAILED, LOADED may come"),
    (int_frame(FrameKind.BEAT, 1), "rank 2: a frame of kind BEAT has 8 bytes, more than 0"),
    (HEADER.pack(MAGIC, FrameKind.FAILED, 1 << 40), "rank 2: a frame of kind FAILED has 1099511627776 bytes"),
    (int_frame(FrameKind.FAILED, 1), "rank 2: a frame is no RankFailure"),
    (json_frame(FrameKind.LOADED, LoadedAdapter(4, "")), "rank 2: it answers for adapter 4, and was not asked"),
    (int_frame(FrameKind.LOADED, 4), "rank 2: a frame is no LoadedAdapter"),
    (None, "rank 2: its link is closed"),
]


@pytest.mark.parametrize(("data", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_a_fault_is_seen_at_the_next_look(group: Group, data: bytes | None, words: str) -> None:
    group.start()
    group.leader.look()
    assert group.leader.fault is None
    if data is None:
        group.members[2].close()
    else:
        group.say(BEAT, BEAT + data)
    group.leader.look()
    group.check_fault(words)
    group.leader.look()
    assert len(group.faults) == 1


class PartLoader:
    """Loads an adapter of rank 0. said: by the members, meanwhile"""

    max_bytes = 10

    def __init__(self, group: Group, *said: LoadedAdapter) -> None:
        self._group, self._said = group, said
        self.orders: list[AdapterOrder] = []

    def inspect(self, folder: Path) -> str:
        return f"digest of {folder.name}"

    def zeros(self) -> SimpleNamespace:
        return SimpleNamespace(num_bytes=1)

    def load(self, folder: Path, digest: str) -> SimpleNamespace:
        received = [read_all(member) for member in self._group.members.values()]
        assert received[0] == received[1]
        [(kind, payload)] = received[0]
        assert kind is FrameKind.ADAPTER
        self.orders.append(read_json(AdapterOrder, payload))
        for member, said in zip(self._group.members.values(), self._said, strict=False):
            member.sendall(json_frame(FrameKind.LOADED, said))
        return SimpleNamespace(num_bytes=7)


def read_all(member: socket.socket) -> list[tuple[FrameKind, bytearray]]:
    allowed = {FrameKind.ADAPTER: 1 << 16, FrameKind.DROP: 8}
    return list(RankLink(member, allowed).arrived())


def test_an_adapter_is_loaded_once_every_rank_has_answered_and_dropped_once_nothing_refers_to_it(group: Group, tmp_path: Path) -> None:
    group.start()
    loader = PartLoader(group, LoadedAdapter(1, ""), LoadedAdapter(1, ""))
    adapters = DividingLoader(loader, group.leader)
    zeros = adapters.zeros()
    loaded = adapters.load(tmp_path / "a", "ab")
    assert (loaded.number, loaded.num_bytes) == (1, 7)
    assert loader.orders == [AdapterOrder(1, str(tmp_path / "a"), "ab")]
    assert not group.leader.answers
    group.leader.drop_unused()
    assert not any(map(read_all, group.members.values()))
    del zeros, loaded
    group.leader.drop_unused()
    for member in group.members.values():
        assert [(kind, read_ints(payload, 1)) for kind, payload in read_all(member)] == [(FrameKind.DROP, [0]), (FrameKind.DROP, [1])]


def test_an_adapter_that_one_rank_cannot_load_is_dropped_by_the_others(group: Group, tmp_path: Path) -> None:
    group.start()
    adapters = DividingLoader(PartLoader(group, LoadedAdapter(1, ""), LoadedAdapter(1, "cannot be read")), group.leader)
    with pytest.raises(CheckpointError, match="a: rank 2: cannot be read"):
        adapters.load(tmp_path / "a", "ab")
    assert list(group.leader.unused) == [1]
    assert group.leader.fault is None


def test_a_load_that_waits_ends_with_the_ranks(group: Group, tmp_path: Path) -> None:
    class Leaving(PartLoader):
        def load(self, folder: Path, digest: str) -> SimpleNamespace:
            loaded = super().load(folder, digest)
            group.members[2].close()
            return loaded

    group.start()
    with pytest.raises(EngineFatal, match="rank 2: its link is closed"):
        DividingLoader(Leaving(group), group.leader).load(tmp_path, "ab")
    group.check_fault("rank 2: its link is closed")


def test_a_load_that_begins_after_the_close_says_that_the_ranks_have_ended(group: Group, tmp_path: Path) -> None:
    group.start()
    group.leader.close()
    with pytest.raises(EngineFatal, match="the ranks of this replica have ended"):
        DividingLoader(PartLoader(group), group.leader).load(tmp_path, "ab")


def test_a_rank_that_stops_beating_is_seen_and_one_missed_beat_is_nothing(group: Group) -> None:
    group.start()
    for _ in range(3 * MAX_MISSED):  # every other beat comes late
        group.say(BEAT, BEAT)
        group.leader.look()
        group.leader.look()
    for _ in range(MAX_MISSED - 2):
        group.say(BEAT, b"")
        group.leader.look()
    assert group.leader.fault is None
    group.say(BEAT, b"")
    group.leader.look()
    group.check_fault("rank 2 has not beaten for 1.5 s")


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Its engine is not built yet."""
    with monkeypatch.context() as patched:
        patched.setattr(RankGroup, "watch_beats", lambda self, on_fault: None)
        made = Group()
    monkeypatch.setattr(leader, "JOIN_S", 0.0)
    yield made
    made.leader.close()


def test_beats_that_a_compiler_keeps_back_are_not_missed_before_the_engine_is_built(starting: Group) -> None:
    for _ in range(MAX_MISSED_AT_START - 1):
        starting.leader.look()
    starting.leader.watch_beats(starting.faults.append)
    for _ in range(MAX_MISSED - 1):
        starting.leader.look()
    assert starting.leader.fault is None
    starting.leader.look()
    starting.check_fault("has not beaten for 1.5 s")


def test_a_rank_that_leaves_before_the_engine_is_built_is_seen(starting: Group) -> None:
    starting.members[2].close()
    starting.leader.look()
    assert "rank 2: its link is closed" in str(starting.leader.fault)


@pytest.mark.parametrize("is_agreed", [False, True], ids=["while it loads", "while it allocates"])
def test_a_rank_that_is_stopped_fails_the_start(starting: Group, monkeypatch: pytest.MonkeyPatch, is_agreed: bool) -> None:
    monkeypatch.setattr(leader, "BEAT_S", 0.001)
    if is_agreed:
        starting.say(json_frame(FrameKind.SIZES, OWN), json_frame(FrameKind.SIZES, OWN))

    def start() -> None:
        starting.leader.agree(OWN)
        starting.leader.wait_until_ready()

    with pytest.raises(EngineFatal, match=r"rank 1 has not beaten for 0\.24 s"):
        start()


def test_a_machine_that_stood_still_ends_no_rank(group: Group) -> None:
    """Its clock jumps, and rank 0 has made no looks meanwhile."""
    group.start()
    for _ in range(MAX_MISSED - 1):
        group.leader.look()
    group.say(BEAT, BEAT)
    for _ in range(MAX_MISSED):
        group.leader.look()
    assert group.leader.fault is None


def test_a_step_that_fails_has_the_reason_of_the_rank_that_failed(group: Group) -> None:
    """The rank says it first and then wakes the others, so that the step ends before a look."""
    group.start()
    group.say(b"", json_frame(FrameKind.FAILED, RankFailure("MemoryError()", is_refused=False)))
    with pytest.raises(EngineFatal, match=r"rank 2 failed: MemoryError\(\)"), group.leader.computing():
        raise EngineFatal("another rank of this replica has ended")
    group.check_fault("rank 2 failed: MemoryError()")


def test_an_own_failure_within_a_step_ends_the_replica(group: Group) -> None:
    group.start()
    with pytest.raises(EngineFatal, match="rank 0 failed within a step: ZeroDivisionError"), group.leader.computing():
        raise ZeroDivisionError
    group.check_fault("rank 0 failed within a step")


def test_ctrl_c_waits_until_the_ranks_are_at_the_same_place_again(group: Group) -> None:
    done = []

    def interrupted() -> None:
        with group.leader.computing():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (done, group.leader.fault) == ([True], None)


def test_a_step_after_a_fault_raises_its_reason(group: Group) -> None:
    group.start()
    group.members[1].close()
    group.leader.look()
    with pytest.raises(EngineFatal, match="rank 1: its link is closed"), group.leader.computing():
        group.leader.send(int_frame(FrameKind.LOGITS, 1))
    group.check_fault("rank 1: its link is closed")


def test_who_asks_late_for_a_fault_gets_it(group: Group) -> None:
    group.start()
    group.leader.end(EngineFatal("over"))
    late: list[HeadraceError] = []
    group.leader.watch_beats(late.append)
    assert [str(fault) for fault in late] == ["over"]


def test_an_end_in_order_is_said_and_is_no_fault(group: Group) -> None:
    group.start()
    group.leader.close()
    group.leader.close()
    for member in group.members.values():
        assert member.recv(1 << 16) == frame(FrameKind.END)
        assert member.recv(1) == b""
    assert not group.faults


def test_a_step_that_was_abandoned_is_woken_once_the_links_have_closed(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []
    members = group.members.values()
    monkeypatch.setattr(group.peers, "abort", lambda: left.extend(not member.recv(1, socket.MSG_DONTWAIT) for member in members))
    group.leader.close()
    assert left == [True, True]


def test_a_start_that_fails_says_no_end(group: Group) -> None:
    group.leader.close()
    for member in group.members.values():
        assert member.recv(1) == b""


def test_only_the_last_stage_computes_logits() -> None:
    pairs = {rank: socket.socketpair() for rank in (1, 2, 3)}
    links = {rank: RankLink(theirs, {}) for rank, (_, theirs) in pairs.items()}
    group = RankGroup(links, Parallelism(2, 2).place(0), AbortedPeers())
    group.send_to_stage(int_frame(FrameKind.LOGITS, 5))
    got = {rank: bool(mine.recv(1 << 16, socket.MSG_DONTWAIT)) for rank, (mine, _) in pairs.items() if rank == 1}
    assert got == {1: True}
    for rank in (2, 3):
        with pytest.raises(BlockingIOError):
            pairs[rank][0].recv(1, socket.MSG_DONTWAIT)
    group.close()


def test_an_idle_engine_ends_with_the_reason() -> None:
    driven = DrivenEngine()
    driven.engine.abort(EngineFatal("rank 2 has not beaten for 1.5 s"))
    with pytest.raises(EngineFatal, match="rank 2 has not beaten"):
        driven.engine.idle()


def test_a_busy_engine_ends_with_the_reason() -> None:
    driven = DrivenEngine()
    driven.engine.abort(EngineFatal("rank 2 has not beaten for 1.5 s"))
    with pytest.raises(EngineFatal, match="rank 2 has not beaten"):
        driven.engine.turn()
