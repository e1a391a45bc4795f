"""Sums the metrics page and the count of running requests over all gateway workers of a port."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress

from headrace.gateway.site.siblings import Siblings
from headrace.observe.metrics import Metrics
from headrace.observe.tenant_metrics import ShownTenants

METRICS = "metrics"
OPEN_REQUESTS = "open requests"


class SiteMetrics:
    """Before `join`, of this worker alone."""

    def __init__(self, metrics: Metrics, num_open: Callable[[], Mapping[str, int]]) -> None:
        """num_open: tenant -> its generating requests in this process"""
        self._metrics, self._num_open = metrics, num_open
        self._siblings: Siblings | None = None

    def join(self, siblings: Siblings) -> None:
        self._siblings = siblings
        siblings.handle(METRICS, self._encoded_metrics)
        siblings.handle(OPEN_REQUESTS, self._encoded_num_open)

    async def page(self, accept: str, shown: ShownTenants) -> tuple[bytes, str]:
        return self._metrics.page(accept, None if self._siblings is None else await self._siblings.ask(METRICS), shown)

    async def num_open(self, shown: ShownTenants) -> int:
        """All workers that answer count; only one tenant's requests if `shown` excludes the site's series."""
        workers = [self._num_open()] if self._siblings is None else _counts(await self._siblings.ask(OPEN_REQUESTS))
        return sum(count for worker in workers for tenant, count in worker.items() if shown.has_site or shown.is_all or tenant == shown.own)

    async def _encoded_metrics(self, _argument: str) -> bytes:
        return self._metrics.encoded()

    async def _encoded_num_open(self, _argument: str) -> bytes:
        return json.dumps(self._num_open()).encode()


def _counts(answers: Mapping[int, bytes]) -> list[Mapping[str, int]]:
    counts: list[Mapping[str, int]] = []
    for answer in answers.values():
        with suppress(ValueError):  # no answer, or one of a worker that is being replaced by a newer version
            counts.append(json.loads(answer))
    return counts
