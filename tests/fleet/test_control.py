"""Tests a deployment changed by commands: rollouts, scale, drains and reloads, to the line and to the second. Processes are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import eventually
from scripted_site import FleetExit, Script, ScriptedSite, models_of, scripted_site

from headrace.cli.admin.client import find_deployment
from headrace.cli.exits import ServerFailed
from headrace.fleet import reconciler, replica_processes
from headrace.fleet.config import ModelSpec
from headrace.fleet.keeper import FIRST_PAUSE_S

pytestmark = pytest.mark.loop

SOON_S = 0.2
"""Seconds in which the reconciler notices what has changed, beside what it waits for."""


def texts(said: list[dict[str, Any]]) -> list[str]:
    return [each["text"] for each in said if each["event"] == "progress"]


def listed(site: ScriptedSite) -> dict[str, list[str]]:
    """Models and replicas in the gateways' file."""
    return {model["name"]: [replica["name"] for replica in model["replicas"]] for model in site.written["models"]}


def engine_files(site: ScriptedSite) -> dict[str, dict[str, Any]]:
    """Name of the file -> what its engine is started with."""
    return {path.name: json.loads(path.read_text()) for path in sorted(site.run_dir.glob("e*"))}


def num_neighbours(site: ScriptedSite) -> list[int]:
    """With how many engines each one shares memory, in the order of their files."""
    return [content["num_neighbours"] for content in engine_files(site).values()]


async def drained(site: ScriptedSite) -> None:
    assert (await site.do("drain", within_s=5))[-1] == {"event": "done"}
    assert await site.running is FleetExit.DRAINED
    assert all(process.exited.done() for process in site.launcher.launched)


async def test_a_rollout_replaces_every_replica_by_a_new_process_under_a_new_name() -> None:
    async with scripted_site(models={"tiny": 2}) as site:
        await site.all_serving()
        said = await site.do("rollout")
        assert said[-1] == {"event": "done"}
        assert texts(said) == [
            "tiny: revision 1 replaces 2 replicas, one at a time",
            "tiny: a successor sizes its KV cache by the memory that is free beside its predecessor; num_kv_blocks makes it a fixed size, "
            "--max-surge 0 ends the predecessor first",
            "tiny-2 is starting, for tiny-0",
            "tiny-2 serves",
            "tiny-0 is retired",
            "tiny-0 has left",
            "tiny-3 is starting, for tiny-1",
            "tiny-3 serves",
            "tiny-1 is retired",
            "tiny-1 has left",
            "tiny: every replica was replaced",
        ]
        assert await site.phases() == {"tiny-2": "serving", "tiny-3": "serving"}
        assert listed(site) == {"tiny": ["tiny-2", "tiny-3"]}
        assert all(site.process(name).exited.done() for name in ("tiny-0", "tiny-1"))
        assert set(engine_files(site)) == {"e2.json", "e3.json"}
        assert num_neighbours(site) == [1, 1], "a successor gets the part of the machine of its predecessor"
        await drained(site)


async def test_a_retired_replica_ends_when_its_last_request_has_left() -> None:
    script = Script(num_open={"tiny-0": 3})
    async with scripted_site(script, drain_timeout_s=30) as site:
        await site.all_serving()
        rollout = asyncio.create_task(site.do("rollout", model="tiny"))
        await eventually(lambda: listed(site) == {"tiny": ["tiny-1"]})
        await asyncio.sleep(29)
        assert await site.phases() == {"tiny-0": "draining", "tiny-1": "serving"}
        assert not site.process("tiny-0").asked_at
        refused = await site.do("scale", model="tiny", replicas=3)
        assert refused[-1]["event"] == "refused"
        assert "rollout tiny is running" in refused[-1]["reason"]
        script.num_open.clear()
        await asyncio.sleep(SOON_S)
        said = await rollout
        assert said[-1] == {"event": "done"}
        assert "tiny-0 is retired, 3 requests open" in texts(said)
        assert site.process("tiny-0").exited.result() == 0, "it was asked to leave"


