"""Ranks whose stages are on machines of their own: how they meet, and how hidden states go from stage to stage.

    links    every rank dials rank 0, over which frames go as on one machine
    memory   the ranks of a stage share memory; its first rank makes it, and gives it to those that come to a socket without a path
    stages   the first rank of a stage dials that of the next one, and sends it hidden states; the others of the stage have the same ones

A machine may have several stages, which exchange as if they were on several.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.core.errors import EngineFatal
from headrace.core.parallelism import Parallelism, Place
from headrace.engine.ranks.frames import MAX_JSON_BYTES, FrameKind, RankHello, RankWelcome, json_frame, read_json
from headrace.engine.ranks.leader import RankGroup
from headrace.engine.ranks.link import (
    RankLink,
    check_welcome,
    connect_unix,
    connections,
    gather,
    join,
    say_hello,
    until_connected,
    welcome,
)
from headrace.engine.ranks.network import RankPort, dial
from headrace.engine.ranks.stage_peers import StagePeers
from headrace.tensor.backends import load_peers, shared_bytes
from headrace.tensor.peers import Peers
from headrace.wire.target import GrpcTarget

_PEER = struct.Struct("3i")
"""What SO_PEERCRED says: process, user, group."""

Check = Callable[[], None]


def lead_stages(target: GrpcTarget, parallelism: Parallelism, check: Check, facts: Mapping[str, str]) -> RankGroup:
    """As `leader.lead_ranks`. target: where rank 0 listens for the others"""
    place = parallelism.place(0)
    with closing(RankPort(target)) as port, ExitStack() as unless_made:
        links = gather(port.connections(check), parallelism.world, facts, partial(_why_apart, parallelism))
        for link in links.values():
            unless_made.callback(link.close)
        group = secrets.token_hex(16)
        addresses = {0: target.address, **{rank: link.hello.address for rank, link in links.items()}}
        for rank, link in links.items():
            link.end_when_silent()
            following = rank - parallelism.tp
            is_first = parallelism.place(rank).tp_rank == 0 and following >= 0
            link.send(json_frame(FrameKind.WELCOME, RankWelcome(group, addresses[following] if is_first else "")))

        def check_links() -> None:
            check()
            for rank, link in links.items():
                if link.is_closed():
                    raise EngineFatal(f"rank {rank}: its link is closed")

        peers = _meet(place, group, port, None, check_links)
        unless_made.pop_all()
    return RankGroup(links, place, peers, peers.reports)


def join_stages(target: GrpcTarget, own: GrpcTarget, place: Place, facts: Mapping[str, str]) -> tuple[RankLink, Peers]:
    """As `member.join_ranks`. own: where the first rank of a middle stage takes hidden states"""
    with ExitStack() as unless_joined:
        is_dialled = place.tp_rank == 0 and not place.is_first and not place.is_last
        port = unless_joined.enter_context(closing(RankPort(replace(own, tls_name=target.tls_name)))) if is_dialled else None
        link = dial(target)
        unless_joined.callback(link.close)
        say_hello(link, RankHello(place.rank, dict(facts), machine(), own.address if is_dialled else ""), MAX_JSON_BYTES)
        kind, payload = link.receive()
        check_welcome(kind, payload)
        link.end_when_silent()
        said = read_json(RankWelcome, payload)

        def check() -> None:
            if link.is_closed():
                raise EngineFatal("rank 0: its link is closed")

        following = replace(target, address=said.next) if said.next else None
        peers = _meet(place, said.group, port, following, check)
        unless_joined.pop_all()
        if port is not None:
            port.close()
    return link, peers


def _meet(place: Place, group: str, port: RankPort | None, following: GrpcTarget | None, check: Check) -> StagePeers:
    """Each stage dials the next one before it waits for the one before it."""
    facts = {"group": group}
    with ExitStack() as unless_met:
        own = load_peers(_shared_memory(place, group, check), place)
        previous = after = None
        if following is not None:
            after = dial(following, check)
            unless_met.callback(after.close)
            after.send(json_frame(FrameKind.HELLO, RankHello(1, facts)))
        if port is not None:
            previous = gather(port.connections(check), 2, facts)[1]
        unless_met.pop_all()
    return StagePeers(own, place, previous, after)


def _shared_memory(place: Place, group: str, check: Check) -> mmap.mmap:
    """The same for all ranks of the stage."""
    tp, facts, name = place.parallelism.tp, {"group": group}, f"\0headrace-ranks-{group}-{place.stage}"
    if place.tp_rank:
        connected = until_connected(
            partial(connect_unix, name), f"rank {place.rank - place.tp_rank} is not on this machine", sleep=_checking(check)
        )
        with closing(RankLink(connected, {})) as link:
            if not _is_own_users(connected):
                raise EngineFatal("the memory of this rank's stage is offered by another user")
            fd = join(link, RankHello(place.tp_rank, facts))
    else:
        fd = os.memfd_create("headrace-ranks")
    try:
        if place.tp_rank == 0:
            os.ftruncate(fd, shared_bytes(place.parallelism))
            if tp > 1:
                _give(fd, name, tp, facts, check)
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def _give(fd: int, name: str, tp: int, facts: Mapping[str, str], check: Check) -> None:
    def own_users() -> Iterator[socket.socket]:
        for connected in connections(listening, check):
            if _is_own_users(connected):
                yield connected
            else:
                connected.close()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        links = gather(own_users(), tp, facts)
        try:
            welcome(links, fd)
        finally:
            for link in links.values():
                link.close()


def _checking(check: Check) -> Callable[[float], None]:
    def rest(seconds: float) -> None:
        check()
        time.sleep(seconds)

    return rest


def _is_own_users(connected: socket.socket) -> bool:
    """A socket without a path has no directory that keeps other users out."""
    _, user, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user) == os.geteuid()


def machine() -> str:
    """The same for processes that can share memory: one kernel, and one network namespace, in which sockets without a path are."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _why_apart(parallelism: Parallelism, hello: RankHello, links: Mapping[int, RankLink]) -> str:
    stage = parallelism.place(hello.rank).stage
    machines = {rank: link.hello.machine for rank, link in links.items()} | {0: machine()}
    for rank, its in machines.items():
        if parallelism.place(rank).stage == stage and its != hello.machine:
            rule = "tensor_parallel_size divides layers over the ranks of one machine, and pipeline_parallel_size over machines"
            return f"rank {hello.rank} is refused: it is on another machine than rank {rank} of the same stage; {rule}"
    return ""
