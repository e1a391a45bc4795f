"""Sets how many pods a Deployment or StatefulSet has, or groups of pods a LeaderWorkerSet, by its scale subresource."""

from __future__ import annotations

from headrace.fleet.kubernetes.api import CONFLICT, ApiResource, KubernetesApi, KubernetesFailed, KubernetesObject
from headrace.fleet.kubernetes.service import WORKLOADS


class WorkloadScaler:
    """workload: "statefulsets/NAME", or another of `WORKLOADS`"""

    def __init__(self, api: KubernetesApi, namespace: str, workload: str) -> None:
        kind, _, self._name = workload.partition("/")
        self._api, self._namespace, self._workload = api, namespace, workload
        self._resource = ApiResource(WORKLOADS[kind], f"{kind}/scale")

    async def num_replicas(self) -> int:
        """That are wanted now. Raises KubernetesFailed."""
        return _wanted(await self._api.call("get", self._resource, self._namespace, self._name))

    async def scale(self, num_replicas: int) -> int:
        """Returns the number before. Changes nothing where another client changes it meanwhile. Raises KubernetesFailed."""
        try:
            before = await self._api.call("get", self._resource, self._namespace, self._name)
            if _wanted(before) == num_replicas:
                return num_replicas
            # With its version: a change that came between the two calls is a conflict.
            change = {"metadata": {"resourceVersion": before["metadata"]["resourceVersion"]}, "spec": {"replicas": num_replicas}}
            after = await self._api.call("patch", self._resource, self._namespace, self._name, change)
        except KubernetesFailed as error:
            if error.status != CONFLICT:
                raise
            reason = f"{self._workload} in {self._namespace} was changed by another client at the same time"
            raise KubernetesFailed(f"{reason}. A HorizontalPodAutoscaler of it must go.", CONFLICT) from error
        if _wanted(after) != num_replicas:
            raise KubernetesFailed(f"{self._workload} in {self._namespace} has {_wanted(after)} replicas after {num_replicas} were written")
        return _wanted(before)


def _wanted(scale: KubernetesObject) -> int:
    number = (scale.get("spec") or {}).get("replicas", 0)  # a zero is left out
    if not isinstance(number, int):
        raise KubernetesFailed("a scale without a number of replicas")
    return number
