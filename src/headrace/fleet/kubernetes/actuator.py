"""Scales by load the workloads whose pods are engines: the gateway pod that holds a workload's Lease decides, and no other."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from dataclasses import dataclass

from headrace.core.errors import counted
from headrace.core.tasks import end_tasks
from headrace.fleet.autoscaling import ACTOR, NotScaling
from headrace.fleet.commands import CommandAudit, no_operator
from headrace.fleet.kubernetes.api import CONFLICT, KubernetesApi, KubernetesFailed
from headrace.fleet.kubernetes.lease import LeaderLease
from headrace.fleet.kubernetes.scale import WorkloadScaler
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.reconciler import Reconciler
from headrace.policy.scaling.budget import DayUse

log = logging.getLogger(__name__)

REPEAT_S = 30.0
"""The number is looked at again after so long, and written again where another client has changed it."""


@dataclass(slots=True)
class _Workload:
    """
    grows_since   pods were added then, and some are not found yet; load_s: how long the last ones took
    num_before    until `left_at` there may be as many pods, some of which leave
    """

    lease: LeaderLease
    holding: asyncio.Task[None]
    scaler: WorkloadScaler
    written: int = -1
    written_at: float = 0.0
    grows_since: float | None = None
    load_s: float | None = None
    num_before: int = 0
    left_at: float = 0.0


class PodActuator:
    def __init__(self, reconciler: Reconciler, audit: CommandAudit) -> None:
        self._reconciler = reconciler
        self._audit = audit
        self._api = KubernetesApi.of_pod()
        self._identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._workloads: dict[KubernetesService, _Workload] = {}

    async def num_replicas(self, model: str) -> int:
        try:
            return await self._held(model)[1].scaler.num_replicas()
        except NotScaling:
            await self._start_for_held(model)
            raise

    async def _start_for_held(self, model: str) -> None:
        """The pod that scales does not see what waits at this one, which no engine would ever take."""
        service = self._service(model)
        workload, num_held = self._workloads[service], sum(status.num_held for status in self._reconciler.view.of(model))
        [budget] = [self._reconciler.config.day_budget(spec) for spec in self._reconciler.config.models if spec.name == model]
        if budget is not None and not workload.lease.was_read:
            return  # what the day leaves is not known yet
        closed: dict[str, object] = {}
        if budget is not None and not budget.num_fixed and workload.lease.use is not None:
            use = workload.lease.use.later(0, time.time())
            closed = {"closed_until": use.next_midnight} if budget.is_spent(use) else {}
        self._reconciler.note_scaling(model, closed)
        if closed or not num_held or self._reconciler.found.get(service) or await workload.scaler.num_replicas():
            return
        try:
            await workload.scaler.scale(1)
        except KubernetesFailed as error:
            if error.status != CONFLICT:
                raise
            return  # another pod has written it since
        await self._note(model, service, 0, 1, f"{counted(num_held, 'request')} held at a gateway pod that does not scale")

    def load_s(self, model: str) -> float | None:
        """Counted in pods that are found, which have loaded."""
        service, workload = self._held(model)
        num_found, now = len(self._reconciler.found.get(service, ())), asyncio.get_running_loop().time()
        if workload.grows_since is not None and num_found >= workload.written:
            workload.load_s, workload.grows_since = now - workload.grows_since, None
        return workload.load_s

    def num_existing(self, model: str) -> int:
        """A pod that leaves is not found any more."""
        service, workload = self._held(model)
        num_before = workload.num_before if asyncio.get_running_loop().time() < workload.left_at else 0
        return max(workload.written, num_before, len(self._reconciler.found.get(service, ())))

    def found_use(self, model: str) -> DayUse | None:
        """Each pod has a state folder of its own, and another pod may have scaled since."""
        return self._held(model)[1].lease.use

    def leave_use(self, model: str, use: DayUse) -> None:
        self._held(model)[1].lease.use = use

    async def scale(self, model: str, num_replicas: int, reason: str) -> None:
        service, workload = self._held(model)
        now = asyncio.get_running_loop().time()
        if workload.written == num_replicas and now - workload.written_at < REPEAT_S:
            return
        if workload.written == num_replicas == 0:  # never written over: another gateway pod may have started one
            workload.written_at = now
            if found := await workload.scaler.num_replicas():
                workload.written = -1
                raise NotScaling(f"{counted(found, 'replica')} came for requests at another gateway pod: it begins with them")
            return
        before = await workload.scaler.scale(num_replicas)
        workload.written, workload.written_at = num_replicas, now
        if before == num_replicas:
            return
        workload.grows_since = now if before < num_replicas else None
        if before > num_replicas:
            workload.num_before = max(before, workload.num_before if now < workload.left_at else 0)
            workload.left_at = now + self._reconciler.config.leave_s
        await self._note(model, service, before, num_replicas, reason)

    async def _note(self, model: str, service: KubernetesService, before: int, num_replicas: int, reason: str) -> None:
        log.info("%s: %s of %s instead of %d: %s", model, counted(num_replicas, "replica"), service.workload, before, reason)
        await self._audit.record(ACTOR, "scale", {"model": model, "replicas": num_replicas, "reason": reason}, no_operator)

    def _held(self, model: str) -> tuple[KubernetesService, _Workload]:
        """Raises NotScaling where another pod holds the Lease, or KubernetesFailed."""
        service = self._service(model)
        for left in [*self._workloads.keys() - self._reconciler.services]:
            self._workloads.pop(left).holding.cancel()
        workload = self._workloads.get(service) or self._made(service)
        if not workload.lease.is_held:
            raise NotScaling(workload.lease.failure or "another gateway pod scales it")
        return service, workload

    def _service(self, model: str) -> KubernetesService:
        [service] = [spec.kubernetes for spec in self._reconciler.config.models if spec.name == model]
        assert service is not None, "another actuator has models without pods"
        return service

    def _made(self, service: KubernetesService) -> _Workload:
        namespace, name = service.namespace or self._api.own_namespace(), service.workload.partition("/")[2]
        lease = LeaderLease(self._api, namespace, f"{name}-autoscaler", self._identity)
        holding = asyncio.create_task(lease.run(), name=f"Lease of {name}")
        made = self._workloads[service] = _Workload(lease, holding, WorkloadScaler(self._api, namespace, service.workload))
        return made

    async def close(self) -> None:
        await end_tasks(workload.holding for workload in self._workloads.values())
