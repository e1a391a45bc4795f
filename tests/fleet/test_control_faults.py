"""Commands to a deployment in which something hangs, refuses or comes at a bad moment. Processes are objects of this process."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, cast

import pytest
from scripted_site import Script, scripted_site
from wire_kit import until

from headrace.fleet import control
from headrace.fleet.command_slot import CommandSlot, ControlBusy
from headrace.fleet.hangup import reloading_when_asked


async def test_a_reload_that_is_refused_while_engines_load_takes_nothing_down() -> None:
    script = Script(loading={"tiny-0"})
    async with scripted_site(script, is_awaited=False) as site:
        await until(lambda: site.is_launched("tiny-0"))
        script.refusal = "limits.x: no"
        site.scale_file(tiny=2)
        assert (await site.do("reload"))[-1] == {"event": "refused", "reason": "limits.x: no"}
        script.refusal = ""
        script.loading.clear()
        await until(lambda: site.process("tiny-0").ready.done())
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


async def test_an_engine_that_hangs_at_its_start_leaves_the_site_to_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "STARTS_S", 0.2)
    script = Script(loading={"tiny-1", "tiny-2"})
    async with scripted_site(script, is_awaited=False) as site:
        await until(lambda: site.is_launched("tiny-0"))
        site.scale_file(tiny=2)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: site.is_launched("tiny-1"))
        await site.idle()
        scaling = asyncio.create_task(site.do("scale", model="tiny", replicas=3))
        await until(lambda: site.is_launched("tiny-2"))
        await site.idle()
        site.scale_file(tiny=3, other=1)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: site.is_launched("other-0"))
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
        await until(lambda: site.listed("tiny") == ["tiny-1"])
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
        await until(lambda: busy.num_reloads == 1)
    assert "changed nothing" not in caplog.text