async def test_what_is_open_after_the_drain_time_is_moved_by_ending_the_replica() -> None:
    script = Script(num_open={"tiny-0": 2})
    async with scripted_site(script, models={"tiny": 2}) as site:
        await site.all_serving()
        began = asyncio.get_running_loop().time()
        said = await site.do("drain", replica="tiny-0", within_s=12)
        assert said[-1] == {"event": "done"}
        assert texts(said)[1:] == ["tiny-0 is ended, its 2 open requests move to other replicas", "tiny-0 has left"]
        assert 12 <= site.process("tiny-0").ended_at - began <= 12 + SOON_S
        assert site.process("tiny-0").exited.result() == -9
        assert await site.phases() == {"tiny-1": "serving"}
        [refused] = await site.do("drain", replica="tiny-1", within_s=12)
        assert refused["reason"].startswith("tiny-1: is the last replica of tiny that serves.")
        [unknown] = await site.do("drain", replica="tiny-0", within_s=12)
        assert unknown["reason"] == "tiny-0: is not a replica here. Replicas: tiny-1."
        assert (await site.do("drain", replica="tiny-1", within_s=0, allow_outage=True))[-1] == {"event": "done"}
        [written] = site.written["models"]
        assert (written["replicas"], written["unavailable"]) == ([], "It has no replica now.")
        assert (await site.do("reload"))[-1] == {"event": "done"}, "the file's number holds again"
        assert await site.phases() == {"tiny-2": "serving", "tiny-3": "serving"}


async def test_a_model_scales_up_and_down() -> None:
    async with scripted_site() as site:
        await site.all_serving()
        assert (await site.do("scale", model="tiny", replicas=3))[-1] == {"event": "done"}
        assert set(await site.phases()) == {"tiny-0", "tiny-1", "tiny-2"}
        assert (await site.do("scale", model="tiny", replicas=1))[-1] == {"event": "done"}
        assert set(await site.phases()) == {"tiny-0"}
        assert (await site.do("scale", model="tiny", replicas=2))[-1] == {"event": "done"}
        assert set(await site.phases()) == {"tiny-0", "tiny-3"}, "no name is given twice"
        assert num_neighbours(site) == [0, 1], "the first was started when it was alone"
        assert (await site.do("rollout"))[-1] == {"event": "done"}
        assert num_neighbours(site) == [1, 1]
        for body, word in (({"model": "tiny", "replicas": 0}, "outside 1..64"), ({"model": "other", "replicas": 1}, "Models: tiny")):
            [refused] = await site.do("scale", **body)
            assert word in refused["reason"]


async def test_the_status_says_where_it_listens_what_it_read_and_what_answers_elsewhere() -> None:
    async with scripted_site() as site:
        await site.all_serving()
        foreign = ModelSpec(name="far", replicas=0, upstreams=({"url": "https://host/v1"},))
        site.source.config = replace(site.source.config, models=(*site.source.config.models, foreign))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        found = await site.status()
        assert (found["address"], found["config"]) == (f"127.0.0.1:{site.written['port']}", "/etc/site.yaml")
        assert {model["name"]: model["upstreams"] for model in found["models"]} == {"tiny": [], "far": ["https://host/v1"]}


async def test_a_reload_adds_and_removes_models() -> None:
    async with scripted_site() as site:
        await site.all_serving()
        site.scale_file(other=2)
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert listed(site) == {"other": ["other-0", "other-1"]}
        assert [model["name"] for model in (await site.status())["models"]] == ["other"]
        site.scale_file(tiny=1, other=2)
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert listed(site) == {"tiny": ["tiny-1"], "other": ["other-0", "other-1"]}
        assert await site.phases() == {"tiny-1": "serving"}


async def test_changed_options_of_a_model_are_a_rollout_of_that_model_alone() -> None:
    async with scripted_site(models={"tiny": 2, "other": 1}) as site:
        await site.all_serving()
        [tiny, other] = models_of({"tiny": 2, "other": 1})
        site.write_file(models=(replace(tiny, engine={"max_num_seqs": 3}), other))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert listed(site) == {"tiny": ["tiny-2", "tiny-3"], "other": ["other-0"]}
        engines = {content["replica"]: content["engine"] for content in engine_files(site).values()}
        assert engines["tiny-2"] == {"max_num_seqs": 3, "model": "none"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"models": ()}, "models: is empty"),
        ({"models": models_of({"a b": 1})}, "model name"),
        ({"gateway": {"host": "0.0.0.0"}}, "gateway.host: cannot change while the deployment runs"),
    ],
)
async def test_a_fault_changes_nothing(changes: Mapping[str, Any], word: str) -> None:
    async with scripted_site() as site:
        await site.all_serving()
        before = site.written, engine_files(site), len(site.launcher.launched)
        held = site.source.config
        site.write_file(**changes)
        said = await site.do("reload")
        assert said[-1]["event"] == "refused"
        assert word in said[-1]["reason"]
        assert (site.written, engine_files(site), len(site.launcher.launched)) == before
        site.source.config = replace(held, models=models_of({"tiny": 2}))
        assert (await site.do("reload"))[-1] == {"event": "done"}


