"""Tests the other ranks of an engine in this program as processes: what they are started with, why one ended, and that none outlives the
program. What they compute is tested in tests/e2e.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import until
from server_kit import is_alive

from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.llm import members
from headrace.llm.members import MemberProcesses, build_ranks
from headrace.machine import resources
from headrace.machine.gpus import Gpus
from headrace.tensor.host import threads

pytestmark = pytest.mark.process

MEMBER = """
import json, socket, sys
leash = socket.socket(fileno=int(sys.argv[-1]))
def say(**message):
    leash.sendall(json.dumps(message).encode() + b"\\n")
"""
PROGRAM = """
import os, sys, time
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.llm import members

members.COMMAND = (sys.executable, "-I", "-S", "-c", "import socket, sys; socket.socket(fileno=int(sys.argv[-1])).recv(1)")
started = members.MemberProcesses(EngineConfig(model="m", device="cpu", tensor_parallel_size=3).checked(), Path(sys.argv[1]))
if os.fork():
    print("started", flush=True)
time.sleep(3600)
"""
"""Starts members that wait on their leash, and then a fork, which would hold their leashes too."""


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(model="m", device="cpu", tensor_parallel_size=3).checked()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the program of a member, which has `leash` and `say`, at its end."""
    words = [sys.executable, "-I", "-S", "-c"]
    monkeypatch.setattr(members, "COMMAND", words)
    return words


def written(folder: Path, rank: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / f"r{rank}.json").read_text())
    return read


def test_members_share_the_machine_with_the_program(
    config: EngineConfig, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "allowed_cpus", lambda: [0, 1, 2, 3, 4, 5])
    monkeypatch.setattr(threads, "read_cpu_share", lambda: threads.CpuShare(12, 12, 6.0))
    command.append(f"{MEMBER}leash.recv(1)")
    with MemberProcesses(config, tmp_path) as started:
        files = [written(tmp_path, rank) for rank in (1, 2)]
        assert [(each["rank"], each["cpus"], each["num_neighbours"]) for each in files] == [(1, "2,3", 2), (2, "4,5", 2)]
        assert {each["rendezvous"] for each in files} == {f"unix:{started.rendezvous}"}
        assert {each["engine"]["memory_fraction"] for each in files} == {config.memory_fraction}
        assert (started.rank_0.memory_fraction, started.rank_0.num_threads) == (config.memory_fraction / 3, 2)
        started.check()
        pids = [child.pid for child in psutil.Process().children() if any(str(tmp_path) in word for word in child.cmdline())]
        assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_members_have_a_gpu_each_where_there_are_enough(
    config: EngineConfig, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "find_gpus", lambda: Gpus(("0", "1")))
    command.append(f"{MEMBER}leash.recv(1)")
    staged = replace(config, device="cuda", tensor_parallel_size=1, pipeline_parallel_size=3)
    with MemberProcesses(staged, tmp_path) as started:
        assert [(written(tmp_path, rank)["gpu"], written(tmp_path, rank)["num_neighbours"]) for rank in (1, 2)] == [("1", 0), ("0", 1)]
        assert started.rank_0.memory_fraction == config.memory_fraction / 2


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("say(event='failed', reason='its part does not fit.', can_retry=False); sys.exit(78)", "its part does not fit"),
        ("sys.exit(9)", "ended with status 9"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_why_a_member_ended_is_the_programs_error(config: EngineConfig, command: list[str], tmp_path: Path, code: str, reason: str) -> None:
    command.append(f"{MEMBER}if '/r2.json' not in ' '.join(sys.argv): leash.recv(1)\nelse: {code}")
    with MemberProcesses(config, tmp_path) as started, pytest.raises(ConfigError, match=f"^rank 2: {reason}\\.$"):
        until(lambda: started.check())


def test_a_temporary_directory_that_is_too_long_for_sockets_is_refused(
    config: EngineConfig, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match=r"^TMPDIR: .* has more than 90 bytes\. Sockets need a short path: set another TMPDIR\.$"):
        build_ranks(config, lambda _: None)
    assert not any(long.iterdir())


def test_more_threads_than_cpus_are_warned_of(
    config: EngineConfig, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resources, "num_allowed_cpus", lambda: 6)
    monkeypatch.setattr(resources, "cpu_quota", lambda: None)
    command.append(f"{MEMBER}leash.recv(1)")
    for num_threads in (2, 3):
        with MemberProcesses(replace(config, num_threads=num_threads), tmp_path) as started:
            assert started.rank_0.num_threads == num_threads
    [warning] = caplog.messages
    assert warning.startswith("the ranks of the model are 3 processes of 3 threads on 6 CPUs")


def test_no_member_is_left_by_a_program_that_is_killed_although_a_fork_of_it_lives(tmp_path: Path) -> None:
    with ExitStack() as ending:
        program = ending.enter_context(subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True))
        ending.callback(program.kill)
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        children = psutil.Process(program.pid).children()
        [fork] = [child.pid for child in children if "-I" not in child.cmdline()]
        ending.callback(os.kill, fork, signal.SIGKILL)
        running = [child.pid for child in children if child.pid != fork]
        assert len(running) == 2
        program.kill()
        until(lambda: not any(map(is_alive, running)))
        assert is_alive(fork)
