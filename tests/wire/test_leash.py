"""Tests the leash: what each end says, and that a child leaves with its supervisor."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from patience import PATIENCE_S, eventually

from headrace.core.errors import Unavailable
from headrace.core.load import AttemptCounts
from headrace.wire.leash import (
    Leash,
    LeashRequest,
    LeashRequestKind,
    LeashRequests,
    ModelStatus,
    ReloadRefused,
    ReplicaStatus,
    ReportedReplicaLoad,
)

pytestmark = pytest.mark.socket

LOAD = ReportedReplicaLoad(num_running=2, num_waiting=1, fill=0.25, num_finished=7, num_tokens=90, age_s=0.5)
STATUSES = {
    "fox": ModelStatus(
        {"fox-0": ReplicaStatus(True, "", 3, load=LOAD, attempts=AttemptCounts(9, 1, num_begun=8, ttft_s=1.5))}, 11, 2, wait_s=0.75
    ),
    "owl": ModelStatus({"owl-0": ReplicaStatus(False, "draining", 0)}),
    "far": ModelStatus({}),
}


@pytest.fixture
def ends() -> Iterator[tuple[Leash, socket.socket]]:
    """A child's leash, and the supervisor's socket."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    leash = Leash(theirs.detach())
    with ours:
        yield leash, ours
    assert leash._socket is not None
    leash._socket.close()


def heard(supervisor: socket.socket) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(supervisor.makefile("rb").readline())
    return said


def test_requests_reach_the_handler_in_order_and_whole(ends: tuple[Leash, socket.socket]) -> None:
    """Also those that came before there was a handler, and one whose bytes come in two pieces."""
    leash, supervisor = ends
    gone = threading.Event()
    leash.watch(gone.set)
    taken: list[LeashRequest] = []
    three = threading.Event()

    def handler(request: LeashRequest) -> None:
        taken.append(request)
        if len(taken) == 3:
            three.set()

    supervisor.sendall(b'{"event": "reload", "id": 1}\n{"event": "sta')
    leash.listen(handler)
    supervisor.sendall(b'tus", "id": 2}\n')
    supervisor.sendall(b'{"event": "reload", "id": 3}\n')
    assert three.wait(PATIENCE_S)
    kinds = LeashRequestKind.RELOAD, LeashRequestKind.STATUS, LeashRequestKind.RELOAD
    assert taken == [LeashRequest(kind, number) for number, kind in enumerate(kinds, 1)]
    supervisor.close()
    assert gone.wait(PATIENCE_S)


async def test_without_a_handler_requests_wait_for_the_next_one(ends: tuple[Leash, socket.socket]) -> None:
    leash, supervisor = ends
    leash.watch(lambda: None)
    taken: list[LeashRequest] = []
    came = threading.Event()
    leash.listen(lambda _: came.set())
    leash.listen(None)
    supervisor.sendall(b'{"event": "reload", "id": 7}\n')
    await eventually(lambda: bool(leash._unhandled))
    assert not came.is_set()
    leash.listen(taken.append)
    assert taken == [LeashRequest(LeashRequestKind.RELOAD, 7)]


def test_answers_carry_the_id_of_their_request(ends: tuple[Leash, socket.socket]) -> None:
    leash, supervisor = ends
    leash.reloaded(LeashRequest(LeashRequestKind.RELOAD, 4))
    assert heard(supervisor) == {"event": "reloaded", "id": 4}
    leash.refused(LeashRequest(LeashRequestKind.RELOAD, 5), "port: cannot change")
    assert heard(supervisor) == {"event": "refused", "id": 5, "reason": "port: cannot change"}
    leash.status(LeashRequest(LeashRequestKind.STATUS, 6), STATUSES)
    said = heard(supervisor)
    assert (said["event"], said["id"]) == ("status", 6)
    ready = {
        "ready": True,
        "reason": "",
        "open": 3,
        "refused": False,
        "load": [2, 1, 0.25, 7, 90, 0.5],
        "attempts": [9, 1, 0, 0, 0, 8, 1.5, 0.0],
    }
    assert said["models"]["fox"] == {"replicas": {"fox-0": ready}, "arrived": 11, "held": 2, "wait_s": 0.75}
    assert said["models"]["far"] == {"replicas": {}, "arrived": 0, "held": 0, "wait_s": 0.0}


def test_a_line_that_is_no_message_ends_the_child(ends: tuple[Leash, socket.socket]) -> None:
    """The thread that would notice an orphan may not end alone."""
    leash, supervisor = ends
    gone = threading.Event()
    thread_errors: list[object] = []
    threading.excepthook, kept = thread_errors.append, threading.excepthook
    try:
        leash.watch(gone.set)
        supervisor.sendall(b"not JSON\n")
        assert gone.wait(PATIENCE_S)
    finally:
        threading.excepthook = kept


# -- the supervisor's side --------------------------------------------------------------------------------------------------------


class Child:
    """What a supervisor has written to a child."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []
        self.asked = LeashRequests(lambda data: self.written.append(json.loads(data)))


@pytest.mark.loop
async def test_a_reload_ends_when_it_was_applied() -> None:
    child = Child()
    first, second = asyncio.ensure_future(child.asked.reload()), asyncio.ensure_future(child.asked.reload())
    await asyncio.sleep(0)
    assert child.written == [{"event": "reload", "id": 1}, {"event": "reload", "id": 2}]
    child.asked.take({"event": "refused", "id": 2, "reason": "models: is empty"})
    child.asked.take({"event": "reloaded", "id": 1})
    await first
    with pytest.raises(ReloadRefused, match="models: is empty"):
        await second


async def test_a_status_comes_back_as_it_was_given(ends: tuple[Leash, socket.socket]) -> None:
    leash, supervisor = ends
    child = Child()
    asked = asyncio.ensure_future(child.asked.status())
    await asyncio.sleep(0)
    leash.status(LeashRequest(LeashRequestKind.STATUS, child.written[0]["id"]), STATUSES)
    child.asked.take(heard(supervisor))
    assert await asked == STATUSES


@pytest.mark.loop
async def test_a_child_that_ends_answers_nothing_any_more() -> None:
    child = Child()
    asked = asyncio.ensure_future(child.asked.status())
    await asyncio.sleep(0)
    child.asked.close()
    with pytest.raises(Unavailable):
        await asked
    with pytest.raises(Unavailable):
        await child.asked.reload()


@pytest.mark.loop
async def test_an_answer_that_nothing_waits_for_is_ignored() -> None:
    child = Child()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.asked.reload(), 0.01)
    child.asked.take({"event": "reloaded", "id": 1})
    child.asked.take({"event": "ready", "port": 1})
