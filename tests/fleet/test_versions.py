"""Tests that a model becomes another version of itself while it serves: its canary, what a rollback leaves, and what is refused.

Processes are scripted. Real ones are in tests/e2e/test_promotion.py, the comparison itself in tests/policy/test_canary.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import eventually
from scripted_site import Script, ScriptedSite, scripted_site
from virtual_time import VirtualTimeLoop

from headrace.core.load import AttemptCounts
from headrace.fleet.config import ModelSpec, ReplicaRange
from headrace.fleet.control import STARTS_S
from headrace.policy.canary import MAX_WAIT_S, MIN_REQUESTS
from headrace.policy.scaling.autoscaler import IDLE_S
from headrace.wire.leash import ModelStatus, ReportedReplicaLoad

pytestmark = pytest.mark.loop

STABLE, V2, V3 = (f"s3://models/tiny:{tag}" for tag in ("stable", "2", "3"))


def tiny(folder: Path | str, **changes: Any) -> tuple[ModelSpec, ...]:
    return (ModelSpec(**{"name": "tiny", "folder": Path(folder), "replicas": 2, "source": STABLE, **changes}),)


def texts(said: list[dict[str, Any]]) -> list[str]:
    return [each["text"] for each in said if each["event"] == "progress"]


def folders(site: ScriptedSite) -> dict[str, str]:
    """Replica -> the folder that it was started with."""
    return {name: site.started_with(name)["model"] for name in site.listed("tiny")}


def answered(num_requests: int, **counts: Any) -> AttemptCounts:
    return AttemptCounts(**{"num_sent": num_requests, "num_begun": num_requests, **counts})


def versioned_site(script: Script, *, replicas: int = 2, **options: Any) -> AbstractAsyncContextManager[ScriptedSite]:
    return scripted_site(script, specs=tiny("v1", replicas=replicas), **options)


async def canary_serves(site: ScriptedSite, name: str = "tiny-2") -> None:
    async def serves() -> bool:
        [model] = (await site.status())["models"]
        return bool(model["canary"] == name)

    async with asyncio.timeout(600):
        while not await serves():
            await asyncio.sleep(0.1)


async def test_a_version_that_serves_as_well_replaces_all_replicas() -> None:
    script = Script()
    async with versioned_site(script) as site:
        await site.all_serving()
        site.source.registry[STABLE] = Path("v2")
        rollout = asyncio.create_task(site.do("rollout", model="tiny"))
        await canary_serves(site)
        assert folders(site) == {"tiny-0": "v1", "tiny-1": "v1", "tiny-2": "v2"}
        await asyncio.sleep(MAX_WAIT_S / 2)
        assert not rollout.done()
        script.attempts = {name: answered(MIN_REQUESTS) for name in ("tiny-0", "tiny-1", "tiny-2")}
        said = await rollout
        assert said[-1] == {"event": "done"}
        assert "tiny-2 has another version of tiny: it serves beside the others for 50 requests, at most 120 s" in texts(said)
        assert "tiny: the rollout goes on after tiny-2: 0 of 50 requests failed, first token after 0.000 s on average; before" in str(said)
        assert folders(site) == {"tiny-2": "v2", "tiny-3": "v2"}
        assert site.written["models"][0]["folder"] == "v2"
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert folders(site) == {"tiny-2": "v2", "tiny-3": "v2"}, "a reload keeps the version that the alias had at the rollout"


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (answered(20, num_failed=20), "20 of 20 requests failed"),
        (answered(20, num_begun=0, num_lost=20), "20 of 20 requests failed"),
        (answered(50, ttft_s=50.0, ttft_s_squared=52.0), "0 of 50 requests failed, first token after 1.000 s"),
    ],
)
async def test_a_version_that_serves_worse_is_rolled_back_and_no_old_replica_was_touched(counts: AttemptCounts, reason: str) -> None:
    script = Script()
    async with versioned_site(script) as site:
        await site.all_serving()
        before = {name: site.process(name).pid for name in ("tiny-0", "tiny-1")}
        site.source.registry[STABLE] = Path("v2")
        rollout = asyncio.create_task(site.do("rollout"))
        await canary_serves(site)
        script.attempts = {name: answered(100, ttft_s=10.0, ttft_s_squared=2.0) for name in before} | {"tiny-2": counts}
        said = await rollout
        assert said[-1]["event"] == "failed"
        assert f"tiny: tiny-2 is rolled back: {reason}" in said[-1]["reason"]
        assert {name: site.process(name).pid for name in site.listed("tiny")} == before
        assert site.written["models"][0]["folder"] == "v1"
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert (await site.do("scale", model="tiny", replicas=3))[-1] == {"event": "done"}
        assert folders(site) == {"tiny-0": "v1", "tiny-1": "v1", "tiny-3": "v1"}


async def test_a_canary_without_requests_passes_when_its_time_is_over_and_that_is_said() -> None:
    async with versioned_site(Script()) as site:
        await site.all_serving()
        site.source.registry[STABLE] = Path("v2")
        began = asyncio.get_running_loop().time()
        said = await site.do("rollout")
        assert said[-1] == {"event": "done"}
        assert "tiny: the rollout goes on after tiny-2: nothing was compared: no request came to it within 120 s" in texts(said)
        assert MAX_WAIT_S <= asyncio.get_running_loop().time() - began <= MAX_WAIT_S + 5


async def test_a_canary_does_not_pass_before_a_lost_replica_of_the_version_before_is_back() -> None:
    """Streams that began there can go on nowhere else."""
    script = Script()
    async with versioned_site(script) as site:
        await site.all_serving()
        site.source.registry[STABLE] = Path("v2")
        rollout = asyncio.create_task(site.do("rollout", model="tiny"))
        await canary_serves(site)
        script.not_ready["tiny-1"] = "it was lost"
        await asyncio.sleep(1.0)
        script.attempts = {name: answered(MIN_REQUESTS) for name in ("tiny-0", "tiny-1", "tiny-2")}
        await asyncio.sleep(MAX_WAIT_S / 2)
        assert folders(site) == {"tiny-0": "v1", "tiny-1": "v1", "tiny-2": "v2"}
        del script.not_ready["tiny-1"]
        assert (await rollout)[-1] == {"event": "done"}
        assert folders(site) == {"tiny-2": "v2", "tiny-3": "v2"}


async def test_what_was_counted_before_the_canary_is_not_compared() -> None:
    """Nor what a gateway counted that has begun anew."""
    script = Script(attempts={name: answered(1000, num_failed=900) for name in ("tiny-0", "tiny-1")})
    async with versioned_site(script) as site:
        await site.all_serving()
        site.source.registry[STABLE] = Path("v2")
        rollout = asyncio.create_task(site.do("rollout"))
        await canary_serves(site)
        script.attempts["tiny-1"] = answered(5)
        await asyncio.sleep(1)
        script.attempts["tiny-1"] = answered(105)
        script.attempts["tiny-2"] = answered(40, num_failed=20)
        assert "20 of 40 requests failed" in (await rollout)[-1]["reason"]
        assert "before, 0 of 100 requests failed" in str(await rollout)


@pytest.mark.parametrize("fault", ["ends", "not ready"])
async def test_a_canary_that_does_not_stay_ready_is_rolled_back(fault: str) -> None:
    script = Script()
    async with versioned_site(script, hang_timeout_s=0) as site:
        await site.all_serving()
        site.source.registry[STABLE] = Path("v2")
        rollout = asyncio.create_task(site.do("rollout"))
        await canary_serves(site)
        if fault == "ends":
            site.process("tiny-2").kill()
        else:
            script.attempts["tiny-2"] = answered(200)
            script.not_ready["tiny-2"] = "stalled"
        reason = {"ends": "its process has ended, and was started again", "not ready": "it is not ready: stalled"}[fault]
        assert (await rollout)[-1]["reason"] == f"tiny: tiny-2 is rolled back: {reason}"
        assert folders(site) == {"tiny-0": "v1", "tiny-1": "v1"}


async def test_a_later_replica_that_cannot_start_takes_the_version_back() -> None:
    script = Script(failing={"tiny-3": "no memory."})
    async with versioned_site(script) as site:
        await site.all_serving()
        site.source.registry[STABLE] = Path("v2")
        said = await site.do("rollout")
        assert said[-1]["reason"] == "tiny: tiny-3 cannot be started: no memory."
        assert texts(said)[-1] == "tiny: as it was before"
        assert set(folders(site).values()) == {"v1"}
        assert len(folders(site)) == 2


async def test_a_version_that_cannot_be_pulled_changes_nothing() -> None:
    async with versioned_site(Script()) as site:
        await site.all_serving()
        before = len(site.launcher.launched)
        [refused] = await site.do("rollout")
        assert refused["event"] == "refused"
        assert f"registry: has no '{STABLE}'" in refused["reason"]
        assert len(site.launcher.launched) == before


async def test_a_promotion_serves_a_version_before_its_alias_points_to_it() -> None:
    async with versioned_site(Script(), replicas=1) as site:
        await site.all_serving()
        site.source.registry = {STABLE: Path("v1"), V3: Path("v3")}
        assert (await site.do("rollout", model="tiny", alias=STABLE, version=V3))[-1] == {"event": "done"}
        assert folders(site) == {"tiny-1": "v3"}


async def test_a_promotion_of_a_model_without_a_replica_is_refused_by_name() -> None:
    specs = tiny("v1", replicas=1, autoscale=ReplicaRange(min=0, max=2))
    async with scripted_site(Script(), specs=specs) as site:
        await site.all_serving()
        site.script.loads = {"tiny-0": ReportedReplicaLoad(0, 0, 0.0, 0, 0, 0.1)}
        await asyncio.sleep(IDLE_S + 60)
        site.source.registry = {STABLE: Path("v1"), V3: Path("v3")}
        [refused] = await site.do("rollout", model="tiny", alias=STABLE, version=V3)
        assert refused["reason"].startswith(f"tiny: has no replica now, so that none would load {V3} before the alias moves. Send it")
        site.script.models["tiny"] = ModelStatus({}, num_arrived=1, num_held=1)
        await eventually(lambda: folders(site) == {"tiny-1": "v1"})


@pytest.mark.parametrize("command", ["rollout", "drain", "remove"])
async def test_a_promotion_fails_where_another_command_came_between(command: str) -> None:
    script = Script(loading={"tiny-1"} if command != "drain" else set())
    async with versioned_site(script, replicas=1) as site:
        await site.all_serving()
        site.source.registry = {STABLE: Path("v1"), V3: Path("v3")}
        promotion = asyncio.create_task(site.do("rollout", model="tiny", alias=STABLE, version=V3))
        await asyncio.sleep(STARTS_S + 5)
        if command == "rollout":
            assert (await site.do("rollout", model="tiny"))[-1] == {"event": "done"}
        elif command == "remove":
            site.write_file(models=tiny("v1", name="other"))
            await site.do("reload")
        else:
            for replica in ("tiny-0", "tiny-1"):
                await site.do("drain", replica=replica, within_s=1, allow_outage=True)
        reason = {
            "rollout": "its rollout was superseded by another one",
            "drain": f"no replica is left that serves {V3}",
            "remove": "was removed during its rollout",
        }[command]
        assert (await promotion)[-1] == {"event": "failed", "reason": f"tiny: {reason}"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": "tiny", "alias": "s3://models/tiny:canary", "version": V2}, "tiny: is served from s3://models/tiny:stable, not from"),
        ({"model": "tiny", "alias": STABLE, "version": "s3://other/tiny:2"}, "is not a version of tiny in s3://models"),
        ({"model": "tiny", "alias": STABLE}, "version: goes with alias"),
        ({"model": "tiny", "alias": "stable", "version": V2}, "registry: '' begins with none of"),
    ],
)
async def test_a_promotion_that_a_restart_would_undo_is_refused(body: dict[str, Any], words: str) -> None:
    async with versioned_site(Script()) as site:
        await site.all_serving()
        [refused] = await site.do("rollout", **body)
        assert (refused["event"], words in refused["reason"]) == ("refused", True), refused


@contextmanager
def text_folders(parent: Path) -> Iterator[list[Path]]:
    found = [parent / name for name in ("one", "same", "other")]
    for folder in found:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("a" if folder.name != "other" else "b")
    yield found


async def test_a_folder_in_the_file_changes_where_its_text_is_the_same_and_is_refused_by_name_where_it_is_not(tmp_path: Path) -> None:
    with text_folders(tmp_path) as (one, same, other):
        async with scripted_site(Script(), specs=tiny(one, source="")) as site:
            await site.all_serving()
            site.write_file(models=tiny(other, source=""))
            [refused] = await site.do("reload")
            assert refused["reason"].startswith(
                f"models[tiny]: cannot have another tokenizer or chat template while the deployment runs, and {other} has. Add it under"
            )
            site.write_file(models=tiny(same, source=""))
            assert (await site.do("reload"))[-1] == {"event": "done"}
            assert set(folders(site).values()) == {str(same)}


@settings(max_examples=12, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["rollout", "reload", "scale", "drain"]), st.floats(0, 200), st.sampled_from(["good", "bad", "dies"])),
        max_size=4,
    )
)
def test_commands_in_any_order_leave_one_version(steps: list[tuple[str, float, str]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_commands(steps))


async def _commands(steps: list[tuple[str, float, str]]) -> None:
    script = Script()
    async with versioned_site(script) as site:
        await site.all_serving()
        running: list[asyncio.Task[Any]] = []
        for number, (command, wait_s, fate) in enumerate(steps):
            site.source.registry[STABLE] = Path(f"v{number + 2}")
            scale, drain = {"model": "tiny", "replicas": 1 + number}, {"replica": f"tiny-{number}", "within_s": 1}
            body: dict[str, Any] = {"scale": scale, "drain": drain}.get(command, {})
            running.append(asyncio.create_task(site.do(command, **body)))
            await asyncio.sleep(wait_s)
            [model] = (await site.status())["models"]
            if (canary := model["canary"]) and fate == "bad":
                script.attempts[canary] = answered(60, num_failed=60)
            elif canary and fate == "dies":
                site.process(canary).kill()
        await asyncio.gather(*running)
        await eventually(lambda: site.supervisor._reconciler is not None, 1)
        reconciler = site.supervisor._reconciler
        assert reconciler is not None
        await reconciler.until(lambda: reconciler.deployment.is_converged("tiny"))
        reconciler.deployment.check()
        assert len(set(folders(site).values())) == 1, folders(site)
        assert {site.written["models"][0]["folder"]} == set(folders(site).values())
