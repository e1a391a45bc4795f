"""Tests what the supervisor does from the first process to the last: what it says once it serves, when it gives up, and how it ends.

Processes are scripted; real ones are in test_deployment_process.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from patience import eventually
from scripted_site import PORT, FleetExit, Script, ScriptedSite, models_of, scripted_site

from headrace.core.errors import ConfigError
from headrace.fleet.config import ModelSpec
from headrace.fleet.keeper import FIRST_PAUSE_S, FleetFailed
from headrace.fleet.supervisor import CUT_GRACE_S, GATEWAY_GRACE_S
from headrace.machine.signals import DUPLICATE_SIGNAL_S

pytestmark = pytest.mark.loop


def now() -> float:
    return asyncio.get_running_loop().time()


def ask(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def gateways_of(site: ScriptedSite) -> list[str]:
    return [process.label for process in site.launcher.launched if process.is_gateway]


async def test_what_serves_is_said_once_with_the_address_and_every_replica() -> None:
    async with scripted_site(models={"tiny": 2, "other": 1}, workers=2) as site:
        assert site.ready is not None
        assert site.ready.gateway["port"] == site.written["port"] == PORT
        assert set(site.ready.replicas) == {"tiny-0", "tiny-1", "other-0"}
        assert (site.ready.failed, site.ready.starting) == ({}, [])
        assert (site.written["timeouts"]["drain_s"], len(site.written["salt_key"])) == (30, 64)
        [block_key] = {process.config["block_key"] for process in site.launcher.launched if not process.is_gateway}
        assert len(block_key) == 64, "drawn, and the same in every engine"


async def test_each_of_several_gateways_is_told_which_one_it_is() -> None:
    async with scripted_site(workers=3) as site:
        commands = [site.process(f"gateway-{index}").command for index in range(3)]
        assert [command[-2:] for command in commands] == [("--worker", str(index)) for index in range(3)]
    async with scripted_site() as site:
        assert gateways_of(site) == ["gateway"]
        assert "--worker" not in site.process("gateway").command


async def test_the_key_of_a_foreign_server_is_withheld_from_engines_alone() -> None:
    far = ModelSpec(name="far", folder=None, replicas=0, upstreams=({"url": "http://127.0.0.1:9/v1", "api_key_env": "A_FAR_KEY"},))
    async with scripted_site() as site:
        site.write_file(models=(*models_of({"tiny": 2}), far))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert (set(site.process("gateway").withheld), set(site.process("tiny-1").withheld)) == (set(), {"A_FAR_KEY"})


async def test_a_gateway_that_dies_is_started_again_alone() -> None:
    async with scripted_site(workers=3) as site:
        dead = site.process("gateway-1")
        dead.kill()
        await eventually(lambda: len(site.pids("gateway-1")) == 2)
        assert site.process("gateway-1").launched_at - dead.ended_at == pytest.approx(FIRST_PAUSE_S)
        assert [len(site.pids(name)) for name in ("gateway-0", "gateway-2", "tiny-0")] == [1, 1, 1]


# -- what cannot be served -------------------------------------------------------------------------------------------------------


async def test_weights_that_every_engine_refuses_end_the_deployment_with_the_engines_reason() -> None:
    script = Script(failing=dict.fromkeys(("tiny-0", "tiny-1"), "model.safetensors is truncated"))
    async with scripted_site(script, models={"tiny": 2}) as site:
        failure = await site.failure()
        assert isinstance(failure, ConfigError)
        assert "model.safetensors is truncated" in str(failure)
        assert [len(site.pids(name)) for name in ("tiny-0", "tiny-1")] == [1, 1], "they would refuse them again"
        assert all(process.exited.done() for process in site.launcher.launched)
        assert not site.folders()


async def test_a_process_that_never_serves_is_given_up_after_a_few_tries() -> None:
    async with scripted_site(Script(dying={"gateway"})) as site:
        failure = await site.failure()
        assert isinstance(failure, FleetFailed)
        assert str(failure) == "gateway ended with status 9; it was started 3 times and never served."
        first, _, third = [process for process in site.launcher.launched if process.is_gateway]
        assert third.launched_at - first.launched_at == pytest.approx(FIRST_PAUSE_S + 2 * FIRST_PAUSE_S)
        assert site.ready is None
        assert not site.folders()


# -- the end ---------------------------------------------------------------------------------------------------------------------


async def test_engines_are_asked_to_leave_when_the_last_gateway_has_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.fleet")
    script = Script(leaving_s={"gateway-0": 2.0, "gateway-2": 25.0})
    async with scripted_site(script, workers=3, models={"tiny": 2}) as site:
        began = now()
        ask(signal.SIGTERM)
        assert await site.running is FleetExit.DRAINED
        for name in ("gateway-0", "gateway-1", "gateway-2"):
            assert site.process(name).asked_at == [began]
        for name in ("tiny-0", "tiny-1"):
            assert site.process(name).asked_at == [pytest.approx(began + 25.0)]
        assert "stopping 3 gateways, then 2 engines" in caplog.text
        assert not site.folders()


async def test_one_ctrl_c_that_arrives_twice_cuts_nothing() -> None:
    """A terminal and a wrapper both deliver it."""
    script = Script(leaving_s={"gateway": 9.0})
    async with scripted_site(script) as site:
        began = now()
        ask(signal.SIGTERM)
        await asyncio.sleep(DUPLICATE_SIGNAL_S)
        ask(signal.SIGINT)
        assert await site.running is FleetExit.DRAINED
        assert now() - began == pytest.approx(9.0)


async def test_an_insistent_signal_ends_everything_at_once() -> None:
    script = Script(leaving_s={"gateway-0": 500.0, "gateway-1": 500.0})
    async with scripted_site(script, workers=2, drain_timeout_s=600) as site:
        ask(signal.SIGINT)
        await asyncio.sleep(DUPLICATE_SIGNAL_S + 0.1)
        insisted = now()
        ask(signal.SIGINT)
        assert await site.running is FleetExit.CUT
        assert now() == insisted
        assert [len(site.process(name).asked_at) for name in ("gateway-0", "gateway-1", "tiny-0")] == [2, 2, 1]


async def test_a_gateway_that_hangs_at_a_second_signal_is_killed() -> None:
    script = Script(silent={"gateway-0"})
    async with scripted_site(script, workers=2, drain_timeout_s=600) as site:
        ask(signal.SIGTERM)
        await asyncio.sleep(DUPLICATE_SIGNAL_S + 0.1)
        insisted = now()
        ask(signal.SIGTERM)
        assert await site.running is FleetExit.CUT
        assert now() - insisted == pytest.approx(CUT_GRACE_S)
        assert site.process("gateway-0").exited.result() == -signal.SIGKILL


async def test_a_drain_that_does_not_end_is_cut_when_its_time_is_over() -> None:
    script = Script(leaving_s={"gateway": math.inf})
    async with scripted_site(script, drain_timeout_s=40) as site:
        began = now()
        ask(signal.SIGTERM)
        assert await site.running is FleetExit.CUT
        assert now() - began == pytest.approx(40 + GATEWAY_GRACE_S)
        assert site.process("gateway").exited.result() == -signal.SIGKILL
        assert all(process.exited.done() for process in site.launcher.launched)


# -- SIGHUP ----------------------------------------------------------------------------------------------------------------------


async def test_a_hangup_reads_the_file_again() -> None:
    async with scripted_site() as site:
        site.scale_file(tiny=1, other=2)
        ask(signal.SIGHUP)
        await eventually(lambda: site.is_launched("other-1"))
        await site.all_serving("other")
        assert site.listed("other") == ["other-0", "other-1"]
        assert len(site.pids("tiny-0")) == 1


async def test_a_hangup_that_finds_a_fault_changes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_site() as site:
        before = site.written
        site.source.config = replace(site.source.config, models=())
        ask(signal.SIGHUP)
        await eventually(lambda: "SIGHUP changed nothing: models: is empty" in caplog.text)
        assert site.written == before
        assert not site.running.done()


async def test_a_hangup_without_a_file_drains() -> None:
    async with scripted_site(has_file=False) as site:
        ask(signal.SIGHUP)
        assert await site.running is FleetExit.DRAINED


@pytest.fixture
def _ignored_hangups() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_ignored_hangups")
async def test_a_hangup_that_is_ignored_as_under_nohup_does_nothing() -> None:
    async with scripted_site(has_file=False) as site:
        ask(signal.SIGHUP)
        await asyncio.sleep(5)
        assert not site.running.done()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_a_terminal_that_is_closed_drains_although_there_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = [True]
    monkeypatch.setattr("headrace.machine.signals._has_terminal", lambda: terminal[0])
    async with scripted_site() as site:
        terminal[0] = False
        ask(signal.SIGHUP)
        assert await site.running is FleetExit.DRAINED


async def test_the_folder_of_a_deployment_is_its_own(tmp_path: Path) -> None:
    async with scripted_site() as site:
        assert site.run_dir.stat().st_mode & 0o777 == 0o700
        assert {path.name for path in site.run_dir.iterdir()} == {"e0.json", "gateway.json", "lock"}
