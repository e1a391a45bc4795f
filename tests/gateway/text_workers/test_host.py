"""Tests the gateway's end of the text host, on virtual time: no message of it is lost, and a lost host is started again.

A host that cannot be started costs little and says so once. The host is scripted; real ones are in test_text_workers.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
import text_kit
from patience import eventually
from scripted_host import HostScript, scripted_hosts

from headrace.core.errors import CheckpointError, InvalidRequest, Overloaded, Unavailable
from headrace.gateway.config import config_from
from headrace.gateway.http.config import Limits
from headrace.gateway.http.errors import ContextLengthExceeded
from headrace.gateway.process import text_workers
from headrace.gateway.text_workers import frames, processes
from headrace.gateway.text_workers.frames import Worker
from headrace.gateway.text_workers.host_socket import HostSocket
from headrace.gateway.text_workers.limits import HEAVY_BYTES
from headrace.gateway.text_workers.pool import RETRY_S, TextPool
from headrace.gateway.text_workers.processes import HostProcess, WorkerProcess
from headrace.gateway.upstream.generation_request import Conversation
from headrace.gateway.upstream.own.model_text import ModelText
from headrace.text.folder import load_text

pytestmark = pytest.mark.loop

HEAVY = "fox " * (HEAVY_BYTES // 2)


@pytest.fixture
def script() -> Iterator[HostScript]:
    with scripted_hosts() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return text_kit.save_byte_level(tmp_path / "m")


def now() -> float:
    return asyncio.get_running_loop().time()


def host_of(**folders: Path) -> HostProcess:
    config = frames.HostConfig({name: str(folder) for name, folder in folders.items()})
    return HostProcess(config, clock=asyncio.get_running_loop().time)


@asynccontextmanager
async def workers(folder: Path, *, max_workers: int = 1, max_queue: int = 100) -> AsyncIterator[tuple[ModelText, TextPool, HostProcess]]:
    host = host_of(fox=folder)
    async with TextPool(host, max_workers=max_workers, max_queue=max_queue, clock=host._clock) as pool:
        await eventually(lambda: len(pool._idle) == max_workers)
        yield ModelText(pool, "fox", load_text(folder).tokenizer), pool, host
        pool.check()
    assert host._process is None


async def encode(text: ModelText, content: str = "Hello") -> list[int]:
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    ids, _ = await text.encode_chat(Conversation(messages=messages), max_model_len=None, tenant="t")
    return list(ids)


def heavy_job(text: ModelText) -> asyncio.Task[object]:
    return asyncio.ensure_future(text.encode([HEAVY], add_special_tokens=False, max_model_len=None, tenant="t"))


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


async def test_a_kill_that_meets_a_full_socket_is_done_when_the_host_reads(script: HostScript, folder: Path) -> None:
    """It was dropped: the worker ran on, and when it had answered it was neither ended nor given a job, for ever."""
    async with workers(folder) as (text, pool, host):
        script.can_work.clear()
        heavy = heavy_job(text)
        await eventually(lambda: len(pool._running) == 1)
        script.is_stopped = True
        channel = host._socket._channel if host._socket is not None else None
        assert channel is not None
        with suppress(BlockingIOError):
            while True:
                channel.send(b'{"kill": 0}\n')  # nobody's number
        heavy.cancel()
        await asyncio.gather(heavy, return_exceptions=True)
        await asyncio.sleep(1)
        script.can_work.set()
        script.go_on()
        await eventually(lambda: len(pool._idle) == 1)
        assert pool.num_killed == {"left": 1}
        assert await encode(text)
        assert len(script.processes) == 1


async def test_a_host_that_does_nothing_any_more_is_ended_with_its_workers_after_ten_seconds(script: HostScript, folder: Path) -> None:
    async with workers(folder) as (text, pool, _):
        script.can_work.clear()
        heavy = heavy_job(text)
        await eventually(lambda: len(pool._running) == 1)
        script.is_stopped = True
        killed_at, stuck = now(), script.current
        heavy.cancel()
        await eventually(lambda: len(script.processes) == 2)
        assert stuck.ended_at - killed_at == pytest.approx(processes.KILL_TIMEOUT_S)
        script.can_work.set()
        script.go_on()
        assert await encode(text)


async def test_who_leaves_frees_its_place_and_its_worker(script: HostScript, folder: Path) -> None:
    async with workers(folder) as (text, pool, _):
        script.can_work.clear()
        heavy = heavy_job(text)
        await eventually(lambda: len(pool._running) == 1)
        waiting = [asyncio.create_task(encode(text)) for _ in range(10)]
        await eventually(lambda: pool.reading().num_waiting == 10)
        for task in waiting[:9]:
            task.cancel()
        await eventually(lambda: pool.reading().num_waiting == 1)
        heavy.cancel()
        await eventually(lambda: pool.num_killed == {"left": 1})
        script.can_work.set()
        assert await waiting[9]
        assert pool.reading().num_waiting_bytes == 0


# -- queues ----------------------------------------------------------------------------------------------------------------------


async def test_heavy_jobs_leave_one_worker_to_short_ones(script: HostScript, folder: Path) -> None:
    async with workers(folder, max_workers=2) as (text, pool, _):
        script.can_work.clear()
        heavy = [heavy_job(text) for _ in range(4)]
        await asyncio.sleep(1)
        assert (len(pool._running), pool.reading().num_waiting) == (1, 3)
        short = asyncio.create_task(encode(text))
        await eventually(lambda: len(pool._running) == 2)
        script.can_work.set()
        assert await short
        assert len(await asyncio.gather(*heavy)) == 4


async def test_a_burst_of_a_thousand_short_prompts_is_read(script: HostScript, folder: Path) -> None:
    """The pool refused 670 of them for its 256 places although the engine queues 1,024."""
    async with workers(folder, max_workers=2, max_queue=Limits().max_text_queue) as (text, pool, _):
        got = await asyncio.gather(*(encode(text, f"Hello {number}") for number in range(1000)))
        assert len(got) == 1000
        assert pool.num_refused == 0


async def test_a_full_queue_refuses_what_it_has_no_place_for(script: HostScript, folder: Path) -> None:
    async with workers(folder, max_queue=5) as (text, pool, _):
        got = await asyncio.gather(*(encode(text) for _ in range(20)), return_exceptions=True)
        refused = [one for one in got if isinstance(one, Overloaded)]
        assert pool.num_refused == len(refused) == 20 - 1 - 5
        assert await encode(text)


async def test_a_text_is_split_by_a_worker_only(script: HostScript, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where spaces do not count, the bound splits the text: 8 ms of the event loop per megabyte."""
    text_kit.let_tokens_swallow_spaces(folder)
    loops = []
    monkeypatch.setattr("headrace.gateway.upstream.own.model_text.check_fits", lambda *_: loops.append(1))
    bound = load_text(folder).tokenizer.bound
    assert bound is not None
    assert not bound.counts_spaces
    async with workers(folder) as (text, _, _):
        with pytest.raises(ContextLengthExceeded):
            await text.encode(["x " * 10_000], add_special_tokens=False, max_model_len=100, tenant="t")
    assert not loops


