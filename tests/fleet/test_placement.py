"""Tests models that share a budget of bytes: their engines start, sleep and wake in turn. Processes are scripted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from patience import eventually
from scripted_site import FleetExit, Script, ScriptedSite, scripted_site

from headrace.core.errors import ConfigError
from headrace.fleet.config import FleetConfig, ModelSpec
from headrace.policy.placement.slices import MIN_AWAKE_S
from headrace.wire.leash import ModelStatus

pytestmark = pytest.mark.loop

BUDGET = 8 << 30


def sleeper(name: str, **engine: object) -> ModelSpec:
    return ModelSpec(name=name, folder=Path("none"), sleeps=True, engine=engine)


def engines(site: ScriptedSite) -> list[str]:
    """Names of the engines that have a process."""
    return [each.label for each in site.launcher.launched if not each.is_gateway and not each.exited.done()]


def awake(site: ScriptedSite) -> list[str]:
    return sorted(name for name in engines(site) if name not in site.script.asleep)


async def watch(site: ScriptedSite, most: int) -> None:
    """Fails once more than `most` engines are awake."""
    while True:
        assert len(awake(site)) <= most, awake(site)
        await asyncio.sleep(0.02)


async def ask(site: ScriptedSite, model: str) -> None:
    """One request, which waits until its engine is awake."""
    site.script.models[model] = ModelStatus({}, num_held=1)
    await eventually(lambda: f"{model}-0" in awake(site))
    site.script.models.pop(model)


async def all_asleep_but_one(site: ScriptedSite) -> None:
    await eventually(lambda: len(engines(site)) == 3 and len(awake(site)) == 1)


async def test_models_that_do_not_fit_together_are_awake_one_at_a_time() -> None:
    specs = (sleeper("a"), sleeper("b"), sleeper("c"))
    async with scripted_site(specs=specs, sleep_budget_bytes=BUDGET) as site:
        watching = asyncio.create_task(watch(site, 1))
        await all_asleep_but_one(site)
        files = [json.loads(path.read_text()) for path in sorted(site.run_dir.glob("e*.json"))]
        assert [each["engine"]["memory_bytes"] for each in files] == [BUDGET] * 3
        assert [each["num_neighbours"] for each in files] == [0] * 3, "they share one part of the machine"
        for name in "abcab":
            await ask(site, name)
            await asyncio.sleep(2.0)
            assert awake(site) == [f"{name}-0"]
        assert all(len(site.pids(f"{name}-0")) == 1 for name in "abc"), "none was started again"
        assert not watching.done()
        watching.cancel()


async def test_models_that_fit_together_are_awake_together_beside_one_that_does_not_sleep() -> None:
    half = {"memory_bytes": BUDGET // 2}
    specs = (sleeper("a", **half), sleeper("b", **half), sleeper("c"), ModelSpec(name="own", folder=Path("none")))
    async with scripted_site(specs=specs, sleep_budget_bytes=BUDGET) as site:
        await eventually(lambda: len(engines(site)) == 4)
        for name, expected in (("a", ["a-0"]), ("b", ["a-0", "b-0"]), ("c", ["c-0"])):
            await ask(site, name)
            await asyncio.sleep(2.0)
            assert set(awake(site)) - {"own-0"} >= set(expected)
        assert awake(site) == ["c-0", "own-0"]


async def test_an_engine_in_use_keeps_its_turn_and_finishes_its_requests() -> None:
    async with scripted_site(specs=(sleeper("a"), sleeper("b"), sleeper("c")), sleep_budget_bytes=BUDGET) as site:
        await all_asleep_but_one(site)
        await ask(site, "a")
        site.script.num_open["a-0"] = 2
        site.script.models["b"] = ModelStatus({}, num_held=1)
        await asyncio.sleep(MIN_AWAKE_S + 30)
        assert awake(site) == ["a-0"], "its streams are not cut"
        site.script.num_open.clear()
        await eventually(lambda: awake(site) == ["b-0"])


async def test_an_engine_that_dies_waits_for_its_turn() -> None:
    async with scripted_site(specs=(sleeper("a"), sleeper("b"), sleeper("c")), sleep_budget_bytes=BUDGET) as site:
        await all_asleep_but_one(site)
        await ask(site, "a")
        site.script.num_open["a-0"] = 1
        site.process("b-0").kill()
        await asyncio.sleep(MIN_AWAKE_S / 2)
        assert awake(site) == ["a-0"]
        assert len(site.pids("b-0")) == 1
        site.script.num_open.clear()
        await eventually(lambda: awake(site) == ["b-0"])
        assert len(site.pids("b-0")) == 2


async def test_one_that_cannot_start_gives_its_bytes_back() -> None:
    script = Script(failing={"a-0": "engine.dtype: no"})
    async with scripted_site(script, specs=(sleeper("a"), sleeper("b")), sleep_budget_bytes=BUDGET) as site:
        await site.all_serving("b")
        assert await site.phases("a") == {"a-0": "failed"}


async def test_a_rollout_and_a_reload_go_through_the_same_turns() -> None:
    async with scripted_site(specs=(sleeper("a"), sleeper("b"), sleeper("c")), sleep_budget_bytes=BUDGET) as site:
        await all_asleep_but_one(site)
        watching = asyncio.create_task(watch(site, 1))
        assert (await site.do("rollout", model="a"))[-1] == {"event": "done"}
        assert await site.phases("a") == {"a-1": "serving"}
        site.write_file(models=(sleeper("b"), sleeper("d")))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        await eventually(lambda: sorted(engines(site)) == ["b-0", "d-0"])
        await ask(site, "b")
        assert not watching.done()
        watching.cancel()


async def test_a_deployment_ends_while_an_engine_waits_for_its_turn() -> None:
    script = Script(num_open={"a-0": 1})
    async with scripted_site(script, specs=(sleeper("a"), sleeper("b")), sleep_budget_bytes=BUDGET) as site:
        await site.all_serving("a")
        assert engines(site) == ["a-0"]
        waiting = next(each for each in (await site.status())["models"] if each["name"] == "b")
        assert waiting["replicas"][0]["reason"] == "waits for its turn to start"
        script.num_open.clear()
        await site.do("drain", within_s=5)
        assert await site.running is FleetExit.DRAINED


async def test_what_sleeps_by_itself_takes_no_such_command() -> None:
    async with scripted_site(specs=(sleeper("tiny"),), sleep_budget_bytes=BUDGET) as site:
        for command, body, reason in (
            ("sleep", {"model": "tiny"}, "by itself"),
            ("wake", {"model": "tiny"}, "by itself"),
            ("scale", {"model": "tiny", "replicas": 2}, "more than the one replica"),
        ):
            [refused] = await site.do(command, **body)
            assert refused["event"] == "refused"
            assert reason in refused["reason"]


DRAFTING = {"speculative_config": {"method": "draft_model", "model": "draft"}}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("engine", "replicas", "budget", "standby", "reason"),
    [
        ({}, 1, None, 0, r"sleep_budget_bytes: is missing, and models\[0\] sleeps"),
        ({}, 2, BUDGET, 0, r"models\[0\].replicas: 2 is not 1"),
        ({"memory_bytes": BUDGET + 1}, 1, BUDGET, 0, r"models\[0\].engine.memory_bytes: 8,589,934,593 is more than sleep_budget_bytes"),
        ({"tensor_parallel_size": 2}, 1, BUDGET, 0, "is of an engine that cannot sleep"),
        ({"device": "cuda"}, 1, BUDGET, 0, r"models\[0\].engine.device: is of an engine that cannot sleep"),
        ({}, 1, BUDGET, 1, r"models\[0\].standby: is for models that do not sleep"),
        (DRAFTING, 1, BUDGET, 0, "engine.speculative_config.model"),
    ],
)
def test_what_cannot_share_the_budget_is_refused_by_name(
    engine: Mapping[str, object], replicas: int, budget: int | None, standby: int, reason: str
) -> None:
    spec = ModelSpec(name="a", folder=Path("none"), sleeps=True, engine=engine, replicas=replicas, standby=standby)
    with pytest.raises(ConfigError, match=reason):
        FleetConfig(models=(spec,), sleep_budget_bytes=budget).checked()


@pytest.mark.parametrize("end", ["its process ends", "it passes"])
async def test_a_rollout_of_a_model_that_sleeps_ends_while_its_replicas_are_asleep(end: str) -> None:
    stable = "s3://models/a:stable"
    specs = (replace(sleeper("a"), folder=Path("v1"), source=stable), sleeper("b"))
    async with scripted_site(specs=specs, sleep_budget_bytes=BUDGET) as site:
        await eventually(lambda: len(engines(site)) == 2 and awake(site) == ["b-0"])
        site.source.registry[stable] = Path("v2")
        rollout = asyncio.create_task(site.do("rollout", model="a"))
        await eventually(lambda: awake(site) == ["a-1"])
        await asyncio.sleep(1.0)
        if end == "its process ends":
            site.process("a-1").kill()
        else:
            site.script.models["b"] = ModelStatus({}, num_held=1)
            await eventually(lambda: awake(site) == ["b-0"])
        said = await asyncio.wait_for(rollout, 300.0)
        kept, folder, event = ("a-0", "v1", "failed") if end == "its process ends" else ("a-1", "v2", "done")
        assert said[-1]["event"] == event, said
        assert "sizes its KV cache" not in str(said), "it has the budget, which a predecessor that sleeps has left"
        assert site.listed("a") == [kept]
        assert site.started_with(kept)["model"] == folder


async def test_an_engine_still_wakes_for_requests_that_are_held_when_the_deployment_ends() -> None:
    specs = (sleeper("a"), sleeper("b"))
    script = Script(leaving_s={"gateway": 25.0})
    async with scripted_site(script, specs=specs, sleep_budget_bytes=BUDGET) as site:
        await eventually(lambda: len(engines(site)) == 2 and len(awake(site)) == 1)
        [sleeping] = set(engines(site)) & set(script.asleep)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(1.0)
        await ask(site, sleeping.removesuffix("-0"))
        assert await site.running is FleetExit.DRAINED
