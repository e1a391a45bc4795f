"""Tests replicas of several ranks in a deployment: their files, that they end together, what is said of them. Processes are scripted."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import eventually
from scripted_site import FleetExit, Script, ScriptedSite, scripted_site

from headrace.core.errors import ConfigError
from headrace.fleet import files
from headrace.fleet.config import ModelSpec
from headrace.fleet.keeper import FIRST_PAUSE_S
from headrace.fleet.launcher import LEAVE_S
from headrace.lab.fake_adapters import save_fake_adapter
from headrace.machine import resources

pytestmark = pytest.mark.loop


def divided(replicas: int = 1, tp: int = 2, **engine: object) -> tuple[ModelSpec, ...]:
    return (ModelSpec(name="tiny", folder=Path("none"), replicas=replicas, engine={"tensor_parallel_size": tp, **engine}),)


def engine_files(site: ScriptedSite) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(site.run_dir.glob("e*"))}


async def test_each_rank_has_a_file_and_its_part_of_the_replicas_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "allowed_cpus", lambda: [2, 3, 4, 5, 6, 7, 8, 9])
    async with scripted_site(specs=divided(replicas=2, pipeline_parallel_size=2)) as site:
        written = engine_files(site)
        assert [*written] == [f"e{number}{rank}.json" for number in (0, 1) for rank in ("", ".r1", ".r2", ".r3")]
        assert [each["rank"] for each in written.values()] == [0, 1, 2, 3, 0, 1, 2, 3]
        assert [each["cpus"] for each in written.values()] == ["2", "3", "4", "5", "6", "7", "8", "9"]
        assert {each["num_neighbours"] for each in written.values()} == {7}
        places = [each["rendezvous"] for each in written.values()]
        assert places == [f"unix:{site.run_dir}/e{number}.ranks" for number in (0, 1) for _ in range(4)]
        of_replica = [{name: each[name] for name in ("replica", "address", "engine")} for each in written.values()]
        assert of_replica == [of_replica[0]] * 4 + [of_replica[4]] * 4
        assert [each["rank"] for each in written.values() if "block_key" in each] == [0, 0], "the others hash no blocks"


async def test_only_rank_0_is_given_the_adapters(tmp_path: Path) -> None:
    """It names them to the others, whose files no change of adapters writes: what they listed once may be gone at a later start."""
    save_fake_adapter(tmp_path / "law", b"law")
    [spec] = divided(enable_lora=True)
    async with scripted_site(specs=(replace(spec, adapters={"law": str(tmp_path / "law")}),)) as site:
        listed = {name: [each["name"] for each in file["engine"].get("lora_modules", ())] for name, file in engine_files(site).items()}
    assert listed == {"e0.json": ["law"], "e0.r1.json": []}


async def test_a_replica_of_one_rank_is_started_as_without_ranks() -> None:
    async with scripted_site(specs=divided(tp=1)) as site:
        assert [*engine_files(site)] == ["e0.json"]
        assert not {"rank", "rendezvous"} & set(site.process("tiny-0").config)


async def test_ranks_are_one_replica_whose_processes_are_shown() -> None:
    async with scripted_site(specs=divided(replicas=2)) as site:
        await site.all_serving()
        [model] = (await site.status())["models"]
        assert [(replica["name"], replica["pids"]) for replica in model["replicas"]] == [
            (name, [site.process(name).pid, site.process(f"{name}.r1").pid]) for name in ("tiny-0", "tiny-1")
        ]
        assert site.listed("tiny") == ["tiny-0", "tiny-1"]


async def test_a_replica_is_ready_with_its_first_rank() -> None:
    script = Script(loading={"tiny-0", "tiny-0.r1"})
    async with scripted_site(script, specs=divided(), is_awaited=False) as site:
        await eventually(lambda: site.is_launched("tiny-0.r1"))
        script.loading.remove("tiny-0")
        await eventually(lambda: site.ready is not None)
        assert site.ready is not None
        assert set(site.ready.replicas) == {"tiny-0"}


@pytest.mark.parametrize("dead", ["tiny-0", "tiny-0.r1", "tiny-0.r2"])
async def test_ranks_end_at_once_with_any_of_them_and_are_started_again(dead: str, caplog: pytest.LogCaptureFixture) -> None:
    ranks = ("tiny-0", "tiny-0.r1", "tiny-0.r2")
    async with scripted_site(specs=divided(tp=3)) as site:
        await site.all_serving()
        first = [site.process(name) for name in ranks]
        site.process(dead).kill()
        await eventually(lambda: all(len(site.pids(name)) == 2 for name in ranks))
        [ended_at] = {process.ended_at for process in first}
        assert site.process(dead).launched_at == pytest.approx(ended_at + FIRST_PAUSE_S)
        assert [process.asked_at for process in first] == [[], [], []], "none was asked, and given time"
        assert f"{dead} was killed by SIGKILL; starting it again in 0.1 s" in caplog.text
        assert len(site.pids("gateway")) == 1


async def test_a_rank_that_refuses_its_configuration_is_named_and_not_started_again() -> None:
    script = Script(failing={"tiny-0.r1": "its part of the weights does not fit."}, loading={"tiny-0"})
    async with scripted_site(script, specs=divided()) as site:
        failure = await site.failure()
        assert isinstance(failure, ConfigError)
        assert str(failure) == "tiny-0.r1: its part of the weights does not fit."
        assert [len(site.pids(name)) for name in ("tiny-0", "tiny-0.r1")] == [1, 1]
        assert all(process.exited.done() for process in site.launcher.launched)
        assert not site.folders()


async def test_only_the_first_rank_is_asked_to_leave_and_the_others_have_a_moment() -> None:
    async with scripted_site(Script(leaving_s={"tiny-0": 1.5}), specs=divided()) as site:
        assert (await site.do("drain", within_s=5))[-1] == {"event": "done"}
        await asyncio.sleep(1.6)
        lead, member = site.process("tiny-0"), site.process("tiny-0.r1")
        assert lead.exited.done()
        assert (len(lead.asked_at), member.asked_at, member.exited.done()) == (1, [], False)
        assert await site.running is FleetExit.DRAINED
        assert member.ended_at == pytest.approx(lead.ended_at + LEAVE_S)
        assert not site.folders()


async def test_a_rank_that_leaves_in_time_is_not_waited_for() -> None:
    async with scripted_site(Script(leaving_s={"tiny-0": 1.5}), specs=divided()) as site:
        await site.do("drain", within_s=5)
        await asyncio.sleep(1.6)
        site.process("tiny-0.r1").terminate()
        loop, began = asyncio.get_running_loop(), site.process("tiny-0").ended_at
        assert await site.running is FleetExit.DRAINED
        assert loop.time() - began < LEAVE_S


async def test_a_retired_replica_leaves_no_file_of_its_ranks() -> None:
    async with scripted_site(specs=divided(replicas=2)) as site:
        await site.all_serving()
        (site.run_dir / "e1.ranks").touch()
        assert (await site.do("scale", model="tiny", replicas=1))[-1] == {"event": "done"}
        assert [*engine_files(site)] == ["e0.json", "e0.r1.json"]


async def test_more_processes_than_cpus_are_warned_of_once_and_to_the_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resources, "num_allowed_cpus", lambda: 8)
    monkeypatch.setattr(resources, "cpu_quota", lambda: 4.5)
    caplog.set_level(logging.WARNING, "headrace.fleet")
    async with scripted_site(specs=divided(replicas=2)) as site:
        assert "processes on" not in caplog.text
        said = await site.do("scale", model="tiny", replicas=3)
        line = "tiny: 3 replicas of 2 ranks are 6 processes on 4 CPUs: those that share one wait for each other in every layer; use fewer"
        assert said[0] == {"event": "progress", "text": line}
        assert caplog.text.count("processes on") == 1
    caplog.clear()
    async with scripted_site(specs=divided(tp=5)):
        assert caplog.text.count("tiny: 1 replica of 5 ranks are 5 processes on 4 CPUs") == 1
    async with scripted_site(specs=divided(num_threads=2)):
        assert "of 2 threads" not in caplog.text
    async with scripted_site(specs=divided(num_threads=3)):
        assert caplog.text.count("tiny: 1 replica of 2 ranks are 2 processes of 3 threads on 4 CPUs") == 1
