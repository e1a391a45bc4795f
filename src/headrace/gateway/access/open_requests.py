"""The generating requests that are open: one entry each, made at admission and closed exactly once.

A request beyond the cap, or beyond its tenant's part of it, is refused with 429, a request during the drain with 503. `wait_empty` returns
when the last request has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from headrace.core.counted import counted
from headrace.core.errors import HeadraceError, Overloaded, Unavailable
from headrace.core.ids import RequestId
from headrace.policy.admission.ladder import TenantTurn


class Draining(Unavailable):
    """The server is shutting down: it finishes its open requests and admits none."""


class OpenRequest:
    """An admitted request, closed by `with`."""

    __slots__ = ("_open_requests", "cut", "request_id", "tenant")

    def __init__(self, open_requests: OpenRequests, request_id: RequestId, tenant: str, cut: Callable[[HeadraceError], None]) -> None:
        self._open_requests = open_requests
        self.request_id = request_id
        self.tenant = tenant
        self.cut = cut

    def __enter__(self) -> OpenRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open_requests._close(self)


class OpenRequests:
    """
    max_requests  one more is refused. A lower one ends none
    tenant_share  part of them that one tenant may have, in (0, 1], asked for at each request
    """

    def __init__(self, max_requests: int, tenant_share: Callable[[], float] = lambda: 1.0) -> None:
        self.max_requests = max_requests
        self._tenant_share = tenant_share
        self._open: dict[RequestId, OpenRequest] = {}
        self._tenants: Counter[str] = Counter()
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_draining = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def by_tenant(self) -> dict[str, int]:
        """Tenant -> its open requests."""
        return dict(self._tenants)

    def admit(self, request_id: RequestId, tenant: str, cut: Callable[[HeadraceError], None]) -> OpenRequest:
        """
        cut  ends the request with an error before its time

        Raises Draining once `drain` was called and Overloaded at the cap; nothing was counted then.
        """
        if self.is_draining:
            raise Draining("This server is shutting down and takes no new requests.", retry_after_s=5.0)
        if len(self._open) >= self.max_requests:
            raise Overloaded(f"This server already works on {counted(self.max_requests, 'request')}.", retry_after_s=1.0)
        most = max(1, int(self.max_requests * self._tenant_share()))
        if self._tenants[tenant] >= most:
            raise Overloaded(f"This server already works on {counted(most, 'request')} of this tenant.", retry_after_s=1.0)
        assert request_id not in self._open, "request ids are unique"
        entry = self._open[request_id] = OpenRequest(self, request_id, tenant, cut)
        self._tenants[tenant] += 1
        self._empty.clear()
        return entry

    def turn_of(self, tenant: str) -> TenantTurn:
        """The turn of a tenant's newest request, which is counted already."""
        return TenantTurn(self._tenants[tenant], len(self._open), len(self._tenants))

    def drain(self) -> None:
        """Admit no further request; open ones go on."""
        self.is_draining = True

    def cut(self, error: HeadraceError) -> None:
        """End every open request with `error`. Each closes its entry once its task has run."""
        for entry in list(self._open.values()):
            entry.cut(error)

    async def wait_empty(self, timeout_s: float) -> bool:
        """True as soon as no request is open, False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _close(self, entry: OpenRequest) -> None:
        assert entry.request_id in self._open, "closed twice"
        del self._open[entry.request_id]
        self._tenants[entry.tenant] -= 1
        if not self._tenants[entry.tenant]:
            del self._tenants[entry.tenant]
        if not self._open:
            self._empty.set()
