"""Tests the commands that put a model's engines to sleep and wake them. Processes are scripted."""

from __future__ import annotations

import asyncio

import pytest
from scripted_site import Script, scripted_site

pytestmark = pytest.mark.loop


async def test_the_engines_of_a_model_sleep_and_wake_on_command() -> None:
    script = Script(num_open={"tiny-1": 1})
    async with scripted_site(script, models={"tiny": 2, "other": 1}) as site:
        await site.all_serving()
        sleeping = asyncio.create_task(site.do("sleep", model="tiny", level="disk"))
        await asyncio.sleep(30)
        assert script.asleep == {"tiny-0": "disk"}
        script.num_open.clear()
        said = await sleeping
        assert [each.get("text") for each in said] == ["tiny-0 is asleep (disk)", "tiny-1 is asleep (disk)", None]
        pids = site.pids("tiny-0")
        await asyncio.sleep(300)
        [tiny, other] = (await site.status())["models"]
        assert [(each["phase"], each["ready"], each["reason"]) for each in tiny["replicas"]] == [("serving", False, "asleep")] * 2
        assert other["replicas"][0]["ready"]
        assert site.pids("tiny-0") == pids, "an engine that sleeps does not hang"
        assert (await site.do("wake", model="tiny"))[-1] == {"event": "done"}
        assert script.asleep == {}


async def test_what_cannot_sleep_is_refused_with_its_reason() -> None:
    script = Script(awake_only={"tiny-0": "sleep: a replica of several ranks does not sleep"}, dying={"dead-0"})
    async with scripted_site(script, models={"tiny": 1, "dead": 1}) as site:
        for body, reason in (
            ({"model": "tiny"}, "several ranks"),
            ({"model": "tiny", "level": "deep"}, "--level: 'deep' is not one of ram, disk"),
            ({"model": "none"}, "has no engines on this machine"),
            ({"model": "dead"}, "dead has no engine that runs"),
        ):
            said = await site.do("sleep", **body)
            assert said[-1]["event"] == "refused"
            assert reason in said[-1]["reason"]