async def test_what_a_gateway_refuses_changes_nothing() -> None:
    script = Script()
    async with scripted_site(script) as site:
        await site.all_serving()
        before = site.written, engine_files(site), len(site.launcher.launched)
        script.refusal = "limits.x: no"
        site.scale_file(other=1)
        assert (await site.do("reload"))[-1] == {"event": "refused", "reason": "limits.x: no"}
        assert (site.written, engine_files(site), len(site.launcher.launched)) == before


async def test_a_refused_reload_says_why_it_was_refused_and_not_what_going_back_met(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    async with scripted_site(script) as site:
        await site.all_serving()
        script.refusals = ["limits.x: no", "tls.key: gone meanwhile"]
        site.scale_file(other=1)
        assert (await site.do("reload"))[-1] == {"event": "refused", "reason": "limits.x: no"}
        assert "gone back to the configuration before: tls.key: gone meanwhile" in caplog.text
        assert (await site.do("reload"))[-1] == {"event": "done"}


async def test_an_engine_that_never_gets_ready_does_not_keep_back_what_serves() -> None:
    async with scripted_site(Script(loading={"late-0"}), models={"tiny": 1, "late": 1}, is_awaited=False) as site:
        await eventually(lambda: site.is_launched("tiny-0"))
        began = site.process("tiny-0").launched_at
        await eventually(lambda: site.ready is not None)
        assert reconciler.STRAGGLERS_S <= asyncio.get_running_loop().time() - began <= reconciler.STRAGGLERS_S + SOON_S
        assert site.ready is not None
        assert (set(site.ready.replicas), site.ready.starting, site.ready.failed) == ({"tiny-0"}, ["late-0"], {})
        await eventually(lambda: listed(site)["tiny"] == ["tiny-0"])
        assert await site.phases("late") == {"late-0": "starting"}


async def test_an_engine_that_cannot_start_fails_its_model_only_and_a_reload_tries_it_again() -> None:
    reason = "/secret/path is truncated"
    script = Script(failing={f"bad-{index}": reason for index in range(4)})
    async with scripted_site(script, models={"tiny": 1, "bad": 2}) as site:
        assert site.ready is not None
        assert set(site.ready.replicas) == {"tiny-0"}
        assert site.ready.failed == {"bad-0": f"{reason}.", "bad-1": f"{reason}."}
        await eventually(lambda: listed(site) == {"tiny": ["tiny-0"], "bad": []})
        [written] = [model for model in site.written["models"] if model["name"] == "bad"]
        assert written["unavailable"] == "Its engine refused its configuration or weights."
        assert "/secret/path" not in json.dumps(site.written)
        [bad] = [model for model in (await site.status())["models"] if model["name"] == "bad"]
        assert reason in bad["failure"]
        assert reason in (await site.do("reload"))[-1]["reason"], "tried again, and failed again"
        script.failing.clear()
        site.write_file(models=(*models_of({"tiny": 1}), ModelSpec(name="bad", folder=Path("another"), replicas=2)))
        assert (await site.do("reload"))[-1] == {"event": "done"}, "no replica has the folder of before: it may be another"
        assert set((await site.phases("bad")).values()) == {"serving"}


async def test_a_successor_that_cannot_start_ends_the_rollout_and_the_old_replicas_serve_on() -> None:
    script = Script(failing={"tiny-2": "no memory."})
    async with scripted_site(script, models={"tiny": 2}) as site:
        await site.all_serving()
        said = await site.do("rollout")
        assert (said[-1]["event"], said[-1]["reason"]) == ("failed", "tiny: tiny-2 cannot be started: no memory.")
        assert await site.phases() == {"tiny-0": "serving", "tiny-1": "serving"}
        assert (await site.do("rollout"))[-1] == {"event": "done"}


async def test_an_engine_that_ends_at_its_start_is_tried_again_after_a_pause() -> None:
    script = Script(dying={"bad-0"})
    async with scripted_site(script, models={"tiny": 1, "bad": 1}) as site:
        assert site.ready is not None
        assert site.ready.failed == {"bad-0": "ended with status 9; it was started 3 times and never served."}
        failed_at = site.process("bad-0").ended_at
        await eventually(lambda: listed(site)["bad"] == [])
        assert '"Its engine ended before it served."' in json.dumps(site.written)
        script.dying.clear()
        await eventually(lambda: len(site.pids("bad-0")) == 4, 60)
        assert site.process("bad-0").launched_at == pytest.approx(failed_at + replica_processes.FIRST_RETRY_S)
        await site.all_serving("bad")
        assert listed(site)["bad"] == ["bad-0"]


async def test_an_engine_that_dies_in_service_again_and_again_is_started_again_and_again() -> None:
    """After a pause that doubles, up to two seconds; five seconds of service make it the first one again."""
    async with scripted_site() as site:
        pauses_s = []
        for served_s in (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 5.5, 0.5):
            await asyncio.sleep(served_s)
            dead = site.process("tiny-0")
            dead.kill()
            await eventually(lambda dead=dead: site.process("tiny-0") is not dead)  # type: ignore[misc]
            pauses_s.append(site.process("tiny-0").launched_at - dead.ended_at)
        assert pauses_s == pytest.approx([FIRST_PAUSE_S, 0.2, 0.4, 0.8, 1.6, 2.0, FIRST_PAUSE_S, 0.2])
        assert len(site.pids("gateway")) == 1
        await drained(site)


async def test_a_successor_that_a_gateway_cannot_use_ends_the_rollout_with_its_reason() -> None:
    async with scripted_site(Script(not_ready={"tiny-1": "another tokenizer"})) as site:
        await site.all_serving()
        failed = (await site.do("rollout"))[-1]
        assert failed["reason"] == (
            "tiny: tiny-1 cannot be started: serves, and a gateway does not find it ready after 60 s: another tokenizer"
        )
        tried = site.process("tiny-1")
        assert reconciler.CONNECT_TIMEOUT_S <= tried.ended_at - tried.launched_at <= reconciler.CONNECT_TIMEOUT_S + 2 * SOON_S
        assert listed(site) == {"tiny": ["tiny-0"]}


async def test_without_surge_the_old_one_ends_first() -> None:
    async with scripted_site(models={"tiny": 2}) as site:
        await site.all_serving()
        said = await site.do("rollout", model="tiny", max_surge=0)
        assert said[-1] == {"event": "done"}
        steps = [text.split(",")[0] for text in texts(said)][1:]
        assert steps[:4] == ["tiny-0 is retired", "tiny-0 has left", "tiny-2 is starting", "tiny-2 serves"]
        await site.do("scale", model="tiny", replicas=1)
        [refused] = await site.do("rollout", model="tiny", max_surge=0)
        assert "--max-surge 0: would leave no replica of tiny" in refused["reason"]
        assert (await site.do("rollout", model="tiny", max_surge=0, allow_outage=True))[-1] == {"event": "done"}


async def test_a_drain_of_all_ends_the_deployment_within_its_time_and_not_the_files() -> None:
    async with scripted_site(drain_timeout_s=600) as site:
        await site.all_serving()
        folder = site.run_dir
        gateway = site.process("gateway")
        assert (await site.do("drain", within_s=20))[-1] == {"event": "done"}
        assert gateway.config["timeouts"]["drain_s"] == 20
        assert await site.running is FleetExit.DRAINED
        assert not folder.exists()


async def test_a_gateway_that_is_killed_in_a_rollout_reads_what_holds_when_it_is_back() -> None:
    script = Script(loading={"tiny-2"})
    async with scripted_site(script, models={"tiny": 2}) as site:
        await site.all_serving()
        rollout = asyncio.create_task(site.do("rollout"))
        await eventually(lambda: site.is_launched("tiny-2"))
        site.process("gateway").kill()
        script.loading.clear()
        assert (await rollout)[-1] == {"event": "done"}
        assert len(site.pids("gateway")) == 2
        assert listed(site) == {"tiny": ["tiny-2", "tiny-3"]} == {"tiny": site.listed("tiny")}


@pytest.mark.parametrize(("name", "body"), [("scale", {"model": "tiny"}), ("rollout", {"modle": "tiny"}), ("rollout", {"max_surge": 2})])
async def test_a_body_with_a_fault_is_refused_by_name(name: str, body: dict[str, Any]) -> None:
    async with scripted_site() as site:
        [refused] = await site.do(name, **body)
        assert refused["event"] == "refused"


async def test_without_a_file_there_is_nothing_to_reload() -> None:
    async with scripted_site(has_file=False) as site:
        [refused] = await site.do("reload")
        assert refused["reason"].startswith("reload: this deployment was started without a file.")


@pytest.mark.pure
def test_no_deployment_is_found_where_none_runs(tmp_path: Path) -> None:
    (tmp_path / "headrace-dead").mkdir()
    (tmp_path / "headrace-dead" / "lock").touch()
    with pytest.raises(ServerFailed, match="no deployment"):
        find_deployment(tmp_path)
