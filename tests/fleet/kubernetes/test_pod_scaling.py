"""Tests a deployment that scales pods by their load: the supervisor, the API server's protocol, and a cluster that does what is written."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path

import pytest
from kube_kit import KubeServer, endpoint, kube_server, slice_of, use_pod
from patience import eventually
from scripted_site import Script, ScriptedSite, scripted_site
from virtual_time import virtual_loop

from headrace.fleet.config import ModelSpec, ReplicaRange
from headrace.fleet.kubernetes.actuator import REPEAT_S
from headrace.fleet.kubernetes.lease import LEASE_S, RENEW_S, USE
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.policy.scaling import autoscaler
from headrace.policy.scaling.autoscaler import MIN_SETTLE_S
from headrace.policy.scaling.budget import HOUR_S, DayUse
from headrace.policy.scaling.history import DAY_S
from headrace.wire.leash import ModelStatus, ReportedReplicaLoad

pytestmark = pytest.mark.loop

LEASE = "engines-autoscaler"


def far(most: int = 4, least: int = 1, hours: float | None = None) -> ModelSpec:
    alike = {"name": "engines", "address": "engines:1", "token_file": "", "tls_dir": "/certificates"}
    service = KubernetesService(service="engines", workload="statefulsets/engines")
    autoscale = ReplicaRange(min=least, max=most, replica_hours_per_day=hours)
    return ModelSpec(name="far", folder=Path("none"), replicas=0, remote=(alike,), kubernetes=service, autoscale=autoscale)


class Cluster:
    """Does what a StatefulSet's controller does: pods come after load_s, and leave at once. It ends with the test."""

    def __init__(self, kube: KubeServer, load_s: float = 40.0) -> None:
        self.kube = kube
        self.load_s = load_s
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        num_ready = 0
        while True:
            wanted = self.kube.replicas("statefulsets", "engines")
            if wanted > num_ready:
                await asyncio.sleep(self.load_s)
            if wanted != num_ready:
                num_ready = wanted
                pods = [endpoint(f"e-{number}", f"10.0.0.{number + 1}") for number in range(num_ready)]
                await self.kube.put("endpointslices", "engines-a", slice_of(*pods))
            await asyncio.sleep(0.1)


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeServer]:
    async with kube_server(tmp_path) as server:
        use_pod(server, monkeypatch)
        await server.put("statefulsets", "engines", {"spec": {"replicas": 1}})
        cluster = Cluster(server)
        yield server
        cluster.task.cancel()


@asynccontextmanager
async def gateway_pod(kube: KubeServer, spec: ModelSpec | None = None) -> AsyncIterator[ScriptedSite]:
    async with scripted_site(Script(), specs=(spec or far(),)) as site:
        yield site


def num_pods(site: ScriptedSite) -> int | None:
    """As its gateways' metrics page has it."""
    [entry] = site.process("gateway").config["models"]
    number: int | None = entry.get("num_pods")
    return number


def listed(site: ScriptedSite) -> list[str]:
    return site.listed("far")


def wants(site: ScriptedSite, fill: float, num_pods: int) -> None:
    """Each pod's fill."""
    load = ReportedReplicaLoad(round(16 * fill), 0, fill, num_finished=0, num_tokens=0, age_s=0.1)
    site.script.loads = {f"e-{number}": load for number in range(num_pods)}


async def reason(site: ScriptedSite) -> str:
    [model] = (await site.status())["models"]
    return str(model["autoscale"]["reason"])


async def test_the_load_writes_the_number_of_pods_and_those_that_come_serve(kube: KubeServer) -> None:
    async with gateway_pod(kube) as site:
        wants(site, 0.3, 1)
        await eventually(lambda: listed(site) == ["e-0"])
        wants(site, 1.0, 1)
        await eventually(lambda: kube.replicas("statefulsets", "engines") == 2)
        assert listed(site) == ["e-0"], "it loads"
        await eventually(lambda: listed(site) == ["e-0", "e-1"], 120)
        wants(site, 1.3, 2)
        await eventually(lambda: kube.replicas("statefulsets", "engines") == 4)
        wants(site, 2.0, 2)
        await asyncio.sleep(120)
        assert kube.replicas("statefulsets", "engines") == 4, "never above max"
        assert "sequences and KV fill" in await reason(site)
        wants(site, 0.05, 4)
        await asyncio.sleep(2 * MIN_SETTLE_S)
        assert kube.replicas("statefulsets", "engines") == 1
        await eventually(lambda: listed(site) == ["e-0"])


async def test_a_gateway_pod_that_starts_beside_pods_that_run_takes_none_of_them_away(kube: KubeServer) -> None:
    await kube.put("statefulsets", "engines", {"spec": {"replicas": 3}})
    async with gateway_pod(kube) as site:
        await asyncio.sleep(60)
        assert kube.replicas("statefulsets", "engines") == 3, "although no engine was known at first"
        wants(site, 0.5, 3)
        await asyncio.sleep(MIN_SETTLE_S - 120)
        assert kube.replicas("statefulsets", "engines") == 3


