"""Tests that the pods of a Service are a model's replicas: in the file that gateways read, at a start, and through reloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kube_kit import KubeServer, endpoint, kube_server, slice_of, use_pod
from patience import eventually
from scripted_site import Script, ScriptedSite, models_of, scripted_site

from headrace.core.errors import ConfigError
from headrace.fleet.config import ModelSpec
from headrace.fleet.gateways import NO_REPLICA
from headrace.fleet.kubernetes.discovery import GATHER_S
from headrace.fleet.kubernetes.endpoints import MAX_ENGINES
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.reconciler import REFUSED_PAUSE_S

pytestmark = pytest.mark.loop


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeServer]:
    async with kube_server(tmp_path) as server:
        use_pod(server, monkeypatch)
        await server.put("endpointslices", "engines-a", slice_of(endpoint("e-0", "10.0.0.1")))
        yield server


def far(service: str = "engines") -> ModelSpec:
    alike = {"name": service, "address": f"{service}:1", "token_file": "", "tls_dir": "/certificates"}
    return ModelSpec(name="far", folder=Path("none"), replicas=0, remote=(alike,), kubernetes=KubernetesService(service=service))


SPECS = (*models_of({"tiny": 1}), far())


def entry(site: ScriptedSite) -> dict[str, Any]:
    """The model in the file as the gateway has read it."""
    found: list[dict[str, Any]] = [each for each in site.process("gateway").config["models"] if each["name"] == "far"]
    return found[0]


async def test_pods_become_replicas_with_what_all_of_them_have_alike(kube: KubeServer) -> None:
    async with scripted_site(specs=SPECS) as site:
        await eventually(lambda: entry(site)["replicas"])
        alike = {"tls_name": "engines.llm.svc", "token_file": "", "tls_dir": "/certificates"}
        assert entry(site)["replicas"] == [{"name": "e-0", "address": "10.0.0.1:7001", **alike}]
        [shown] = [each for each in (await site.status())["models"] if each["name"] == "far"]
        assert (shown["served"], shown["upstreams"]) == ("elsewhere", ["10.0.0.1:7001"])
        await kube.put("endpointslices", "engines-b", slice_of(endpoint("e-1", "10.0.0.2")))
        await eventually(lambda: site.listed("far") == ["e-0", "e-1"])
        await kube.put("endpointslices", "engines-a", slice_of(endpoint("e-0", "10.0.0.1", terminating=True)))
        await eventually(lambda: site.listed("far") == ["e-1"])
        assert site.listed("tiny") == ["tiny-0"]


async def test_a_model_without_a_pod_has_no_replica_and_says_so(kube: KubeServer) -> None:
    await kube.put("endpointslices", "engines-a", slice_of())
    async with scripted_site(specs=SPECS) as site:
        assert (entry(site)["replicas"], entry(site)["unavailable"]) == ([], NO_REPLICA)
        await kube.put("endpointslices", "engines-a", slice_of(endpoint("e-0", "10.0.0.1")))
        await eventually(lambda: site.listed("far") == ["e-0"])
        assert "unavailable" not in entry(site)


async def test_many_changes_within_a_moment_are_one_reload_of_the_gateways(kube: KubeServer) -> None:
    async with scripted_site(specs=SPECS) as site:
        await eventually(lambda: site.listed("far") == ["e-0"])
        asked: list[bytes] = []
        leash = site.process("gateway").asked
        write = leash._write

        def counting(line: bytes) -> None:
            asked.append(line)
            write(line)

        leash._write = counting
        for number in range(1, 20):
            await kube.put("endpointslices", f"engines-{number}", slice_of(endpoint(f"e-{number:02}", f"10.0.1.{number}")))
            await asyncio.sleep(GATHER_S / 50)
        await eventually(lambda: len(site.listed("far")) == 20)
        assert 1 <= sum(b"reload" in line for line in asked) <= 2


async def test_a_reload_follows_another_service_and_ends_the_watch_of_the_first(kube: KubeServer) -> None:
    await kube.put("endpointslices", "others", slice_of(endpoint("o-0", "10.0.2.1"), service="others"))
    async with scripted_site() as site:
        assert kube.asked == []
        site.write_file(models=SPECS)
        assert (await site.do("reload"))[-1] == {"event": "done"}
        await eventually(lambda: site.listed("far") == ["e-0"])
        site.write_file(models=(*models_of({"tiny": 1}), far("others")))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        await eventually(lambda: site.listed("far") == ["o-0"])
        await kube.put("endpointslices", "engines-a", slice_of(endpoint("e-5", "10.0.0.5")))
        site.write_file(models=models_of({"tiny": 1}))
        assert (await site.do("reload"))[-1] == {"event": "done"}
        await asyncio.sleep(60)
        num_asked = len(kube.asked)
        await asyncio.sleep(600)
        assert len(kube.asked) == num_asked


async def test_pods_that_gateways_refuse_are_offered_again(kube: KubeServer) -> None:
    script = Script()
    async with scripted_site(script, specs=SPECS) as site:
        await eventually(lambda: site.listed("far") == ["e-0"])
        script.refusal = "token_file: cannot be read."
        await kube.put("endpointslices", "engines-a", slice_of(endpoint("e-1", "10.0.0.2")))
        await asyncio.sleep(REFUSED_PAUSE_S)
        assert site.listed("far") == ["e-0"]
        script.refusal = ""
        await eventually(lambda: site.listed("far") == ["e-1"])


async def test_an_operator_scales_the_workload_whose_pods_are_the_replicas(kube: KubeServer) -> None:
    await kube.put("statefulsets", "engines", {"spec": {"replicas": 1}})
    spec = replace(far(), kubernetes=KubernetesService(service="engines", workload="statefulsets/engines"))
    async with scripted_site(specs=(spec, replace(far("others"), name="fixed"))) as site:
        said = await site.do("scale", model="far", replicas=3)
        assert said[-1] == {"event": "done"}
        assert kube.replicas("statefulsets", "engines") == 3
        for wanted in (0, MAX_ENGINES + 1):
            assert f"outside 1..{MAX_ENGINES}" in str((await site.do("scale", model="far", replicas=wanted))[-1])
        kube.forbidden.add(("patch", "statefulsets/scale"))
        assert 'verbs: ["patch"]' in str((await site.do("scale", model="far", replicas=2))[-1])
        assert "has no engines on this machine" in str((await site.do("scale", model="fixed", replicas=2))[-1])
        assert kube.replicas("statefulsets", "engines") == 3


async def test_outside_of_a_pod_a_service_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with scripted_site(specs=SPECS, is_awaited=False) as site:
        failure = await site.failure()
        assert isinstance(failure, ConfigError)
        assert "KUBERNETES_SERVICE_HOST" in str(failure)
    async with scripted_site() as site:
        site.write_file(models=SPECS)
        said = await site.do("reload")
        assert "KUBERNETES_SERVICE_HOST" in str(said[-1])
        assert site.listed("tiny") == ["tiny-0"]
