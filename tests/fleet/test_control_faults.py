"""Tests commands to a deployment in which something hangs, refuses or comes at a bad moment. Processes are scripted."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, cast

import pytest
from patience import eventually
from scripted_site import FleetExit, Script, scripted_site
from virtual_time import VirtualTimeLoop

from headrace.fleet import control, gateways, supervisor
from headrace.fleet.commands import CommandSlot, ControlBusy
from headrace.fleet.control import reloading_when_asked

pytestmark = pytest.mark.loop


async def test_a_reload_that_is_refused_while_engines_load_takes_nothing_down() -> None:
    script = Script(loading={"tiny-0"})
    async with scripted_site(script, is_awaited=False) as site:
        await eventually(lambda: site.is_launched("tiny-0"))
        script.refusal = "limits.x: no"
        site.scale_file(tiny=2)
        assert (await site.do("reload"))[-1] == {"event": "refused", "reason": "limits.x: no"}
        script.refusal = ""
        script.loading.clear()
        await eventually(lambda: site.process("tiny-0").ready.done())
        assert (await site.do("scale", model="tiny", replicas=2))[-1] == {"event": "done"}
        assert await site.phases() == {"tiny-0": "serving", "tiny-2": "serving"}, "the name in the refused plan is not given again"
        assert not site.running.done()


async def test_a_refused_rollout_leaves_the_reason_why_the_one_before_failed() -> None:
    script = Script(failing={"tiny-1": "no memory"})
    async with scripted_site(script) as site:
        assert (await site.do("rollout"))[-1] == {"event": "failed", "reason": "tiny: tiny-1 cannot be started: no memory."}
        script.refusal = "limits.x: no"
        refused = await site.do("rollout")
        assert [line["event"] for line in refused] == ["refused"], "nothing is said of a plan that is not carried out"
        [model] = (await site.status())["models"]
        assert model["failure"] == "tiny: tiny-1 cannot be started: no memory."
        script.refusal = ""
        assert (await site.do("rollout"))[-1] == {"event": "done"}
        assert await site.phases() == {"tiny-3": "serving"}, "tiny-2 was in the refused plan"


async def test_a_model_whose_tokenizer_gateways_cannot_use_fails_alone_and_a_reload_tries_it_again() -> None:
    script = Script(unreadable={"bad": "tokenizer.json: is missing."})
    async with scripted_site(script, models={"tiny": 1, "bad": 1}, workers=2) as site:
        async with asyncio.timeout(60):
            while await site.phases("bad") != {"bad-0": "failed"}:
                await asyncio.sleep(0.02)
        await eventually(lambda: site.listed("bad", "gateway-0") == [])
        assert await site.phases() == {"tiny-0": "serving"}
        [written] = [model for model in site.process("gateway-0").config["models"] if model["name"] == "bad"]
        assert written["unavailable"] == "Its tokenizer or chat template cannot be used."
        assert site.process("bad-0").exited.done(), "its engine is of no use"
        reason = "bad: bad-{} cannot be started: tokenizer.json: is missing."
        [shown] = [model for model in (await site.status())["models"] if model["name"] == "bad"]
        assert shown["failure"] == reason.format(0)
        assert (await site.do("reload"))[-1] == {"event": "failed", "reason": reason.format(1)}
        assert (await site.do("rollout", model="tiny"))[-1] == {"event": "done"}, "other models change as ever"
        script.unreadable.clear()
        assert (await site.do("reload"))[-1] == {"event": "done"}
        assert await site.phases("bad") == {"bad-2": "serving"}


async def test_a_tokenizer_that_one_gateway_alone_cannot_use_costs_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started again while the model's files were being copied, say: the other one serves."""
    async with scripted_site(workers=2) as site:
        await site.all_serving()
        second = site.process("gateway-1")
        monkeypatch.setattr(second, "_script", Script(unreadable={"tiny": "tokenizer.json: is missing."}))
        assert (await site.do("scale", model="tiny", replicas=1))[-1] == {"event": "done"}
        [model] = (await site.status())["models"]
        assert [(each["phase"], each["ready"], each["reason"]) for each in model["replicas"]] == [
            ("serving", False, "tokenizer.json: is missing.")
        ]
        assert not site.process("tiny-0").exited.done()