async def test_of_two_gateway_pods_one_scales_and_the_other_takes_over_when_it_is_gone(kube: KubeServer) -> None:
    async with gateway_pod(kube) as second:
        await eventually(lambda: ("leases", LEASE) in kube.objects)
        async with gateway_pod(kube) as first:
            wants(second, 0.3, 1)
            wants(first, 1.0, 1)
            await asyncio.sleep(60)
            assert kube.replicas("statefulsets", "engines") == 1, "the first that came decides"
            assert (num_pods(second), num_pods(first)) == (1, None)
            assert await reason(first) == "another gateway pod scales it"
        holder = kube.objects["leases", LEASE]["spec"]["holderIdentity"]
    async with gateway_pod(kube) as third:
        wants(third, 1.0, 1)
        await asyncio.sleep(LEASE_S + 3 * RENEW_S)
        assert kube.objects["leases", LEASE]["spec"]["holderIdentity"] != holder
        assert kube.replicas("statefulsets", "engines") == 2
        assert num_pods(third) == 2


async def test_a_number_that_another_client_has_written_is_written_again(kube: KubeServer) -> None:
    async with gateway_pod(kube) as site:
        wants(site, 0.3, 1)
        await eventually(lambda: listed(site) == ["e-0"])
        await asyncio.sleep(30)
        await kube.put("statefulsets", "engines", {"spec": {"replicas": 6}})
        await asyncio.sleep(REPEAT_S + 5)
        assert kube.replicas("statefulsets", "engines") == 1


@pytest.mark.parametrize(("verb", "resource"), [("patch", "statefulsets/scale"), ("get", "statefulsets/scale"), ("create", "leases")])
async def test_a_rule_that_the_role_lacks_is_in_the_status(kube: KubeServer, verb: str, resource: str) -> None:
    kube.forbidden.add((verb, resource))
    async with gateway_pod(kube) as site:
        wants(site, 1.0, 1)
        async with asyncio.timeout(60):
            while f'resources: ["{resource}"], verbs: ["{verb}"]' not in await reason(site):
                await asyncio.sleep(1)
        assert kube.replicas("statefulsets", "engines") == 1
        kube.forbidden.clear()
        await eventually(lambda: kube.replicas("statefulsets", "engines") == 2)


async def test_while_the_api_server_is_lost_nothing_is_scaled_and_afterwards_what_is_needed_then(kube: KubeServer) -> None:
    async with gateway_pod(kube) as site:
        wants(site, 0.3, 1)
        await eventually(lambda: listed(site) == ["e-0"])
        await asyncio.sleep(10)
        await kube.stop()
        wants(site, 1.0, 1)
        await asyncio.sleep(600)
        assert listed(site) == ["e-0"]
        assert "gave no answer" in await reason(site)
        await kube.start()
        await eventually(lambda: listed(site) == ["e-0", "e-1"], 240)


async def test_an_idle_model_goes_to_no_pod_and_a_request_brings_one(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "IDLE_S", 60.0)
    async with gateway_pod(kube, far(least=0)) as site:
        wants(site, 0.0, 1)
        await asyncio.sleep(60 + MIN_SETTLE_S + 60)
        assert kube.replicas("statefulsets", "engines") == 0
        await eventually(lambda: listed(site) == [])
        [entry] = site.process("gateway").config["models"]
        assert (entry["starts_on_demand"], "unavailable" in entry) == (True, False)
        await asyncio.sleep(60)
        assert kube.replicas("statefulsets", "engines") == 0
        site.script.models["far"] = ModelStatus({}, num_arrived=1, num_held=1)
        await eventually(lambda: listed(site) == ["e-0"], 120)


async def test_a_model_in_use_through_another_gateway_pod_alone_keeps_its_pod(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "IDLE_S", 400.0)
    async with gateway_pod(kube, far(least=0)) as holder:
        await eventually(lambda: ("leases", LEASE) in kube.objects)
        async with gateway_pod(kube, far(least=0)) as other:
            for num_ended in range(0, 1000, 10):
                for site in (holder, other):
                    site.script.loads = {"e-0": ReportedReplicaLoad(0, 0, 0.0, num_ended, 20 * num_ended, age_s=0.1)}
                other.script.models["far"] = ModelStatus({}, num_arrived=num_ended)
                await asyncio.sleep(10)
                assert kube.replicas("statefulsets", "engines") == 1
            await asyncio.sleep(2 * MIN_SETTLE_S)
            assert kube.replicas("statefulsets", "engines") == 0, "it is idle now"


async def test_a_request_held_at_a_gateway_pod_that_does_not_scale_brings_a_pod_that_stays(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler, "IDLE_S", 60.0)
    async with gateway_pod(kube, far(least=0)) as holder:
        await eventually(lambda: ("leases", LEASE) in kube.objects)
        async with gateway_pod(kube, far(least=0)) as other:
            await asyncio.sleep(60 + MIN_SETTLE_S + 60)
            assert kube.replicas("statefulsets", "engines") == 0
            await asyncio.sleep(REPEAT_S / 2)
            other.script.models["far"] = ModelStatus({}, num_arrived=5, num_held=5)
            await eventually(lambda: kube.replicas("statefulsets", "engines") == 1)
            for _ in range(20):
                await asyncio.sleep(REPEAT_S / 6)
                assert kube.replicas("statefulsets", "engines") == 1, "the holder writes no zero over it"
            assert listed(other) == listed(holder) == ["e-0"]
            other.script.models["far"] = ModelStatus({}, num_arrived=5)
            await asyncio.sleep(60 + MIN_SETTLE_S + 60)
            assert kube.replicas("statefulsets", "engines") == 0