# -- starting again --------------------------------------------------------------------------------------------------------------


async def test_a_lost_host_fails_what_ran_and_is_started_again(script: HostScript, folder: Path) -> None:
    async with workers(folder) as (text, pool, _):
        script.can_work.clear()
        running = heavy_job(text)
        waiting = asyncio.create_task(encode(text))
        await eventually(lambda: len(pool._running) == 1)
        script.current.kill()
        with pytest.raises(Unavailable):
            await running
        script.can_work.set()
        assert await waiting
        assert pool.num_killed == {"lost": 1}
        first, second = script.processes
        assert second.launched_at - first.ended_at == pytest.approx(processes.RESTART_S)


async def test_a_signal_from_outside_costs_no_job_but_the_workers_own(script: HostScript, folder: Path) -> None:
    async with workers(folder) as (text, pool, _):
        script.current.kill_workers()
        await eventually(lambda: not pool._idle)
        assert await encode(text)
        assert not pool.num_killed


async def test_a_fork_that_fails_is_tried_again_and_the_host_stays(script: HostScript, folder: Path) -> None:
    script.num_bad_forks = 3
    began = now()
    async with workers(folder, max_workers=2) as (text, _, _):
        assert len(script.processes) == 1
        assert now() - began == pytest.approx(2 * RETRY_S, abs=0.1), "two workers, and three forks that failed"
        assert await encode(text)


