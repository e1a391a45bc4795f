"""Tests how soon /ready follows the truth, on virtual time. Real processes, in order: tests/e2e/test_ready.py."""

from __future__ import annotations

import asyncio

import pytest
from gateway_kit import open_bench, snapshot

from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState, SeenLoad

pytestmark = pytest.mark.loop

LOOK_S = 0.05


@pytest.mark.parametrize("state", list(ConnectionState))
async def test_ready_is_answered_at_once_whatever_the_replica_does(text: TextModel, state: ConnectionState) -> None:
    loop = asyncio.get_running_loop()
    async with open_bench(text) as bench:
        bench.replica.go.clear()
        bench.replica.state = state
        asked_s = loop.time()
        response = await bench.client.get("/ready")
        assert loop.time() == asked_s
        assert (response.status_code == 200) is (state is ConnectionState.CONNECTED)


async def test_ready_is_false_when_a_step_has_taken_a_second_and_true_after_it(text: TextModel) -> None:
    """Each heartbeat tells the step's age; the last one is as old as it was sent, as from a process that has stopped since."""
    loop = asyncio.get_running_loop()
    async with open_bench(text) as bench:
        began_s = loop.time()
        bench.replica.snapshot = SeenLoad(snapshot(step_age_s=0.0), began_s)
        while (await bench.client.get("/ready")).status_code == 200:
            assert loop.time() - began_s <= 1.0
            await asyncio.sleep(LOOK_S)
        assert loop.time() - began_s == pytest.approx(1.0, abs=LOOK_S)
        assert "a step has taken" in (await bench.client.get("/ready")).json()["reason"]
        bench.replica.snapshot = SeenLoad(snapshot(), loop.time())
        assert (await bench.client.get("/ready")).status_code == 200
