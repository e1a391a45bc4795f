"""Tests that a workload has as many pods as were decided, and that every reason why it has not is named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kube_kit import NAMESPACE, KubeServer, kube_server

from headrace.fleet.kubernetes.api import ApiResource, KubernetesApi, KubernetesFailed, KubernetesObject
from headrace.fleet.kubernetes.scale import WorkloadScaler

pytestmark = pytest.mark.loop


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[KubeServer]:
    async with kube_server(tmp_path) as server:
        await server.put("statefulsets", "engines", {"spec": {"replicas": 2, "serviceName": "engines"}, "status": {"replicas": 2}})
        await server.put("leaderworkersets", "engines", {"spec": {"replicas": 2}})
        yield server


def scaler(kube: KubeServer, workload: str = "statefulsets/engines") -> WorkloadScaler:
    return WorkloadScaler(kube.api, NAMESPACE, workload)


@pytest.mark.parametrize("wanted", [0, 1, 5])
async def test_the_number_is_written_and_nothing_else_of_the_workload(kube: KubeServer, wanted: int) -> None:
    assert await scaler(kube).scale(wanted) == 2
    assert kube.objects["statefulsets", "engines"]["spec"] == {"replicas": wanted, "serviceName": "engines"}


async def test_a_number_that_is_right_is_not_written(kube: KubeServer) -> None:
    assert await scaler(kube).scale(2) == 2
    assert kube.calls("patch") == 0


async def test_groups_of_pods_are_counted_in_groups(kube: KubeServer) -> None:
    groups = scaler(kube, "leaderworkersets/engines")
    assert await groups.scale(3) == 2
    assert await groups.num_replicas() == kube.replicas("leaderworkersets", "engines") == 3
    assert kube.replicas("statefulsets", "engines") == 2


@pytest.mark.parametrize("verb", ["get", "patch"])
@pytest.mark.parametrize(("kind", "group"), [("statefulsets", "apps"), ("leaderworkersets", "leaderworkerset.x-k8s.io")])
async def test_a_rule_that_the_role_lacks_is_named(kube: KubeServer, verb: str, kind: str, group: str) -> None:
    kube.forbidden.add((verb, f"{kind}/scale"))
    rule = f'apiGroups: ["{group}"], resources: ["{kind}/scale"], verbs: ["{verb}"]'
    with pytest.raises(KubernetesFailed) as caught:
        await scaler(kube, f"{kind}/engines").scale(3)
    assert rule in str(caught.value)
    assert kube.replicas(kind, "engines") == 2


async def test_a_workload_that_is_not_there_is_named(kube: KubeServer) -> None:
    with pytest.raises(KubernetesFailed, match=r"deployments/scale engines in llm: 404, deployments 'engines' not found"):
        await scaler(kube, "deployments/engines").scale(3)


async def test_a_change_of_another_client_meanwhile_is_a_conflict_that_is_named_and_stays(kube: KubeServer) -> None:
    class Late(KubernetesApi):
        async def call(
            self, verb: str, resource: ApiResource, namespace: str, name: str = "", body: object = None, **query: str
        ) -> KubernetesObject:
            if verb == "patch":
                await kube.put("statefulsets", "engines", {"spec": {"replicas": 7}})
            return await super().call(verb, resource, namespace, name, body, **query)

    late = Late(kube.api.url, kube.account)
    with pytest.raises(KubernetesFailed, match="was changed by another client"):
        await WorkloadScaler(late, NAMESPACE, "statefulsets/engines").scale(3)
    assert kube.replicas("statefulsets", "engines") == 7


async def test_a_server_that_is_lost_is_said(kube: KubeServer) -> None:
    await kube.stop()
    with pytest.raises(KubernetesFailed, match="gave no answer") as caught:
        await scaler(kube).scale(3)
    assert caught.value.status == 0
