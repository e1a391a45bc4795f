"""Hands the pods of Services to the reconciler as replicas, for the Services that the configuration names now."""

from __future__ import annotations

import asyncio

from headrace.core.tasks import end_tasks
from headrace.fleet.kubernetes.api import KubernetesApi
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.kubernetes.watch import EndpointWatch
from headrace.fleet.reconciler import Reconciler

GATHER_S = 0.5
"""Changes within this time are one change: gateways read their file once for each."""


class Discovery:
    def __init__(self, reconciler: Reconciler, api: KubernetesApi) -> None:
        self._reconciler = reconciler
        self._api = api
        self._watches: dict[KubernetesService, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            while True:
                self._follow()
                await self._reconciler.until(lambda: self._reconciler.services != self._watches.keys())
        finally:
            await end_tasks(self._watches.values())

    def _follow(self) -> None:
        services = self._reconciler.services
        for service in [*self._watches.keys() - services]:
            self._watches.pop(service).cancel()
            self._reconciler.found.pop(service, None)
        for service in services - self._watches.keys():
            self._watches[service] = asyncio.create_task(self._watch(service), name=f"Service {service.service}")

    async def _watch(self, service: KubernetesService) -> None:
        changed = asyncio.Event()
        watch = EndpointWatch(self._api, service, changed.set)
        following = asyncio.create_task(watch.run(), name=f"EndpointSlices of {service.service}")
        try:
            while True:
                await changed.wait()
                await asyncio.sleep(GATHER_S)
                changed.clear()
                tls_name = f"{service.service}.{watch.namespace}.svc"
                engines = [{"name": each.name, "address": each.address, "tls_name": tls_name} for each in watch.engines]
                self._reconciler.find(service, engines)
        finally:
            await end_tasks([following])
