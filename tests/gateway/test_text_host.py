"""The gateway's end of the text host: what it says is never lost, and a host that cannot be started costs little and says so once."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import text_kit
from gateway_kit import eventually

from headrace.core.errors import InvalidRequest
from headrace.gateway.config import Limits, config_from
from headrace.gateway.text_workers import frames, processes
from headrace.gateway.text_workers.configured import text_workers
from headrace.gateway.text_workers.host_socket import HostSocket
from headrace.gateway.text_workers.limits import HEAVY_BYTES
from headrace.gateway.text_workers.model_text import ModelText
from headrace.gateway.text_workers.pool import TextPool
from headrace.gateway.text_workers.processes import HostProcess
from headrace.text.folder import load_text

CONFIG = frames.HostConfig({}, Limits())


# -- the socket ------------------------------------------------------------------------------------------------------------------


def lines(channel: socket.socket) -> list[dict[str, int]]:
    """All that has come."""
    data = b""
    with suppress(BlockingIOError):
        while True:
            data += channel.recv(1 << 16)
    return [json.loads(line) for line in data.splitlines()]


async def test_what_a_full_socket_does_not_take_is_said_in_order_when_it_does() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        host = HostSocket(ours, {"config": 0})
        num = 0
        while not host._unsent and num < 100_000:
            host.say({"kill": num})
            num += 1
        assert host._unsent
        for more in range(3):
            host.say({"kill": num + more})
        with pytest.raises(BlockingIOError):
            host.say_with({"fork": 5}, theirs.fileno())
        got: list[dict[str, int]] = []

        def is_all_there() -> bool:
            got.extend(lines(theirs))
            return len(got) == num + 4

        await eventually(is_all_there)
        assert got == [{"config": 0}, *({"kill": number} for number in range(num + 3))]
        host.say_with({"fork": 5}, theirs.fileno())
        assert lines(theirs) == [{"fork": 5}]
        host.close()


async def test_what_is_said_to_one_who_is_gone_is_forgotten() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    host = HostSocket(ours, {"config": 0})
    host.say({"kill": 1})
    assert not host._unsent
    assert host.read() is None
    host.close()


# -- kills -----------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stopped_host(folder: Path) -> AsyncIterator[tuple[TextPool, HostProcess, ModelText, asyncio.Task[object]]]:
    """One worker in the middle of a heavy job, its host stopped by a signal. So is the worker: the job lasts until it is killed."""
    host = HostProcess(frames.HostConfig({"fox": str(folder)}, Limits()))
    async with TextPool(host, max_workers=1, max_queue=9, max_queue_bytes=8 << 20) as pool:
        text = ModelText(pool, "fox", load_text(folder).tokenizer)
        await eventually(lambda: len(pool._idle) == 1)
        assert host._process is not None
        (worker,) = psutil.Process(host._process.pid).children()
        worker.suspend()
        job = text.encode(["fox " * (HEAVY_BYTES * 4)], add_special_tokens=False, max_model_len=None, tenant="t")
        heavy: asyncio.Task[object] = asyncio.create_task(job)
        await eventually(lambda: len(pool._running) == 1)
        os.kill(host._process.pid, signal.SIGSTOP)
        yield pool, host, text, heavy
        pool.check()


async def test_a_kill_that_meets_a_full_socket_is_done_when_the_host_reads(tmp_path: Path) -> None:
    """It was dropped: the worker ran on, and when it had answered it was neither ended nor given a job, for ever."""
    async with stopped_host(text_kit.save_byte_level(tmp_path / "m")) as (pool, host, text, heavy):
        assert host._process is not None
        first = host._process.pid
        channel = host._socket._channel if host._socket is not None else None
        assert channel is not None
        with suppress(BlockingIOError):
            while True:
                channel.send(b'{"kill": 0}\n')  # nobody's number
        heavy.cancel()
        await asyncio.gather(heavy, return_exceptions=True)
        await asyncio.sleep(0)
        os.kill(first, signal.SIGCONT)
        await eventually(lambda: len(pool._idle) == 1)
        assert pool.num_killed == {"left": 1}
        assert list(await text.encode(["fox"], add_special_tokens=False, max_model_len=None, tenant="t"))
        assert host._process.pid == first


async def test_a_host_that_does_nothing_any_more_is_ended_with_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(processes, "RESTART_S", 0.01)
    async with stopped_host(text_kit.save_byte_level(tmp_path / "m")) as (_pool, host, text, heavy):
        assert host._process is not None
        first = host._process.pid
        heavy.cancel()
        await asyncio.gather(heavy, return_exceptions=True)
        async with asyncio.timeout(60):
            assert list(await text.encode(["fox"], add_special_tokens=False, max_model_len=None, tenant="t"))
        assert host._process.pid != first


# -- starting again, on virtual time ---------------------------------------------------------------------------------------------

HOST = """test -e "$0" || exit 3; echo '{"ready": true}' >&0; exec cat <&0"""
"""A host that loads nothing, if the file of its argument is there."""


class VirtualTime:
    """Time passes only when somebody sleeps, or `now` is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.on_pause: Callable[[int], None] = lambda _: None

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        self.on_pause(len(self.pauses))
        await asyncio.sleep(0)


async def test_a_host_that_does_not_start_is_tried_ever_more_rarely_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try loads every tokenizer and compiles every template: once a second for ever, with a line of the log for each."""
    caplog.set_level(logging.INFO, "headrace.gateway")
    flag, time = tmp_path / "flag", VirtualTime()
    flag.touch()
    host = HostProcess(CONFIG, ("sh", "-c", HOST, str(flag)), clock=time, sleep=time.sleep)

    async def lose() -> None:
        """End the host, and wait until one runs again."""
        caplog.clear()
        time.pauses.clear()
        assert host._process is not None
        first = host._process.pid
        host._process.kill()
        await eventually(lambda: host._process is not None and host._process.pid != first and host.reason == "")

    await host.start()
    try:
        flag.unlink()
        time.on_pause = lambda num: flag.touch() if num == 9 else None
        await lose()
        assert time.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO"], "gone; does not start, and why; runs again"
        assert "status 3" in caplog.text

        time.now += processes.STABLE_S - 1.0
        await lose()
        assert time.pauses == [60.0], "it did not stay: whatever ended it may do so again"
        time.now += processes.STABLE_S
        await lose()
        assert time.pauses == [1.0]
    finally:
        await host.close()


async def test_keys_of_foreign_servers_are_not_in_the_hosts_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", "a-far-key")
    monkeypatch.setenv("OTHER", "inherited")
    upstream = {"url": "http://127.0.0.1:9/v1", "api_key_env": "FAR_KEY"}
    host = text_workers(config_from({"models": [{"name": "far", "upstreams": [upstream]}]}))
    await host.start()
    try:
        assert host._process is not None
        environment = psutil.Process(host._process.pid).environ()
        assert ("FAR_KEY" in environment, environment.get("OTHER")) == (False, "inherited")
    finally:
        await host.close()


@pytest.mark.parametrize("value", [7.5, "it's", None, ["a"]])
def test_a_refusal_of_a_worker_shows_the_value_as_the_worker_would(value: object) -> None:
    refused = InvalidRequest("messages[0].content", "text", value, "Send text.")
    assert str(frames.error_of(frames.refusal_of(refused))) == str(refused)
