"""Tests a deployment whose replicas have only so many hours a day, on virtual time: over restarts, and at gateways once none is left."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from patience import eventually
from scripted_site import Script, ScriptedSite, scripted_site
from virtual_time import virtual_loop

from headrace.cli.admin.control import _shown_model
from headrace.core.errors import ConfigError
from headrace.fleet.autoscaling import KEEP_S, TICK_S
from headrace.fleet.config import FleetConfig, ModelSpec, ReplicaRange
from headrace.fleet.kept_scaling import KeptScaling, keep_scaling, read_scaling
from headrace.policy.scaling.budget import HOUR_S, DayUse
from headrace.policy.scaling.history import DAY_S
from headrace.wire.leash import ModelStatus, ReportedReplicaLoad

pytestmark = pytest.mark.loop

SOON_S = TICK_S + 0.5


@pytest.fixture(autouse=True)
async def virtual_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", virtual_loop().unix_time)


def keep_use(state: Path, left_s: float, *, hours: float = 25.0, least: int = 1) -> None:
    """As a supervisor would have that ends now. left_s: replica-seconds that the day leaves beyond the fewest"""
    now = virtual_loop().unix_time()
    used_s = hours * HOUR_S - least * (DAY_S - now % DAY_S) - left_s
    keep_scaling(state / "scaling.json", {"tiny": KeptScaling(5.0, use=DayUse(now, used_s))})


def site_of(state: Path, *, hours: float = 25.0, least: int = 1, script: Script | None = None) -> AbstractAsyncContextManager[ScriptedSite]:
    autoscale = ReplicaRange(min=least, max=3, replica_hours_per_day=hours)
    spec = ModelSpec(name="tiny", folder=Path("none"), autoscale=autoscale)
    return scripted_site(specs=(spec,), gateway={"state": str(state)}, script=script)


def busy(site: ScriptedSite, *names: str) -> None:
    site.script.loads = {name: ReportedReplicaLoad(16, 0, 1.0, num_finished=0, num_tokens=0, age_s=0.1) for name in names}


async def model_status(site: ScriptedSite) -> dict[str, Any]:
    [found] = (await site.status())["models"]
    return dict(found)


async def test_a_busy_model_keeps_its_replicas_until_the_hours_end_and_the_fewest_over_a_restart(tmp_path: Path) -> None:
    keep_use(tmp_path, 1500.0)
    async with site_of(tmp_path) as site:
        busy(site, "tiny-0", "tiny-1")
        await eventually(lambda: len(site.listed("tiny")) == 3)
        status = await model_status(site)
        assert (status["autoscale"]["replica_hours_per_day"], status["autoscale"]["reason"]) == (25.0, "sequences and KV fill 2.0 replicas")
        [_, line, *_] = _shown_model(status)
        assert line.startswith(f"  by its load, 1 to 3, {status['autoscale']['replica_hours_today']:g} of 25 replica-hours of the day: ")
        await asyncio.sleep(600.0)
        assert len(site.listed("tiny")) == 3
        await asyncio.sleep(200.0)
        assert len(site.listed("tiny")) == 1
        await asyncio.sleep(900.0)
        assert len(site.listed("tiny")) == 1, "although what left did not need all that was kept for it"
        reason = (await model_status(site))["autoscale"]["reason"]
        assert reason.startswith("the day's 25 replica-hours leave 1 replica until midnight UTC; sequences and KV fill")
    kept = read_scaling(tmp_path / "scaling.json")["tiny"].use
    assert kept is not None
    left_s = 25 * HOUR_S - kept.replica_s - (DAY_S - kept.at % DAY_S)
    assert 0.0 < left_s < 100.0
    async with site_of(tmp_path) as site:
        busy(site, "tiny-0")
        await asyncio.sleep(SOON_S)
        assert "leave 1 replica until midnight UTC" in (await model_status(site))["autoscale"]["reason"]
    virtual_loop().change_unix_time(16 * HOUR_S)
    async with site_of(tmp_path) as site:
        busy(site, "tiny-0")
        await eventually(lambda: len(site.listed("tiny")) == 2)


async def test_what_a_killed_supervisor_has_not_written_counts_as_a_minute_and_the_time_without_one_as_none(tmp_path: Path) -> None:
    keep_use(tmp_path, 5000.0)
    before = read_scaling(tmp_path / "scaling.json")["tiny"].use
    assert before is not None
    virtual_loop().be_late(3600.0)
    began = virtual_loop().unix_time()
    async with site_of(tmp_path):
        await asyncio.sleep(10.0)
    after = read_scaling(tmp_path / "scaling.json")["tiny"].use
    assert after is not None
    assert after.replica_s - before.replica_s == pytest.approx(KEEP_S + after.at - began, abs=0.1)


async def test_without_an_hour_left_no_replica_comes_and_gateways_say_until_when(tmp_path: Path) -> None:
    keep_use(tmp_path, 700.0, hours=2.0, least=0)
    async with site_of(tmp_path, hours=2.0, least=0) as site:
        busy(site, "tiny-0")
        await asyncio.sleep(700.0)
        [written] = site.written["models"]
        midnight = virtual_loop().unix_time() - virtual_loop().unix_time() % DAY_S + DAY_S
        assert (written["replicas"], written["closed_until"], written["starts_on_demand"]) == ([], midnight, True)
        site.script.models["tiny"] = ModelStatus({}, num_arrived=1, num_held=1)
        await asyncio.sleep(60.0)
        assert site.listed("tiny") == []
        reason = (await model_status(site))["autoscale"]["reason"]
        assert reason == "the day's 2 replica-hours leave 0 replicas until midnight UTC; 1 request waits"
    async with site_of(tmp_path, hours=2.0, least=0) as site:
        await asyncio.sleep(60.0)
        assert site.pids("tiny-0") == [], "a start takes hours too"
        assert site.written["models"][0]["closed_until"] == midnight
        site.write_file(models=(replace(site.source.config.models[0], autoscale=ReplicaRange(min=0, max=3, replica_hours_per_day=9.0)),))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        site.script.models["tiny"] = ModelStatus({}, num_arrived=1, num_held=1)
        await eventually(lambda: site.listed("tiny") == ["tiny-0"])
        assert "closed_until" not in site.written["models"][0]


async def test_a_supervisor_that_is_killed_soon_has_written_what_counts_of_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    keep_use(tmp_path, 5000.0)
    before = read_scaling(file)["tiny"].use
    for _ in range(3):
        virtual_loop().be_late(20.0)
        async with site_of(tmp_path):
            await asyncio.sleep(SOON_S)
            as_killed = file.read_bytes()
        file.write_bytes(as_killed)
    after = read_scaling(file)["tiny"].use
    assert before is not None
    assert after is not None
    assert after.replica_s - before.replica_s >= 3 * 20.0


async def test_a_model_that_is_taken_out_of_the_file_and_comes_back_has_what_was_left(tmp_path: Path) -> None:
    async with site_of(tmp_path) as site:
        busy(site, "tiny-0", "tiny-1")
        await asyncio.sleep(KEEP_S - 5.0)
        [spec] = site.source.config.models
        for models in ((replace(spec, name="other", autoscale=None),), (spec,)):
            site.write_file(models=models)
            assert (await site.do("reload"))[-1] == {"event": "done"}
            await asyncio.sleep(SOON_S)
        assert (await model_status(site))["autoscale"]["replica_hours_today"] >= round(3 * (KEEP_S - 10.0) / HOUR_S, 2)


async def test_a_replica_that_cannot_be_started_takes_no_hours(tmp_path: Path) -> None:
    script = Script(failing={f"tiny-{number}": "no memory" for number in (1, 2)})
    async with site_of(tmp_path, script=script) as site:
        busy(site, "tiny-0")
        await asyncio.sleep(3600.0)
        assert "failed" in (await site.phases("tiny")).values()
        assert (await model_status(site))["autoscale"]["replica_hours_today"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"min": 1, "replica_hours_per_day": 23.5},
            r"day: 23.5 is less than 24.1: a day of min and standby \(1\), and one more for five minutes and its drain. Raise it, or",
        ),
        ({"min": 1, "replica_hours_per_day": 40.0}, r"day: 40 is less than 48.1: a day of min and standby \(2\), "),
        ({"min": 0, "replica_hours_per_day": 0.02}, r"day: 0.02 is less than 0.09722: "),
        ({"min": 0, "replica_hours_per_day": 0.0}, r"day: 0.0 is outside 0..6144. Leave it out for no limit."),
        ({"min": 0, "replica_hours_per_day": 1e9}, r"day: 1000000000.0 is outside 0..6144"),
    ],
)
@pytest.mark.pure
def test_hours_that_the_fewest_exceed_are_refused_by_name(given: Mapping[str, Any], reason: str) -> None:
    spec = ModelSpec(name="tiny", folder=Path("none"), autoscale=ReplicaRange(max=3, **given), standby=int("48" in reason))
    with pytest.raises(ConfigError, match=rf"models\[0\].autoscale.replica_hours_per_{reason}"):
        FleetConfig(models=(spec,)).checked()


@pytest.mark.pure
def test_a_file_without_the_use_of_the_day_is_read(tmp_path: Path) -> None:
    file, use = tmp_path / "scaling.json", DayUse(1.5, 2.5, 3.5)
    keep_scaling(file, {"tiny": KeptScaling(7.0, use=use)})
    assert read_scaling(file)["tiny"].use == use
    written = json.loads(file.read_text())
    assert written["models"]["tiny"].pop("use") == [*astuple(use)]
    file.write_text(json.dumps(written))
    assert (read_scaling(file)["tiny"].load_s, read_scaling(file)["tiny"].use) == (7.0, None)
