"""Tests the gateway's choice of a replica: failing ones are left out, new ones start slowly, dead ones get nothing."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from gateway_kit import FakeReplica, TestBench, metric, open_bench, some_replicas
from virtual_time import VirtualTimeLoop

from headrace.core.errors import Unavailable
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.core.request import EngineRequest
from headrace.core.update import FinishReason, SequenceUpdate
from headrace.gateway.control import models as control_models
from headrace.gateway.control.models import Sources
from headrace.policy.routing.failures import REPLICA_LIMITS
from headrace.text.folder import TextModel
from headrace.wire.client import ConnectionState
from headrace.wire.stream import ReplicaStream

pytestmark = pytest.mark.loop


def drawing() -> Sources:
    """The loop's clocks, and the same choices each time."""
    loop = virtual_loop()
    return Sources(clock=loop.time, unix_time=loop.unix_time, random=random.Random(5))


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def fails(request: EngineRequest, stream: ReplicaStream) -> None:
    """The engine cannot continue any sequence."""
    stream.put(SequenceUpdate(request_id=request.request_id, epoch=request.epoch, index=0, finish=FinishReason.ERROR, error="a bug"))


def reconnect(replica: FakeReplica, now: float) -> None:
    assert replica.info is not None
    replica.info = replace(replica.info, connected_at=now)


def flaps(replica: FakeReplica) -> Any:
    """Each request is lost at once, with the connection; the next one finds a new connection."""

    def lose(_: EngineRequest, stream: ReplicaStream) -> None:
        stream.fail(Unavailable("reset"))
        virtual_loop().be_late(0.01)
        reconnect(replica, virtual_loop().time())

    return lose


async def ask(bench: TestBench, count: int) -> list[int]:
    """Status of each of some requests, one after another."""
    return [(await bench.chat(max_tokens=1)).status_code for _ in range(count)]


async def test_a_replica_that_fails_its_requests_is_left_out_until_a_probe_is_answered(text: TextModel) -> None:
    async with open_bench(text, models=some_replicas(2), sources=drawing()) as bench:
        bad, good = bench.replicas.values()
        bad.on_submit = fails
        statuses = await ask(bench, 40)
        assert statuses.count(500) == len(bad.requests) == REPLICA_LIMITS.max_failures
        assert metric(bench.gateway, "headrace_replica_ready", model="fox", replica="r0") == 0
        ready = (await bench.client.get("/ready")).json()
        assert "failed several requests in a row" in str(ready)
        await asyncio.sleep(REPLICA_LIMITS.cooldown_s)
        assert (await ask(bench, 40)).count(500) == 1, "the probe"
        bad.on_submit = None
        await asyncio.sleep(2 * REPLICA_LIMITS.cooldown_s)
        before = len(bad.requests)
        assert await ask(bench, 40) == [200] * 40
        assert len(bad.requests) - before > 10, "it has its share again"
        assert metric(bench.gateway, "headrace_replica_ready", model="fox", replica="r0") == 1
        assert len(good.requests) > 70


async def test_a_flapping_replica_is_left_out(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says hello, loses what it is sent, and says hello again."""
    monkeypatch.setattr(control_models, "SLOW_START_S", 0.0)
    async with open_bench(text, models=some_replicas(2), sources=drawing()) as bench:
        flapping, _ = bench.replicas.values()
        flapping.on_submit = flaps(flapping)
        statuses = await ask(bench, 60)
        assert statuses.count(503) == len(flapping.requests) == REPLICA_LIMITS.max_failures


async def test_a_process_that_dies_with_many_requests_has_failed_once(text: TextModel) -> None:
    async with open_bench(text, models=some_replicas(2), sources=drawing()) as bench:
        dying, _ = bench.replicas.values()
        dying.on_submit = lambda _, stream: stream.fail(Unavailable("one connection"))
        statuses = await ask(bench, 20)
        assert statuses.count(503) == len(dying.requests) > REPLICA_LIMITS.max_failures


async def test_the_last_ready_replica_is_never_left_out(text: TextModel) -> None:
    async with open_bench(text, models=some_replicas(2)) as bench:
        bad, drained = bench.replicas.values()
        drained.state = ConnectionState.DRAINING
        bad.on_submit = fails
        assert await ask(bench, 10) == [500] * 10
        bad.on_submit = None
        assert await ask(bench, 2) == [200] * 2


async def test_of_ten_replicas_that_all_fail_nine_are_still_used(text: TextModel) -> None:
    """A request that ends every engine must not close the model."""
    async with open_bench(text, models=some_replicas(10), sources=drawing()) as bench:
        for replica in bench.replicas.values():
            replica.on_submit = fails
        await ask(bench, 60)
        health = bench.gateway.service.models.get("fox").upstream.replicas()
        assert sum(bool(replica.reason) for replica in health) == 1


async def test_requests_that_cannot_be_answered_by_any_replica_are_not_its_failures(text: TextModel) -> None:
    def ends(request: EngineRequest, stream: ReplicaStream) -> None:
        update = SequenceUpdate(request_id=request.request_id, epoch=request.epoch, index=0, finish=FinishReason.ERROR)
        stream.put(update._replace(error=f"{CANNOT_CONTINUE}: the grammar is too deep"))

    async with open_bench(text, models=some_replicas(2)) as bench:
        for replica in bench.replicas.values():
            replica.on_submit = ends
        await ask(bench, 12)
        assert not any(replica.reason for replica in bench.gateway.service.models.get("fox").upstream.replicas())


async def test_a_client_that_leaves_leaves_no_trace_in_the_circuit(text: TextModel) -> None:
    """Not even where its request is the probe: the next one is."""
    async with open_bench(text, models=some_replicas(2), sources=drawing(), timeouts={"request_s": 0.05}) as bench:
        slow, _ = bench.replicas.values()
        slow.on_submit = fails
        await ask(bench, 30)
        slow.on_submit = None
        slow.go.clear()
        await asyncio.sleep(REPLICA_LIMITS.cooldown_s)
        before = len(slow.requests)
        while len(slow.requests) == before:
            await ask(bench, 1)
        slow.go.set()
        patient = replace(bench.reloader.config, timeouts=replace(bench.reloader.config.timeouts, request_s=None))
        await bench.reloader.reload(lambda: patient)
        assert await ask(bench, 30) == [200] * 30
        assert len(slow.requests) > before + 5


# -------------------------------------------------------------------------------------------------------------------- slow start


async def share_of_the_new(text: TextModel, *, connected_s: float, **changes: Any) -> float:
    async with open_bench(text, models=some_replicas(2), sources=drawing(), **changes) as bench:
        new, old = bench.replicas.values()
        reconnect(new, virtual_loop().time() - connected_s)
        await ask(bench, 120)
        assert len(new.requests) + len(old.requests) == 120
        return len(new.requests) / 120


async def test_a_replica_that_has_just_connected_gets_a_growing_share(text: TextModel) -> None:
    """Half of the requests each, as two that are alike get in the end."""
    assert 0.01 < await share_of_the_new(text, connected_s=0.0) < 0.12
    assert 0.15 < await share_of_the_new(text, connected_s=5.0) < 0.36
    assert 0.4 < await share_of_the_new(text, connected_s=10.0) < 0.6


async def test_a_new_replica_takes_what_the_others_cannot(text: TextModel) -> None:
    async with open_bench(text, models=some_replicas(2), sources=drawing()) as bench:
        new, old = bench.replicas.values()
        reconnect(new, virtual_loop().time())
        old.state = ConnectionState.SILENT
        assert await ask(bench, 10) == [200] * 10
        assert (len(new.requests), len(old.requests)) == (10, 0)
