"""Tests the start and end of a gateway, without a process: a refused start with the reason for the supervisor, and the drain."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from local_workers import LocalWorkers

from headrace.core.errors import HeadraceError
from headrace.core.ids import RequestId
from headrace.gateway import process
from headrace.gateway.access.open_requests import OpenRequests
from headrace.gateway.config import config_from
from headrace.gateway.main import DRAIN_GRACE_S, drain
from headrace.gateway.text_host import TextContext
from headrace.wire.leash import Leash

pytestmark = pytest.mark.socket


class SpawnedWorkers(LocalWorkers):
    """num_killed: how often they were ended because the gateway did not start"""

    num_killed = 0

    def spawn(self) -> None:
        return

    def kill(self) -> None:
        self.num_killed += 1


Run = Callable[..., tuple[int, str, bool]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_folder: Path) -> Iterator[Run]:
    """Start a gateway that refuses to: its exit status, the reason that its supervisor is told, and whether it may try again."""
    told: list[tuple[str, bool]] = []
    (tmp_path / "state").mkdir(mode=0o700)

    def failed(_: Leash, reason: str, *, can_retry: bool) -> None:
        told.append((reason, can_retry))

    def run_one(folder: Path = text_folder, **changes: Any) -> tuple[int, str, bool]:
        model = {"name": "fox", "folder": str(folder), "replicas": [{"name": "r0", "address": f"unix:{tmp_path}/none"}]}
        options = {"models": [model], "port": 0, "state": str(tmp_path / "state"), **changes}
        workers = SpawnedWorkers(TextContext({}))
        monkeypatch.setattr(process, "text_workers", lambda _: workers)
        status = process.run_gateway(partial(config_from, options))
        assert workers.num_killed == ("prot" not in changes), "they do not outlive a start that failed"
        [(reason, can_retry)] = told
        return status, reason, can_retry

    monkeypatch.setattr(Leash, "failed", failed)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}, sys.getswitchinterval()
    yield run_one
    for number, handler in before[0].items():
        signal.signal(number, handler)
    sys.setswitchinterval(before[1])


def test_a_configuration_with_a_fault_is_said_and_not_tried_again(run: Run) -> None:
    status, reason, can_retry = run(prot=1)
    assert (status, can_retry, "Did you mean port?" in reason) == (process.REFUSED, False, True)


def test_what_only_opening_it_shows_is_said_and_not_tried_again(run: Run) -> None:
    status, reason, can_retry = run(request_log="/nonexistent/dir/log")
    assert (status, can_retry, "request_log" in reason) == (process.REFUSED, False, True)


def test_a_wrong_folder_of_the_only_model_is_said_with_it_and_logged_in_one_line_without(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, reason, can_retry = run(tmp_path / "none", request_log="off")
    assert (status, can_retry) == (process.REFUSED, False)
    assert reason.startswith("fox/tokenizer.json: is missing from the model folder")
    line, by_hand = capfd.readouterr().err.splitlines()
    assert "fox is not served until a reload: tokenizer.json: is missing from the model folder" in line
    assert by_hand == f"headrace gateway: {reason}"


def test_a_taken_port_is_said_and_may_be_tried_again(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, reason, can_retry = run(port=taken.getsockname()[1], request_log="off")
    assert (status, can_retry) == (process.CANNOT_BIND, True)
    assert "cannot listen on 127.0.0.1" in reason


# -- the drain, on virtual time ------------------------------------------------------------------------------------------------------


class Streams:
    """Two open requests. cut: the errors that they got"""

    def __init__(self) -> None:
        self.open_requests = OpenRequests(10)
        self.cut: list[HeadraceError] = []
        self.entries = [self.open_requests.admit(RequestId(f"r{index}"), "t", self._cut) for index in range(2)]
        for entry in self.entries:
            entry.__enter__()

    def _cut(self, error: HeadraceError) -> None:
        self.cut.append(error)

    def end(self) -> None:
        self.entries.pop().__exit__(None, None, None)


@pytest.mark.loop
async def test_a_drain_ends_with_the_last_request() -> None:
    loop = asyncio.get_running_loop()
    streams, began = Streams(), loop.time()
    for after_s in (3.0, 8.0):
        loop.call_later(after_s, streams.end)
    assert await drain(streams.open_requests, 10.0, loop.create_future())
    assert loop.time() - began == 8.0
    assert not streams.cut


@pytest.mark.loop
@pytest.mark.parametrize("insists", [False, True])
async def test_a_drain_whose_time_is_over_and_one_that_is_insisted_on_tell_every_request(insists: bool) -> None:
    loop = asyncio.get_running_loop()
    streams, hard, began = Streams(), loop.create_future(), loop.time()
    loop.call_later(3.0, streams.end)
    if insists:
        loop.call_later(5.0, hard.set_result, None)
    assert not await drain(streams.open_requests, 10.0, hard)
    assert loop.time() - began == (5.0 if insists else 10.0) + DRAIN_GRACE_S, "one request does not end although it is told"
    assert [type(error).__name__ for error in streams.cut] == ["Unavailable"]