async def test_a_host_that_does_not_start_is_tried_ever_more_rarely_and_logged_once(
    script: HostScript, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try loads every tokenizer and compiles every template: once a second for ever, with a line of the log for each."""
    caplog.set_level(logging.INFO, "headrace.gateway")

    async def lose(num_tries: int) -> list[float]:
        """End the host; the pauses before each try until one runs again."""
        caplog.clear()
        num = len(script.processes)
        script.current.kill()
        script.ending = 3 if num_tries > 1 else None
        await eventually(lambda: len(script.processes) == num + num_tries - 1, 600)
        script.ending = None
        await eventually(lambda: len(script.processes) == num + num_tries and not host.reason, 600)
        tries = script.processes[num - 1 :]
        return [after.launched_at - before.ended_at for before, after in pairwise(tries)]

    host = host_of(fox=folder)
    await host.start()
    try:
        assert await lose(9) == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0])
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO"], "gone; does not start, and why; runs again"
        assert "status 3" in caplog.text
        await asyncio.sleep(processes.STABLE_S - 1.0)
        assert await lose(1) == pytest.approx([60.0]), "it did not stay: whatever ended it may do so again"
        await asyncio.sleep(processes.STABLE_S)
        assert await lose(1) == pytest.approx([1.0])
    finally:
        await host.close()


async def test_a_restart_whose_only_model_cannot_be_read_is_tried_again(script: HostScript, folder: Path, tmp_path: Path) -> None:
    """The failed start cancelled the task that tried: no text was read any more, and every request for it hung."""
    hidden = tmp_path / "hidden"
    async with workers(folder) as (text, pool, host):
        assert not pool.reason
        folder.rename(hidden)
        script.current.kill()
        await eventually(lambda: host.reason != "")
        assert pool.reason == host.reason
        await eventually(lambda: len(script.processes) == 3)
        hidden.rename(folder)
        assert await encode(text)
        assert not pool.reason


async def test_a_folder_that_is_damaged_at_a_restart_fails_its_model_alone(script: HostScript, tmp_path: Path) -> None:
    folders = {name: text_kit.save_byte_level(tmp_path / name) for name in ("fox", "owl")}
    tokenizer = load_text(folders["fox"]).tokenizer
    async with TextPool(host_of(**folders), max_workers=1, max_queue=9) as pool:
        (folders["fox"] / "tokenizer.json").unlink()
        script.current.kill()
        await eventually(lambda: [*pool.failures] == ["fox"] and not pool.reason)
        assert await encode(ModelText(pool, "owl", tokenizer))
        with pytest.raises(Unavailable):
            await encode(ModelText(pool, "fox", tokenizer))


async def test_while_the_host_is_down_jobs_wait_for_a_worker_and_no_longer(script: HostScript, folder: Path) -> None:
    async with workers(folder) as (text, pool, host):
        script.ending = 3
        lost_at = now()
        script.current.kill()
        await eventually(lambda: host.reason != "")
        with pytest.raises(Unavailable):
            await encode(text)
        assert now() - lost_at == pytest.approx(RETRY_S + processes.ADD_TIMEOUT_S)
        with pytest.raises(Unavailable):
            await encode(text)
        assert now() - lost_at == pytest.approx(RETRY_S + processes.ADD_TIMEOUT_S), "at once, while there is none"
        script.ending = None
        await eventually(lambda: not pool.reason, 600)
        assert await encode(text)


async def test_a_host_that_never_gets_ready_is_given_up_after_two_minutes(script: HostScript, folder: Path) -> None:
    script.is_silent = True
    host, began = host_of(fox=folder), now()
    with pytest.raises(CheckpointError, match="was not loaded within 120 s"):
        await host.start()
    assert now() - began == pytest.approx(processes.START_TIMEOUT_S)
    assert script.current.poll() == -signal.SIGKILL


class NoOwner:
    def answered(self, worker: Worker, answer: frames.AnyAnswer, tail: memoryview) -> None:
        raise AssertionError("it was asked for nothing")

    def ended(self, worker: Worker, number: int) -> None:
        pass


async def test_a_host_that_is_lost_while_it_forks_leaves_no_open_transport(
    script: HostScript, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports: list[asyncio.BaseTransport] = []

    def connected(worker: WorkerProcess, transport: asyncio.BaseTransport) -> None:
        transports.append(transport)
        connection_made(worker, transport)

    def lost(channel: HostSocket, message: dict[str, object], descriptor: int) -> None:
        say_with(channel, message, descriptor)
        asyncio.get_running_loop().call_soon(host._lost)  # comes before the new worker's connection is made

    connection_made, say_with = WorkerProcess.connection_made, HostSocket.say_with
    async with workers(folder) as (_, _, host):
        with monkeypatch.context() as patch:
            patch.setattr(WorkerProcess, "connection_made", connected)
            patch.setattr(HostSocket, "say_with", lost)
            with pytest.raises(OSError, match="could not fork"):
                await host._fork(NoOwner())
        assert [transport.is_closing() for transport in transports] == [True]
        await eventually(lambda: not host.reason)


async def test_keys_of_foreign_servers_are_not_in_the_hosts_environment(script: HostScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", "a-far-key")
    monkeypatch.setenv("OTHER", "inherited")
    upstream = {"url": "http://127.0.0.1:9/v1", "api_key_env": "FAR_KEY"}
    host = text_workers(config_from({"models": [{"name": "far", "upstreams": [upstream]}]}))
    await host.start()
    environment = script.current.environment
    assert ("FAR_KEY" in environment, environment.get("OTHER")) == (False, "inherited")
    await host.close()


@pytest.mark.pure
@pytest.mark.parametrize("value", [7.5, "it's", None, ["a"]])
def test_a_refusal_of_a_worker_shows_the_value_as_the_worker_would(value: object) -> None:
    refused = InvalidRequest("messages[0].content", "text", value, "Send text.")
    assert str(frames.error_of(frames.refusal_of(refused))) == str(refused)
