"""Tests one engine as one real process: its exits, its leash, its signals."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE_S, eventually
from wire_kit import connected, read_all, request, served, signal_until_gone, socket_dir

from headrace.core.errors import ConfigError, EngineFatal, Unavailable
from headrace.core.plan_codec import load_plans
from headrace.engine.server.config import ProcessConfig
from headrace.engine.server.process import EngineExitCode, _run_member, _run_until_stopped, _until_end
from headrace.lab import fake_engine
from headrace.lab.fake_runner import FakeOptions, fake_answer
from headrace.wire.client import ConnectionState, ReplicaClient
from headrace.wire.leash import ORPHANED

pytestmark = pytest.mark.process

ENDLESS = 4000


def config_file(folder: Path, fake: dict[str, Any]) -> Path:
    path = folder / "e.json"
    content = {"replica": "fake-0", "address": f"unix:{folder}/e.sock", "drain_timeout_s": 300, "engine": {"model": "fake"}, "fake": fake}
    path.write_text(json.dumps(content))
    return path


class EngineProcess:
    """A fake engine started as the supervisor would start it."""

    def __init__(self, folder: Path, **fake: Any) -> None:
        self.address = f"unix:{folder}/e.sock"
        path = config_file(folder, fake)
        self.leash, theirs = socket.socketpair()
        self.leash.settimeout(PATIENCE_S)
        command = [sys.executable, "-m", "headrace.lab.fake_engine", "--config", str(path), "--parent-fd", str(theirs.fileno())]
        env = {**os.environ, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True, stderr=subprocess.DEVNULL, env=env)
        theirs.close()

    def hear(self) -> dict[str, Any]:
        """The next thing the process says through its leash."""
        with self.leash.makefile("rb") as lines:
            said: dict[str, Any] = json.loads(lines.readline())
            return said

    async def wait(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def close(self) -> None:
        self.leash.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    with socket_dir() as path:
        yield path


@pytest.fixture
def start(folder: Path) -> Iterator[Any]:
    started: list[EngineProcess] = []

    def start_one(**fake: Any) -> EngineProcess:
        started.append(EngineProcess(folder, **fake))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


async def test_a_stopped_process_is_noticed_and_after_sigterm_its_streams_still_end_whole(start: Any, folder: Path) -> None:
    """One life: SIGUSR1 writes the last plans where only the user can read them, SIGSTOP is silence, SIGTERM a drain that exits zero."""
    engine = start(step_seconds=0.01)
    assert engine.hear()["event"] == "ready"
    async with ReplicaClient(engine.address) as replica:
        await replica.wait_connected(PATIENCE_S)
        await read_all(replica.submit(request("before", max_tokens=5)))
        engine.process.send_signal(signal.SIGUSR1)
        await eventually(lambda: any(path.stat().st_size for path in folder.glob("headrace-plans-*.hrplan")))
        one = request("r", max_tokens=100)
        stream = replica.submit(one)
        first = await stream.__anext__()
        engine.process.send_signal(signal.SIGSTOP)
        await eventually(lambda: replica.state is ConnectionState.SILENT)
        with pytest.raises(Unavailable, match="silent"):
            replica.submit(request("late"))
        engine.process.send_signal(signal.SIGTERM)
        engine.process.send_signal(signal.SIGCONT)
        rest = await read_all(stream)
        assert [*first.token_ids, *rest[0]] == fake_answer(one, 0, 100, FakeOptions())  # type: ignore[union-attr]
        assert await engine.wait() == EngineExitCode.DRAINED
    (path,) = folder.glob("headrace-plans-*.hrplan")
    assert path.stat().st_mode & 0o777 == 0o600
    assert sum(plan.num_tokens for plan in load_plans(path.read_bytes())) >= 5


async def test_an_insistent_sigterm_does_not_wait(start: Any) -> None:
    engine = start(step_seconds=0.02)
    engine.hear()
    async with ReplicaClient(engine.address) as replica:
        await replica.wait_connected(PATIENCE_S)
        stream = replica.submit(request("r", max_tokens=ENDLESS))
        await stream.__anext__()
        await signal_until_gone(engine.process, signal.SIGTERM)
        assert await engine.wait() == EngineExitCode.INTERRUPTED
        with pytest.raises(Unavailable):
            await read_all(stream)


async def test_the_process_ends_when_its_leash_breaks_even_while_a_step_hangs(start: Any) -> None:
    engine = start(stall_after_steps=2)
    engine.hear()
    async with ReplicaClient(engine.address) as replica:
        await replica.wait_connected(PATIENCE_S)
        replica.submit(request("r", max_tokens=ENDLESS))
        await eventually(lambda: replica.snapshot is not None and replica.snapshot.load.step_age_s is not None)
        engine.leash.close()
        assert await engine.wait() == ORPHANED


async def test_a_dead_device_ends_the_process_with_its_own_status(start: Any) -> None:
    engine = start(die_after_steps=5)
    engine.hear()
    async with ReplicaClient(engine.address) as replica:
        await replica.wait_connected(PATIENCE_S)
        with pytest.raises(Unavailable):
            await read_all(replica.submit(request("r", max_tokens=ENDLESS)))
        assert await engine.wait() == EngineExitCode.ENGINE_DIED
    said = engine.hear()
    assert said["can_retry"]
    assert "the fake device is gone" in said["reason"]


# the same in this process


class Told:
    """The leash of a process that is not there."""

    is_held = True

    def __init__(self) -> None:
        self.failures: list[tuple[str, bool]] = []
        self.num_ready = 0

    def watch(self) -> None:
        """Nothing could break."""

    def ready(self) -> None:
        self.num_ready += 1

    def failed(self, reason: str, *, can_retry: bool) -> None:
        self.failures.append((reason, can_retry))


@pytest.fixture
def signal_actions() -> Iterator[None]:
    """As they were: a process that was stopped ignores later signals."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.socket
