"""A deployment of real processes scales by what its engines report: a standby takes a part of the load while the streams of it run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from http_kit import COMPLETIONS, stream
from server_kit import CROWD, Server, serving_fake

from headrace.cli.admin.client import AdminClient

pytestmark = pytest.mark.process

NUM_SEQS = 4
MODEL = {"autoscale": {"min": 1, "max": 2}, "standby": 1}


async def model(site: Server) -> dict[str, Any]:
    found: dict[str, Any] = (await asyncio.to_thread(AdminClient(site.run_dir).status))["models"][0]
    return found


async def phases(site: Server) -> dict[str, str]:
    return {replica["name"]: replica["phase"] for replica in (await model(site))["replicas"]}


async def test_a_full_engine_brings_the_standby_and_no_stream_notices(random_folder: Path) -> None:
    fake, engine = {**CROWD, "step_seconds": 0.02}, {"max_num_seqs": NUM_SEQS}
    with serving_fake(random_folder, fake=fake, engine=engine, models={"fake": MODEL}) as site:
        while (await phases(site)).get("fake-1") != "standby":
            await asyncio.sleep(0.1)
        assert site.metric("headrace_replicas_wanted", model="fake") == 1
        body = {"model": "fake", "prompt": "Hello", "max_tokens": 600, "stream": True}
        streams = [asyncio.create_task(stream(site.port, COMPLETIONS, body)) for _ in range(NUM_SEQS)]
        while (await phases(site)).get("fake-1") != "serving":
            assert not all(task.done() for task in streams), "the load is over"
            await asyncio.sleep(0.1)
        status = await model(site)
        assert (status["wanted"], status["autoscale"]["max"]) == (2, 2)
        await site.eventually(lambda: site.metric("headrace_replicas_wanted", model="fake") == 2)
        for answer in await asyncio.gather(*streams):
            assert (answer.status, answer.error) == (200, None)
        assert "fake-2" in await phases(site), "another one is to stand by"
