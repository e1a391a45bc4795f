"""Tests how often gateways are asked what they see, and that no decision rests on an answer from before. Processes are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from patience import eventually
from scripted_site import Script, ScriptedSite, scripted_site

from headrace.fleet import placement, reconciler, supervisor
from headrace.fleet.config import ModelSpec

pytestmark = pytest.mark.loop

OWN = ModelSpec(name="own", folder=Path("none"), replicas=2)

WATCHED_S = 20.0


@asynccontextmanager
async def site_of(*specs: ModelSpec, budget: int | None = None) -> AsyncIterator[ScriptedSite]:
    """No two of those that look do so at the same moment."""
    script = Script(loading={"own-0"})
    async with scripted_site(script, specs=specs, sleep_budget_bytes=budget, is_awaited=False) as site:
        await asyncio.sleep(3.33)
        script.loading.clear()
        await eventually(lambda: site.ready is not None)
        yield site


async def num_asked(site: ScriptedSite, interval_s: float) -> float:
    """How often the gateway is asked within such an interval, in the mean."""
    answers, before = site.process("gateway").asked, site.process("gateway").asked.num_answers
    await asyncio.sleep(WATCHED_S)
    return (answers.num_answers - before) * interval_s / WATCHED_S


async def test_all_that_look_ask_no_more_than_the_one_that_needs_it_most() -> None:
    async with site_of(OWN) as site:
        assert await num_asked(site, supervisor.LOOK_S) == pytest.approx(1.0, abs=0.05)
    async with site_of(OWN, ModelSpec(name="a", folder=Path("none"), sleeps=True), budget=8 << 30) as site:
        assert await num_asked(site, placement.LOOK_S) == pytest.approx(1.0, abs=0.05)
        site.script.num_open["own-1"] = 1
        draining = asyncio.create_task(site.do("drain", replica="own-1", within_s=2 * WATCHED_S))
        await asyncio.sleep(1.0)
        assert await num_asked(site, reconciler.POLL_S) == pytest.approx(1.0, abs=0.05)
        site.script.num_open.clear()
        await draining


async def test_a_replica_in_use_is_not_ended_by_an_answer_from_before_it_was_retired() -> None:
    script = Script()
    async with scripted_site(script, models={"tiny": 2}) as site:
        await site.all_serving()
        assert (await site.status())["models"][0]["replicas"][1]["open"] == 0
        script.num_open["tiny-1"] = 1  # it comes while the gateway still lists the replica
        scaling = asyncio.create_task(site.do("scale", model="tiny", replicas=1))
        await asyncio.sleep(5.0)
        assert site.process("tiny-1").asked_at == []
        script.num_open.clear()
        assert (await scaling)[-1] == {"event": "done"}