async def test_an_engine_that_hangs_at_its_start_leaves_the_site_to_its_operator() -> None:
    script = Script(loading={"tiny-1", "tiny-2"})
    async with scripted_site(script, is_awaited=False) as site:
        await eventually(lambda: site.is_launched("tiny-0"))
        site.scale_file(tiny=2)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: site.is_launched("tiny-1"))
        await site.idle()
        scaling = asyncio.create_task(site.do("scale", model="tiny", replicas=3))
        await eventually(lambda: site.is_launched("tiny-2"))
        began = asyncio.get_running_loop().time()
        await site.idle()
        assert control.STARTS_S <= asyncio.get_running_loop().time() - began <= control.STARTS_S * 1.2
        site.scale_file(tiny=3, other=1)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: site.is_launched("other-0"))
        await site.idle()
        assert (await site.do("scale", model="tiny", replicas=1))[-1] == {"event": "done"}
        assert await site.phases() == {"tiny-0": "serving"}
        said = await scaling
        assert said[1] == {"event": "progress", "text": "tiny-1, tiny-2 are still starting; other commands are taken meanwhile"}


async def test_a_rollout_of_all_models_that_one_model_refuses_changes_none() -> None:
    async with scripted_site(models={"tiny": 2, "single": 1}) as site:
        [refused] = await site.do("rollout", max_surge=0)
        assert refused["event"] == "refused"
        assert "would leave no replica of single" in refused["reason"]
        assert [each["revision"] for each in (await site.status())["models"]] == [0, 0]
        assert await site.phases() == {"tiny-0": "serving", "tiny-1": "serving"}


async def test_a_command_hears_of_its_own_models_alone() -> None:
    script = Script(num_open={"tiny-0": 1})
    async with scripted_site(script, models={"tiny": 2, "other": 2}) as site:
        draining = asyncio.create_task(site.do("drain", replica="tiny-0", within_s=60))
        await eventually(lambda: site.listed("tiny") == ["tiny-1"])
        scaled = await site.do("scale", model="other", replicas=3)
        script.num_open.clear()
        drained = await draining
        assert [line["text"] for line in scaled[:-1]] == ["other-2 is starting", "other-2 serves"]
        assert [line["text"] for line in drained[:-1]] == ["tiny-0 is retired, 1 request open", "tiny-0 has left"]


class BusyControl:
    """Commands of which another one always comes first, once."""

    def __init__(self) -> None:
        self.slot = CommandSlot()
        self.num_reloads = 0
        self.is_busy = True

    async def idle(self) -> None:
        await self.slot.wait_free()

    async def reload(self) -> list[str]:
        if self.is_busy:
            self.is_busy = False
            raise ControlBusy("rollout tiny is running")
        self.num_reloads += 1
        return []


async def test_a_hangup_that_finds_another_command_just_begun_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    asked, busy = asyncio.Event(), BusyControl()
    async with reloading_when_asked(asked, cast("Any", busy)):
        asked.set()
        await eventually(lambda: busy.num_reloads == 1)
    assert "changed nothing" not in caplog.text


async def test_a_drain_of_all_waits_for_no_gateway_that_hangs() -> None:
    script = Script()
    async with scripted_site(script, workers=2) as site:
        script.silent.add("gateway-1")
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await site.do("drain", within_s=1.5))[-1] == {"event": "done"}
        assert loop.time() - began == pytest.approx(supervisor.NOTICE_S)
        assert site.process("gateway-0").config["timeouts"]["drain_s"] == 1.5
        assert await site.running is FleetExit.CUT, "the gateway that hangs is killed"
        # Its drain began after the notice, or where the time was over meanwhile; a second after that the streams are cut.
        assert loop.time() - began < 1.5 + supervisor.NOTICE_S + supervisor.CUT_GRACE_S + supervisor.GATEWAY_GRACE_S


async def test_a_drain_of_all_waits_for_no_change_that_is_under_way() -> None:
    script = Script()
    async with scripted_site(script, workers=2) as site:
        script.holding.add("gateway-1")
        scaling = asyncio.create_task(site.do("scale", model="tiny", replicas=2))
        await eventually(lambda: site.listed("tiny", "gateway-0") == ["tiny-0", "tiny-1"])
        assert (await site.do("drain", within_s=20))[-1] == {"event": "done"}
        assert await site.running is FleetExit.DRAINED
        assert site.pids("tiny-1") == [], "nothing is started any more"
        assert (await scaling)[-1]["event"] in ("refused", "failed")