async def test_of_gateway_pods_that_hold_requests_at_once_one_starts_a_pod(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autoscaler, "IDLE_S", 60.0)
    caplog.set_level("INFO")
    held = ModelStatus({}, num_arrived=1, num_held=1)
    async with gateway_pod(kube, far(least=0)) as holder:
        await eventually(lambda: ("leases", LEASE) in kube.objects)
        async with gateway_pod(kube, far(least=0)) as second, gateway_pod(kube, far(least=0)) as third:
            await asyncio.sleep(60 + MIN_SETTLE_S + 60)
            assert kube.replicas("statefulsets", "engines") == 0
            kube.slow_s = 0.7
            second.script.models["far"] = third.script.models["far"] = held
            await eventually(lambda: kube.replicas("statefulsets", "engines") == 1)
            await asyncio.sleep(5)
            assert [await reason(site) for site in (second, third)] == 2 * ["another gateway pod scales it"]
            assert listed(holder) == []
    assert sum("1 replica of statefulsets/engines instead of 0" in message for message in caplog.messages) == 1
    assert not any("cannot be counted" in message for message in caplog.messages)


def use_of_day(kube: KubeServer) -> DayUse:
    return DayUse.of(json.loads(kube.objects["leases", LEASE]["metadata"]["annotations"][USE]))


async def leave(kube: KubeServer, left_s: float, hours: float, least: int) -> None:
    """As a gateway pod would that is gone now. left_s: replica-seconds that the day leaves beyond the fewest"""
    now = virtual_loop().unix_time()
    use = DayUse(now, hours * HOUR_S - least * (DAY_S - now % DAY_S) - left_s)
    await kube.put("leases", LEASE, {"metadata": {"annotations": {USE: json.dumps(astuple(use))}}, "spec": {}})


async def test_the_hours_of_the_day_pass_to_the_gateway_pod_that_takes_over(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", virtual_loop().unix_time)
    await leave(kube, 1500.0, 25.0, 1)
    async with gateway_pod(kube, far(hours=25.0)) as first:
        wants(first, 1.0, 1)
        await eventually(lambda: kube.replicas("statefulsets", "engines") == 2)
        await asyncio.sleep(200.0)
    used_s, at = use_of_day(kube).replica_s, use_of_day(kube).at
    virtual_loop().be_late(60.0)
    async with gateway_pod(kube, far(hours=25.0)) as second:
        wants(second, 1.0, 1)
        await asyncio.sleep(30.0)
        now = use_of_day(kube)
        assert now.replica_s - used_s == pytest.approx(2 * (now.at - at), abs=0.1), "pods run on while no gateway pod scales them"
        await asyncio.sleep(1500.0)
        assert kube.replicas("statefulsets", "engines") == 1
        assert (await reason(second)).startswith("the day's 25 replica-hours leave 1 replica until midnight UTC; ")
        async with gateway_pod(kube, far(hours=25.0)) as third:
            await asyncio.sleep(RENEW_S)
            assert await reason(third) == "another gateway pod scales it"
    assert use_of_day(kube).replica_s <= 25 * HOUR_S - (DAY_S - use_of_day(kube).at % DAY_S)


@pytest.mark.parametrize("edited", ["", "[", "[" * 100_000, "[1e999, 0, 0]", f"[1{'0' * 400}, 0, 0]", "7"])
async def test_an_annotation_that_was_damaged_stops_no_scaling(kube: KubeServer, edited: str) -> None:
    await kube.put("leases", LEASE, {"metadata": {"annotations": {USE: edited}}, "spec": {}})
    async with gateway_pod(kube, far(hours=25.0)) as site:
        wants(site, 1.0, 1)
        await eventually(lambda: kube.replicas("statefulsets", "engines") == 2)
        await eventually(lambda: use_of_day(kube).replica_s > 0.0)


async def test_without_an_hour_left_no_gateway_pod_starts_a_pod_for_what_it_holds(
    kube: KubeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", virtual_loop().unix_time)
    await leave(kube, 10.0, 2.0, 0)
    spec = far(least=0, hours=2.0)
    async with gateway_pod(kube, spec) as holder:
        await eventually(lambda: kube.replicas("statefulsets", "engines") == 0)
        async with gateway_pod(kube, spec) as other:
            other.script.models["far"] = ModelStatus({}, num_arrived=1, num_held=1)
            midnight = virtual_loop().unix_time() - virtual_loop().unix_time() % DAY_S + DAY_S
            for _ in range(20):
                await asyncio.sleep(3.0)
                assert kube.replicas("statefulsets", "engines") == 0
            for site in (holder, other):
                assert site.process("gateway").config["models"][0]["closed_until"] == midnight