@pytest.mark.usefixtures("signal_actions")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_is_enough_while_the_model_is_loading(number: signal.Signals, folder: Path) -> None:
    is_loaded, kill = threading.Event(), functools.partial(os.kill, os.getpid(), number)
    loop = asyncio.get_running_loop()

    def make_engine(_outbox: object) -> Any:
        loop.call_soon_threadsafe(kill)
        is_loaded.wait()
        raise ConfigError("model", "came too late")

    config = ProcessConfig(replica="r", address=f"unix:{folder}/e.sock")
    assert await _run_until_stopped(make_engine, config, Told()) is EngineExitCode.DRAINED  # type: ignore[arg-type]
    is_loaded.set()


@pytest.mark.socket
@pytest.mark.usefixtures("signal_actions")
@pytest.mark.parametrize(
    ("fake", "mode", "reason"),
    [
        ({"refuse": "model.safetensors is truncated"}, 0o700, "fake: model.safetensors is truncated."),
        ({"no_such_option": 1}, 0o700, "fake.no_such_option"),
        ({}, 0o755, "0700"),
    ],
    ids=["a checkpoint that is refused", "a wrong key", "an open directory"],
)
def test_what_another_start_would_not_mend_is_not_worth_a_retry(
    fake: dict[str, Any], mode: int, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(mode)
    told, left = Told(), list[int]()
    monkeypatch.setattr(fake_engine, "Leash", lambda _: told)
    monkeypatch.setattr(fake_engine, "leave", left.append)
    monkeypatch.setattr(fake_engine, "set_up_logging", lambda: None)
    fake_engine.main(["--config", str(config_file(folder, fake))])
    assert left == [EngineExitCode.REFUSED]
    [(said, can_retry)] = told.failures
    assert reason in said
    assert not can_retry


@pytest.mark.socket
@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_heartbeat_that_dies_ends_the_process_and_is_logged_with_its_traceback(
    is_draining: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it gateways take the engine for silent, and nobody would know why."""
    loop, told = asyncio.get_running_loop(), Told()
    async with served(FakeOptions(step_seconds=0.02)) as engine, connected(engine) as replica:
        stream = replica.submit(request("r", max_tokens=ENDLESS))
        await stream.__anext__()
        thread = SimpleNamespace(ended=loop.create_future(), built=loop.create_future())
        stop = SimpleNamespace(soft=loop.create_future(), hard=loop.create_future())
        config = ProcessConfig(replica="fake-0", address=engine.address)
        if is_draining:
            stop.soft.set_result("stopping")
        task = asyncio.create_task(_until_end(engine.service, thread, stop, config, told))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        engine.service.announce = broken  # type: ignore[method-assign]
        async with asyncio.timeout(PATIENCE_S):
            code = await task
        assert code is (EngineExitCode.INTERRUPTED if is_draining else EngineExitCode.ENGINE_DIED)
        assert [can_retry for _, can_retry in told.failures] == ([] if is_draining else [True])
        assert "the heartbeat died" in caplog.text
        assert "not a digest" in caplog.text
        assert "Traceback" in caplog.text


class ScriptedMember:
    """A rank whose steps end when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs, self.ends, self._error = threading.Event(), threading.Event(), error

    def run(self) -> None:
        self.runs.set()
        assert self.ends.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error


@pytest.mark.socket
@pytest.mark.usefixtures("signal_actions")
@pytest.mark.parametrize("is_insistent", [False, True])
async def test_a_rank_goes_on_after_sigterm_until_rank_0_has_ended_or_a_second_one(
    is_insistent: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("headrace.machine.signals.DUPLICATE_SIGNAL_S", 0.0)
    member, leash = ScriptedMember(), Told()
    ended = asyncio.create_task(_run_member(lambda: member, leash))  # type: ignore[arg-type]
    await eventually(lambda: leash.num_ready == 1 and member.runs.is_set())
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(lambda: "SIGTERM: this rank goes on until rank 0 has ended" in caplog.text)
    assert not ended.done()
    if is_insistent:
        await asyncio.sleep(1.0)  # sooner it would be taken for the same signal
        os.kill(os.getpid(), signal.SIGTERM)
        assert await ended is EngineExitCode.INTERRUPTED
    member.ends.set()
    assert is_insistent or await ended is EngineExitCode.DRAINED
    assert not leash.failures


@pytest.mark.socket
@pytest.mark.usefixtures("signal_actions")
async def test_a_rank_that_dies_says_so() -> None:
    member, leash = ScriptedMember(EngineFatal("its link is closed")), Told()
    member.ends.set()
    assert await _run_member(lambda: member, leash) is EngineExitCode.ENGINE_DIED  # type: ignore[arg-type]
    assert leash.failures == [("the rank died: EngineFatal('its link is closed')", True)]


@pytest.mark.socket
@pytest.mark.usefixtures("signal_actions")
@pytest.mark.parametrize(
    ("error", "code", "can_retry"),
    [
        (ConfigError("rank", "is refused"), EngineExitCode.REFUSED, False),
        (EngineFatal("its link is closed"), EngineExitCode.ENGINE_DIED, True),
    ],
)
async def test_a_rank_that_cannot_join_says_why(error: Exception, code: EngineExitCode, can_retry: bool) -> None:
    def make_member() -> Any:
        raise error

    leash = Told()
    assert await _run_member(make_member, leash) is code  # type: ignore[arg-type]
    [(reason, said)] = leash.failures
    assert str(error) in reason
    assert said == can_retry


def broken() -> None:
    raise RuntimeError("not a digest")
