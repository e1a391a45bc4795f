"""Tests a deployment that scales its replicas by their load, on virtual time: processes and what gateways say of them are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from patience import eventually
from scripted_site import Script, ScriptedSite, scripted_site

from headrace.core.errors import ConfigError
from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.fleet.autoscaling import TICK_S, Growth, ScaledModel
from headrace.fleet.config import FleetConfig, ModelSpec, ReplicaRange
from headrace.fleet.gateways import GatewaysView
from headrace.fleet.kept_scaling import KeptScaling, keep_scaling, read_scaling
from headrace.policy.scaling.autoscaler import IDLE_S, MIN_SETTLE_S, STALE_S, ScalingRules
from headrace.policy.scaling.history import DAY_S, SLOT_S, ArrivalHistory
from headrace.wire.leash import ModelStatus, ReplicaStatus, ReportedReplicaLoad

pytestmark = pytest.mark.loop

SOON_S = TICK_S + 0.5


def load(fill: float, *, num_waiting: int = 0, age_s: float = 0.1) -> ReportedReplicaLoad:
    return ReportedReplicaLoad(round(16 * fill), num_waiting, fill, num_finished=0, num_tokens=0, age_s=age_s)


def scaled(most: int, *, least: int = 1, standby: int = 0, replicas: int = 1) -> tuple[ModelSpec, ...]:
    autoscale = ReplicaRange(min=least, max=most)
    return (ModelSpec(name="tiny", folder=Path("none"), replicas=replicas, autoscale=autoscale, standby=standby),)


def wants(site: ScriptedSite, fill: float, *names: str) -> None:
    site.script.loads = {name: load(fill) for name in names}


async def model_status(site: ScriptedSite) -> dict[str, Any]:
    [found] = (await site.status())["models"]
    return dict(found)


def listed(site: ScriptedSite) -> list[str]:
    [model] = site.written["models"]
    return [replica["name"] for replica in model["replicas"]]


async def test_a_spike_brings_replicas_and_they_leave_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    audited: list[tuple[object, ...]] = []

    async def audit(*record: object) -> None:
        audited.append(record)

    async with scripted_site(specs=scaled(3), audit=audit) as site:
        wants(site, 0.2, "tiny-0")
        await asyncio.sleep(SOON_S)
        assert listed(site) == ["tiny-0"]
        wants(site, 1.0, "tiny-0")
        await asyncio.sleep(SOON_S)
        assert listed(site) == ["tiny-0", "tiny-1"]
        wants(site, 1.0, "tiny-0", "tiny-1")
        await asyncio.sleep(SOON_S)
        assert listed(site) == ["tiny-0", "tiny-1", "tiny-2"], "what loads already is not waited for"
        status = await model_status(site)
        assert status["wanted"] == 3
        assert status["autoscale"] == {"min": 1, "max": 3, "reason": "sequences and KV fill 2.0 replicas"}
        wants(site, 0.1, "tiny-0", "tiny-1", "tiny-2")
        await asyncio.sleep(MIN_SETTLE_S - SOON_S)
        assert len(listed(site)) == 3, "a pause of the load is not its end"
        await asyncio.sleep(3 * SOON_S)
        assert len(listed(site)) == 1
        assert site.written["models"][0]["num_wanted"] == 1
        await site.all_serving()
    reason = "for 300 s no more were needed; requests came in the last minutes"
    assert f"tiny: 1 replica instead of 3: {reason}" in caplog.messages
    assert audited[-1] == ("autoscaler", "deployment.scale", "tiny", {"model": "tiny", "replicas": 1, "reason": reason})


async def test_without_news_of_the_load_nothing_changes() -> None:
    async with scripted_site(specs=scaled(3), hang_timeout_s=0) as site:
        site.script.loads = {"tiny-0": load(1.0, age_s=STALE_S + 1)}
        await asyncio.sleep(60)
        assert listed(site) == ["tiny-0"]
        assert "nothing changes" in (await model_status(site))["autoscale"]["reason"]
        wants(site, 0.2, "tiny-0")
        await asyncio.sleep(SOON_S)
        site.script.silent.add("gateway")
        wants(site, 1.0, "tiny-0")
        await asyncio.sleep(MIN_SETTLE_S + 60)
        assert listed(site) == ["tiny-0"]
        site.script.silent.clear()
        await asyncio.sleep(4 * SOON_S)
        assert listed(site) == ["tiny-0", "tiny-1"]


async def test_a_rollout_is_waited_for() -> None:
    async with scripted_site(specs=scaled(3)) as site:
        site.script.num_open = {"tiny-0": 1}
        rollout = asyncio.create_task(site.do("rollout"))
        await eventually(lambda: listed(site) == ["tiny-1"])
        wants(site, 1.0, "tiny-1")
        await asyncio.sleep(4 * SOON_S)
        assert listed(site) == ["tiny-1"]
        assert "2 replicas later: a rollout of tiny is under way" in (await model_status(site))["autoscale"]["reason"]
        site.script.num_open.clear()
        assert (await rollout)[-1] == {"event": "done"}
        await asyncio.sleep(SOON_S)
        assert listed(site) == ["tiny-1", "tiny-2"]


async def test_a_model_grows_and_is_replaced_while_the_canary_of_another_serves() -> None:
    stable = "s3://models/other:stable"
    other = ModelSpec(name="other", folder=Path("v1"), source=stable)
    async with scripted_site(specs=(other, *scaled(3))) as site:
        await site.all_serving()
        site.source.registry[stable] = Path("v2")
        rollout = asyncio.create_task(site.do("rollout"))
        await eventually(lambda: site.listed("other") == ["other-0", "other-1"])
        wants(site, 1.0, "tiny-0")
        await asyncio.sleep(SOON_S)
        assert site.listed("tiny") == ["tiny-0", "tiny-1"]
        assert (await site.do("drain", replica="tiny-0", within_s=5))[-1] == {"event": "done"}
        await asyncio.sleep(SOON_S)
        assert site.listed("tiny") == ["tiny-1", "tiny-2"]
        assert not rollout.done()
        assert (await rollout)[-1] == {"event": "done"}


@pytest.mark.parametrize("load_s", [0.0, 7.3])
async def test_a_standby_that_hung_is_started_again_once_it_is_taken(load_s: float) -> None:
    async with scripted_site(specs=scaled(2, standby=1), hang_timeout_s=20.0) as site:
        await eventually(lambda: site.is_launched("tiny-1") and site.process("tiny-1").ready.done())
        await asyncio.sleep(SOON_S)
        site.script.silent.add("tiny-1")
        site.script.not_ready["tiny-1"] = "its loop has not turned for 5.0 s"
        before = site.process("tiny-1")
        wants(site, 1.0, "tiny-0")
        await asyncio.wait_for(before.exited, 60)
        site.script.silent.clear()
        site.script.not_ready.clear()
        site.script.loading.add("tiny-1")
        await eventually(lambda: site.process("tiny-1") is not before)
        await asyncio.sleep(load_s)
        site.script.loading.clear()
        await asyncio.sleep(SOON_S)
        assert (await site.phases())["tiny-1"] == "serving"


@pytest.mark.parametrize(("most", "shares"), [(2, {"tiny-0": 0, "tiny-1": 1, "tiny-2": 1}), (3, {"tiny-0": 0, "tiny-1": 1, "tiny-2": 2})])
async def test_beside_an_engine_that_drains_its_share_is_taken_last(most: int, shares: dict[str, int]) -> None:
    async with scripted_site(specs=scaled(most, replicas=2)) as site:
        await site.all_serving()
        site.script.num_open = {"tiny-1": 1}
        wants(site, 1.0, "tiny-0")
        drain = asyncio.create_task(site.do("drain", replica="tiny-1", within_s=3600))
        await eventually(lambda: listed(site) == ["tiny-0", "tiny-2"])
        reconciler = site.supervisor._reconciler
        assert reconciler is not None
        assert {name: process.share.index for name, process in reconciler.processes.items()} == shares
        site.script.num_open.clear()
        assert (await drain)[-1] == {"event": "done"}


async def test_an_idle_model_goes_to_zero_and_a_request_brings_it_back() -> None:
    async with scripted_site(specs=scaled(2, least=0)) as site:
        wants(site, 0.0, "tiny-0")
        await asyncio.sleep(IDLE_S - SOON_S)
        assert listed(site) == ["tiny-0"], "it starts with one"
        await asyncio.sleep(3 * SOON_S)
        [written] = site.written["models"]
        assert (written["replicas"], written["starts_on_demand"], "unavailable" in written) == ([], True, False)
        await eventually(lambda: site.process("tiny-0").exited.done())
        await asyncio.sleep(IDLE_S)
        assert listed(site) == []
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert listed(site) == [], "a reload wakes nothing"
        site.script.models["tiny"] = ModelStatus({}, num_arrived=1, num_held=1)
        await asyncio.sleep(SOON_S)
        assert listed(site) == ["tiny-1"]
        await site.all_serving()
        assert (await model_status(site))["autoscale"]["reason"] == "1 request waits"


async def test_a_model_that_starts_on_demand_and_cannot_start_says_why() -> None:
    async with scripted_site(specs=scaled(2, least=0)) as site:
        site.script.failing["tiny-1"] = "no memory"
        await asyncio.sleep(IDLE_S + 2 * SOON_S)
        site.script.models["tiny"] = ModelStatus({}, num_arrived=1, num_held=1)
        await asyncio.sleep(SOON_S)
        [written] = site.written["models"]
        assert written["unavailable"] == "Its engine refused its configuration or weights."


async def test_a_standby_is_listed_at_once_and_another_one_is_started() -> None:
    async with scripted_site(specs=scaled(3, standby=1)) as site:
        await eventually(lambda: site.is_launched("tiny-1"))
        await asyncio.sleep(1)
        assert await site.phases() == {"tiny-0": "serving", "tiny-1": "standby"}
        assert listed(site) == ["tiny-0"]
        site.script.loading.add("tiny-2")
        wants(site, 1.0, "tiny-0")
        await asyncio.sleep(SOON_S)
        assert await site.phases() == {"tiny-0": "serving", "tiny-1": "serving", "tiny-2": "starting"}
        assert listed(site) == ["tiny-0", "tiny-1"], "the third one loads, and is in no list"
        site.script.loading.clear()
        await asyncio.sleep(1)
        assert (await site.phases())["tiny-2"] == "standby"


async def test_a_spot_notice_begins_the_replacement_while_the_replica_drains() -> None:
    """`headrace drain REPLICA` is what a notice calls: the load decides the number, which is the same as before."""
    script = Script(num_open={"tiny-0": 2})
    async with scripted_site(script, specs=scaled(3, least=2)) as site:
        await site.all_serving()
        wants(site, 0.5, "tiny-0", "tiny-1")
        began = asyncio.get_running_loop().time()
        notice = asyncio.create_task(site.do("drain", replica="tiny-0", within_s=120))
        await asyncio.sleep(SOON_S)
        assert await site.phases() == {"tiny-0": "draining", "tiny-1": "serving", "tiny-2": "serving"}
        assert (await notice)[-1] == {"event": "done"}
        assert 120 <= site.process("tiny-0").ended_at - began <= 121


async def test_an_operator_is_told_that_the_load_decides() -> None:
    async with scripted_site(specs=scaled(3)) as site:
        [refused] = await site.do("scale", model="tiny", replicas=2)
        assert refused["event"] == "refused"
        assert refused["reason"].startswith("tiny=2: the load decides, between 1 and 3.")
        site.write_file(models=scaled(5, least=2))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert len(listed(site)) == 2, "the new bounds hold"
        site.write_file(models=(ModelSpec(name="tiny", folder=Path("none"), replicas=1),))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert (await model_status(site))["autoscale"] is None
        assert (await site.do("scale", model="tiny", replicas=2))[-1] == {"event": "done"}


async def test_a_change_that_gateways_refuse_is_tried_again() -> None:
    async with scripted_site(specs=scaled(2)) as site:
        site.script.refusal = "no more files can be opened"
        wants(site, 1.0, "tiny-0")
        await asyncio.sleep(10 * SOON_S)
        assert listed(site) == ["tiny-0"]
        assert "cannot be had: no more files" in (await model_status(site))["autoscale"]["reason"]
        site.script.refusal = ""
        await asyncio.sleep(4 * SOON_S)
        assert len(listed(site)) == 2


@pytest.mark.pure
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"autoscale": ReplicaRange(min=3, max=2)}, r"models\[0\].autoscale.min: 3 is more than max, 2"),
        ({"autoscale": ReplicaRange(max=65)}, r"models\[0\].autoscale.max: 65 is outside 1..64"),
        ({"autoscale": ReplicaRange(max=4), "replicas": 5}, r"models\[0\].replicas: 5 is outside autoscale, 1..4"),
    ],
)
def test_a_wrong_range_is_refused_by_name(spec: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FleetConfig(models=(ModelSpec(name="tiny", folder=Path("none"), **spec),)).checked()


@pytest.mark.pure
def test_an_idle_engine_fills_nothing_with_its_block_for_padding() -> None:
    """Else one replica would be wanted for ever."""
    idle = LoadSnapshot(
        num_running=0,
        num_waiting=0,
        kv_blocks_free=99,
        kv_blocks_cached=0,
        kv_blocks_used=1,
        kv_blocks_total=100,
        counters=EngineCounters(),
    )
    assert idle.fill == 0.0
    assert replace(idle, num_running=4, max_num_seqs=16, kv_blocks_free=49, kv_blocks_used=51).fill == 0.51


@pytest.mark.pure
def test_the_goal_is_the_shortest_of_the_tiers() -> None:
    models = scaled(2)
    assert FleetConfig(models=models).ttft_s == 1.0
    tiers = {"tiers": {"gold": {"ttft_ms": 300.0}, "free": {"ttft_ms": None}, "slow": {"ttft_ms": 4000.0}}}
    assert FleetConfig(models=models, gateway=tiers).ttft_s == 0.3


@pytest.mark.pure
def test_what_was_learned_is_kept_over_a_restart(tmp_path: Path) -> None:
    history = ArrivalHistory()
    for second in range(0, round(3 * SLOT_S), 10):
        history.add(20, DAY_S + second)
    file = tmp_path / "scaling.json"
    keep_scaling(file, {"tiny": KeptScaling(33.5, history)})
    kept = read_scaling(file)["tiny"]
    assert kept.load_s == 33.5
    assert kept.history.expected(2 * DAY_S, 2 * DAY_S + 60) == history.expected(2 * DAY_S, 2 * DAY_S + 60) == 2.0
    assert file.stat().st_mode & 0o777 == 0o600


async def test_what_was_learned_of_a_model_that_is_not_scaled_now_stays_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    keep_scaling(file, {"other": KeptScaling(77.0), "tiny": KeptScaling(33.0)})
    async with scripted_site(specs=scaled(2), gateway={"state": str(tmp_path)}) as site:
        wants(site, 0.2, "tiny-0")
        await asyncio.sleep(SOON_S)
    assert {name: kept.load_s for name, kept in read_scaling(file).items()} == {"tiny": 33.0, "other": 77.0}


@pytest.mark.pure
@pytest.mark.parametrize(
    "damage", ["", "{", '{"models": []}', '{"models": {"tiny": {"load_s": -1}}}', '{"models": {"tiny": {"load_s": 9, "days": [1]}}}']
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "scaling.json"
    file.write_text(damage)
    assert read_scaling(file) == {}
    keep_scaling(file, {"tiny": KeptScaling()})
    assert set(json.loads(file.read_text())["models"]) == {"tiny"}


@pytest.mark.pure
def test_counters_that_begin_anew_and_those_that_were_not_seen_add_nothing_wrong() -> None:
    growth = Growth()
    assert growth.add({"a": 1000}) == 0, "of earlier times"
    assert growth.add({"a": 1010, "b": 500}) == 10
    assert growth.add({"a": 3, "b": 501}) == 11, "a was started again"
    assert growth.add({"b": 502}) == 12
    assert growth.add({"a": 9, "b": 502}) == 12
    assert growth.add({"a": 10, "b": 502}) == 13


class ScaledModelMachine(RuleBasedStateMachine):
    """Replicas and gateways come, go, fall silent and begin anew in any order, while requests come."""

    RULES = ScalingRules(min_replicas=1, max_replicas=4, load_s=30.0)

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.model = ScaledModel(self.RULES, 2, KeptScaling())
        self.tokens = {"r0": 0, "r1": 0}
        self.fill = 0.5
        self.arrived, self.all_arrived, self.num_held = 0, 0, 0
        self.last_answer = self.now
        self.num_replicas = self.num_seen = 2
        self.look(silent=False)

    def look(self, *, silent: bool) -> None:
        loads = {name: ReportedReplicaLoad(3, 0, self.fill, tokens // 20, tokens, 0.5) for name, tokens in self.tokens.items()}
        replicas = {name: ReplicaStatus(True, "", 1, load=each) for name, each in loads.items()}
        status = ModelStatus(replicas, self.arrived, self.num_held)
        view = GatewaysView([] if silent else [{"tiny": status}], ["gateway"] if silent else [])
        is_blind = silent and self.now - self.last_answer > STALE_S
        self.last_answer = self.last_answer if silent else self.now
        decision = self.model.decide("tiny", view, self.RULES, self.now, num_existing=len(self.tokens))
        assert decision is not None
        self.num_seen = self.num_seen if silent else len(self.tokens)
        if is_blind and self.num_seen:
            assert decision.num_replicas == self.num_replicas, "without news nothing changes"
        assert decision.reason
        self.num_replicas = decision.num_replicas

    @rule(seconds=st.sampled_from([2, 2, 10, 60, 400]), num_new=st.integers(0, 50), fill=st.floats(0.0, 1.0), silent=st.booleans())
    def time_passes(self, seconds: int, num_new: int, fill: float, silent: bool) -> None:
        self.now += seconds
        self.fill = fill
        self.arrived += num_new
        self.all_arrived += num_new
        self.tokens = {name: tokens + 20 * num_new for name, tokens in self.tokens.items()}
        self.look(silent=silent)

    @rule()
    def gateway_begins_anew(self) -> None:
        self.arrived = 0

    @rule(name=st.sampled_from(["r0", "r1", "r2"]), earlier=st.integers(0, 10**6))
    def replica_comes(self, name: str, earlier: int) -> None:
        """As another gateway of the same engine may see it: with counts of earlier times."""
        self.tokens.setdefault(name, earlier)

    @rule(name=st.sampled_from(["r0", "r1", "r2"]))
    def replica_goes(self, name: str) -> None:
        self.tokens.pop(name, None)

    @rule(num_held=st.integers(0, 5))
    def requests_are_held(self, num_held: int) -> None:
        self.num_held = num_held

    @invariant()
    def check(self) -> None:
        assert 1 <= self.num_replicas <= 4
        assert 0 <= self.model._arrived.total <= self.all_arrived, "no request is counted twice, whatever begins anew"


ScaledModelMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestScaledModel = ScaledModelMachine.TestCase
TestScaledModel.pytestmark = [pytest.mark.pure]  # type: ignore[attr-defined]
