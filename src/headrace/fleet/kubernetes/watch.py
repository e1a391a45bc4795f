"""Follows the EndpointSlices of one Service: a list, and then watches from where it ended.

While the API server is lost nothing changes. After any failure all are listed again: the server may not know the changes since (410).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing

from headrace.core.backoff import Backoff
from headrace.core.errors import counted
from headrace.fleet.kubernetes.api import ApiResource, KubernetesApi, KubernetesFailed, KubernetesObject
from headrace.fleet.kubernetes.endpoints import MAX_ENGINES, EngineEndpoint, engines_of, has_port
from headrace.fleet.kubernetes.service import KubernetesService

log = logging.getLogger(__name__)

ENDPOINT_SLICES = ApiResource("discovery.k8s.io", "endpointslices")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
CALM_S = 10.0
"""A watch that has lasted so long may end without a failure."""


class EndpointWatch:
    """engines: the last known; failure: why they are not followed now, empty while they are"""

    def __init__(self, api: KubernetesApi, service: KubernetesService, on_change: Callable[[], object]) -> None:
        self._api = api
        self._service = service
        self._on_change = on_change
        self._slices: dict[str, KubernetesObject] = {}
        self._version = ""
        self.namespace = service.namespace
        self.engines: tuple[EngineEndpoint, ...] = ()
        self.failure = ""

    async def run(self) -> None:
        clock, backoff = asyncio.get_running_loop().time, Backoff(FIRST_PAUSE_S, LAST_PAUSE_S, CALM_S)
        while True:
            began, reason = clock(), ""
            try:
                await self._follow()
                reason = "" if clock() - began >= CALM_S else "the API server ends each watch at once"
            except KubernetesFailed as error:
                reason = str(error)
            except Exception as error:  # the outermost loop: an answer that is no answer of Kubernetes' must not end what serves
                reason = f"the API server's answer cannot be read: {type(error).__name__}"
                if reason != self.failure:
                    log.exception("following %s failed", self._name)
            pause_s = backoff.pause_s(clock() - began)
            if reason:
                self._version = ""
                self._say(reason)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _follow(self) -> None:
        """Until the watch ends. Raises KubernetesFailed."""
        self.namespace = self.namespace or self._api.own_namespace()
        label = f"kubernetes.io/service-name={self._service.service}"
        if not self._version:
            found = await self._api.call("list", ENDPOINT_SLICES, self.namespace, labelSelector=label)
            self._slices = {each["metadata"]["name"]: each for each in found.get("items") or ()}
            self._version = found["metadata"]["resourceVersion"]
            self._changed()
        async with aclosing(self._api.watch(ENDPOINT_SLICES, self.namespace, labelSelector=label, resourceVersion=self._version)) as events:
            async for event in events:
                self._take(event["type"], event["object"])

    def _take(self, kind: str, changed: KubernetesObject) -> None:
        self._version = changed["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self._slices.pop(changed["metadata"]["name"], None)
        else:
            self._slices[changed["metadata"]["name"]] = changed
        self._changed()

    def _changed(self) -> None:
        slices = self._slices.values()
        if not slices:  # a Service has one even while it has no pod
            self._say("there is no EndpointSlice of it: it is missing, or has no selector")
            return
        if not has_port(slices, self._service.port_name):
            self._say(f"it has no port called {self._service.port_name}")
            return
        engines = engines_of(slices, self._service.port_name, self.engines)
        beyond = f"it has {len(engines)} pods, and only the first {MAX_ENGINES} of them by name are used"
        self._say(beyond if len(engines) > MAX_ENGINES else "")
        if engines[:MAX_ENGINES] != self.engines:
            self.engines = engines[:MAX_ENGINES]
            log.info("%s has %s", self._name, counted(len(self.engines), "engine"))
            self._on_change()

    def _say(self, reason: str) -> None:
        """Once for each reason. Empty: all is well."""
        if reason == self.failure:
            return
        self.failure = reason
        if reason:
            log.error("%s: %s. It stays at %s", self._name, reason.rstrip("."), counted(len(self.engines), "engine"))
        else:
            log.info("%s is followed again", self._name)

    @property
    def _name(self) -> str:
        return f"Service {self._service.service} in {self.namespace or 'this namespace'}"
