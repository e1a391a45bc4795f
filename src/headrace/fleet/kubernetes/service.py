"""Options of a model whose engines are the pods behind a Service, in a cluster in which the gateways run too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.option import option, required

API_HOST, API_PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
"""Variables that every pod has."""

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
WORKLOADS = {"deployments": "apps", "statefulsets": "apps", "leaderworkersets": "leaderworkerset.x-k8s.io"}
"""Kind of what has pods -> its API group."""
ANY_WORKLOAD = "deployments/NAME, statefulsets/NAME or leaderworkersets/NAME"
WORKLOAD = re.compile(rf"({'|'.join(WORKLOADS)})/[a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesService:
    service: str = required("Service of the engines' pods; a headless one will do.")
    namespace: str = option("", "Its namespace.", shown="that of the gateway's pod")
    port_name: str = option("engine", "Name of its port at which they listen.")
    workload: str = option(
        "",
        "What has these pods, for `headrace scale`: `deployments/NAME`, `statefulsets/NAME`; or `leaderworkersets/NAME`, where each group "
        "of pods is one engine.",
        shown="only others change their number",
    )

    def check(self, where: str) -> None:
        """Raises ConfigError. The names become parts of paths."""
        for key, name in (("service", self.service), ("namespace", self.namespace), ("port_name", self.port_name)):
            if LABEL.fullmatch(name) is None and (name or key != "namespace"):
                raise ConfigError(f"{where}.{key}", f"{name!r} is not a name in Kubernetes", "Small letters, digits and -, at most 63.")
        if self.workload and WORKLOAD.fullmatch(self.workload) is None:
            raise ConfigError(f"{where}.workload", f"{self.workload!r} is no workload", f"Write {ANY_WORKLOAD}.")


def check_in_pod(services: Iterable[KubernetesService | None]) -> None:
    """Raises ConfigError where there are services, and this process is in no pod."""
    if any(services) and not (os.environ.get(API_HOST) and os.environ.get(API_PORT)):
        reason = f"{API_HOST} and {API_PORT} are not set: this is no pod, and engines are found in its cluster alone"
        raise ConfigError("remote.kubernetes", reason, "Outside of a cluster name the engines in remote.replicas.")
