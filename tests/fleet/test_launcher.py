"""Tests a child process as its launcher sees it: what it says on the leash, what it prints, how it ends, and what it inherits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Collection
from typing import Any

import pytest
from patience import PATIENCE_S

from headrace.fleet.launcher import Child, Failure, ProcessLauncher

pytestmark = pytest.mark.process

SECRETS = {
    "HEADRACE_API_KEY": "a-secret-key",
    "HEADRACE_GATEWAY__API_KEYS": "[{key: a-secret-key}]",
    "HEADRACE_GATEWAY__API_KEYS__0__KEY": "a-secret-key",
    "HEADRACE_SITE_KEY": "ab" * 16,
}
FAR_KEY = "A_FOREIGN_SERVERS_KEY"

PROGRAM = """
import json, os, signal, socket, sys
leash = socket.socket(fileno=int(sys.argv[-1]))
def say(**message):
    leash.sendall(json.dumps(message).encode() + b"\\n")
"""


async def launched(code: str, *, forward: bool = True, withheld: Collection[str] = ()) -> Child:
    """A Python program that has `leash` and `say`."""
    command = (sys.executable, "-I", "-S", "-c", PROGRAM + code)
    return await ProcessLauncher().launch("engine-7", command, forward=forward, withheld=withheld)


async def ended(child: Child) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await child.exited


async def test_a_child_says_that_it_is_ready_or_why_it_ends_and_its_words_are_logged_under_its_label(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    child = await launched("print('I serve', flush=True)\nsay(event='ready', port=5)\nleash.recv(1)")
    async with asyncio.timeout(PATIENCE_S):
        assert await child.ready == {"event": "ready", "port": 5}
    child.terminate()
    assert await ended(child) == -signal.SIGTERM
    said = "say(event='failed', reason='it is truncated', can_retry=False)"
    refused = await launched(f"{said}\nprint('my last words', end='')\nsys.exit(9)")
    assert (await ended(refused), refused.failure) == (9, Failure("it is truncated", can_retry=False))
    assert refused.ready.cancelled()
    printed = [(getattr(record, "child", ""), record.getMessage()) for record in caplog.records]
    assert printed == [("engine-7", "I serve"), ("engine-7", "my last words")]


async def test_a_child_leads_its_own_session_and_is_ended_with_what_it_started() -> None:
    code = "child = os.fork()\nif child == 0:\n    signal.pause()\nsay(event='ready', grandchild=child)\nsignal.pause()"
    child = await launched(code, forward=False)
    async with asyncio.timeout(PATIENCE_S):
        grandchild = int(str((await child.ready)["grandchild"]))
    assert os.getsid(child.pids[0]) == os.getsid(grandchild) == child.pids[0]
    child.kill()
    assert await ended(child) == -signal.SIGKILL
    async with asyncio.timeout(PATIENCE_S):
        while _is_alive(grandchild):
            await asyncio.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_child_inherits_no_secret_and_nothing_that_is_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, FAR_KEY: "a-far-key", "OTHER": "inherited"}.items():
        monkeypatch.setenv(name, value)
    found: list[dict[str, Any]] = []
    for withheld in ((), (FAR_KEY,)):
        child = await launched("say(event='ready', environment=dict(os.environ))", withheld=withheld)
        await ended(child)
        found.append(json.loads(json.dumps(child.ready.result()["environment"])))
    assert not {name for environment in found for name in environment if name in SECRETS}
    assert [environment.get("OTHER") for environment in found] == ["inherited", "inherited"]
    assert [environment.get(FAR_KEY) for environment in found] == ["a-far-key", None]


async def test_a_program_that_is_not_there_is_an_error_of_the_launch() -> None:
    with pytest.raises(OSError, match="No such file"):
        await ProcessLauncher().launch("engine-7", ("/none",), forward=True)
