"""What one gateway shows for all workers of its port: the metrics page, and how many requests run.

The only gateway of a port shows itself. One of several asks the other workers (`gateway.site.siblings`) each time it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress

from headrace.gateway.access.principal import Principal
from headrace.gateway.config import GatewayConfig
from headrace.gateway.site.siblings import Siblings
from headrace.observe.metrics import Metrics
from headrace.observe.tenant_metrics import EVERY_TENANT, NO_TENANT, ShownTenants

METRICS = "metrics"
OPEN_REQUESTS = "open requests"


class SiteMetrics:
    """siblings: the other workers; None: there are none"""

    def __init__(self, metrics: Metrics, num_open: Callable[[], Mapping[str, int]], siblings: Siblings | None = None) -> None:
        """num_open: tenant -> its generating requests in this process"""
        self._metrics, self._num_open, self.siblings = metrics, num_open, siblings

    async def page(self, accept: str, config: GatewayConfig, reader: Principal, *, has_several: bool) -> tuple[bytes, str]:
        """See `Metrics.page`. has_several: keys may be of several tenants"""
        tenants = shown_tenants(config, reader, has_several=has_several)
        return self._metrics.page(accept, None if self.siblings is None else await self.siblings.ask(METRICS), tenants)

    async def num_open(self, config: GatewayConfig, reader: Principal, *, has_several: bool) -> int:
        """Generating requests of all workers that answer: all of them, or the reader's tenant's where it may not see the site's series."""
        workers = [self._num_open()] if self.siblings is None else _counts(await self.siblings.ask(OPEN_REQUESTS))
        shown = shown_tenants(config, reader, has_several=has_several)
        return sum(count for worker in workers for tenant, count in worker.items() if shown.has_site or shown.is_all or tenant == shown.own)


def _counts(answers: Mapping[int, bytes]) -> list[Mapping[str, int]]:
    """Tenant -> requests, of each worker that answered."""
    counts: list[Mapping[str, int]] = []
    for answer in answers.values():
        with suppress(ValueError):  # no answer, or one of a worker that is being replaced by a newer version
            counts.append(json.loads(answer))
    return counts


def answers_of(metrics: Metrics, num_open: Callable[[], Mapping[str, int]]) -> Mapping[str, Callable[[], bytes]]:
    """What a worker answers to the other ones."""
    return {METRICS: metrics.encoded, OPEN_REQUESTS: lambda: json.dumps(num_open()).encode()}


def shown_tenants(config: GatewayConfig, reader: Principal, *, has_several: bool) -> ShownTenants:
    """Which series a reader of /metrics sees. Without keys, or where all keys are of one tenant, every reader sees all. Otherwise a key
    sees its tenant's."""
    if config.open_metrics:
        return EVERY_TENANT if config.open_tenant_metrics else NO_TENANT
    if not reader.key_id or not has_several or reader.tenant in config.metrics_tenants:
        return EVERY_TENANT
    return ShownTenants(own=reader.tenant)