async def test_the_last_replica_is_not_drained_while_a_gateway_starts_again() -> None:
    script = Script()
    async with scripted_site(script, models={"tiny": 2}) as site:
        await site.all_serving()
        script.loading.add("gateway")
        site.process("gateway").kill()
        await eventually(lambda: len(site.pids("gateway")) == 2)
        assert (await site.do("drain", replica="tiny-0", within_s=5))[-1] == {"event": "done"}, "the other one served when it was last seen"
        [refused] = await site.do("drain", replica="tiny-1", within_s=5)
        assert refused["reason"].startswith("tiny-1: is the last replica of tiny that serves")


async def test_a_gateway_that_hangs_is_started_again_after_ten_seconds() -> None:
    script = Script()
    async with scripted_site(script, workers=2) as site:
        script.silent.add("gateway-1")
        hung_at = asyncio.get_running_loop().time()
        await eventually(lambda: len(site.pids("gateway-1")) == 2, 60)
        killed = next(process for process in site.launcher.launched if process.label == "gateway-1")
        looks_s = supervisor.GATEWAY_LOOKS * (supervisor.LOOK_S + gateways.STATUS_TIMEOUT_S)
        assert killed.ended_at - hung_at == pytest.approx(looks_s, abs=supervisor.LOOK_S)
        script.silent.clear()
        await eventually(lambda: site.process("gateway-1").ready.done())
        assert (len(site.pids("gateway-0")), len(site.pids("tiny-0"))) == (1, 1)


async def test_an_engine_that_no_gateway_can_use_is_started_again_unless_it_drains() -> None:
    script = Script()
    async with scripted_site(script, workers=2, models={"tiny": 2}, hang_timeout_s=20.0) as site:
        await site.all_serving()
        script.not_ready["tiny-0"] = "draining"
        await asyncio.sleep(60)
        assert len(site.pids("tiny-0")) == 1
        script.not_ready["tiny-0"] = "not connected"
        lost_at, lost = asyncio.get_running_loop().time(), site.process("tiny-0")
        await eventually(lambda: len(site.pids("tiny-0")) == 2, 60)
        assert lost.ended_at - lost_at == pytest.approx(20.0, abs=supervisor.LOOK_S)
        assert len(site.pids("tiny-1")) == 1


async def test_a_supervisor_that_stood_still_itself_takes_nothing_for_hung() -> None:
    """Looks are counted, not seconds."""
    script = Script()
    async with scripted_site(script, models={"tiny": 2}, hang_timeout_s=20.0) as site:
        await site.all_serving()
        script.not_ready["tiny-0"] = "not connected"
        await asyncio.sleep(5)
        cast("VirtualTimeLoop", asyncio.get_running_loop()).be_late(300)
        await asyncio.sleep(5)
        script.not_ready.clear()
        await asyncio.sleep(60)
        assert (len(site.pids("tiny-0")), len(site.pids("gateway"))) == (1, 1)


async def test_nothing_that_hangs_is_killed_where_that_is_off() -> None:
    script = Script()
    async with scripted_site(script, workers=2, hang_timeout_s=0.0) as site:
        await site.all_serving()
        script.silent.add("gateway-1")
        script.not_ready["tiny-0"] = "not connected"
        await asyncio.sleep(600)
        assert (len(site.pids("gateway-1")), len(site.pids("tiny-0"))) == (1, 1)


async def test_an_engine_that_is_not_ready_in_time_fails_its_model_alone() -> None:
    script = Script(loading={"other-0"})
    async with scripted_site(script, models={"tiny": 1, "other": 1}, start_timeout_s=7.0) as site:
        [tiny, other] = (await site.status())["models"]
        assert tiny["failure"] == ""
        assert other["failure"] == "other: other-0 cannot be started: did not serve within 7 s and was killed (start_timeout_s)"
        late = site.process("other-0")
        assert late.ended_at - late.launched_at == pytest.approx(7.0)
        script.loading.clear()
        assert (await site.do("rollout", model="other"))[-1] == {"event": "done"}
