"""Counts open requests: all generating ones, those of each key, and those that use an object which is closed after its last user. Bounds
how much of one round of the event loop beginning requests take (`BeginTurns`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, Overloaded, Unauthorized, Unavailable, counted
from headrace.core.ids import RequestId
from headrace.gateway.access.key_store import KeyRecord
from headrace.policy.admission import TenantTurn


class UseCount:
    """num_entered: of all time"""

    __slots__ = ("_tenants", "_unused", "num_entered", "num_users")

    def __init__(self) -> None:
        self.num_users = self.num_entered = 0
        self._tenants: Counter[str] = Counter()
        self._unused: asyncio.Event | None = None

    def enter(self, tenant: str) -> None:
        self.num_users += 1
        self.num_entered += 1
        self._tenants[tenant] += 1

    def leave(self, tenant: str) -> None:
        assert self._tenants[tenant] > 0, "left without having entered"
        self.num_users -= 1
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        if self._unused is not None and not self.num_users:
            self._unused.set()

    def turn_of(self, tenant: str, *, num_new: int = 0) -> TenantTurn:
        """num_new: its requests that have not entered"""
        num_tenants = len(self._tenants) + (num_new > 0 and tenant not in self._tenants)
        return TenantTurn(self._tenants[tenant] + num_new, self.num_users + num_new, num_tenants)

    async def wait_unused(self) -> None:
        """The caller must keep later users from entering."""
        while self.num_users:
            self._unused = self._unused or asyncio.Event()
            self._unused.clear()
            await self._unused.wait()


class Draining(Unavailable):
    pass


CutOff = Callable[[HeadraceError], None]


class OpenRequests:
    """Each request is in one `UseCount`. max_requests: lowering it ends no open request"""

    def __init__(self, max_requests: int, tenant_share: Callable[[], float] = lambda: 1.0) -> None:
        self.max_requests = max_requests
        self._tenant_share = tenant_share
        self._open: dict[RequestId, CutOff] = {}
        self._uses: dict[RequestId, tuple[UseCount, str]] = {}
        self._tenants: Counter[str] = Counter()
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_draining = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def change(self, max_requests: int) -> None:
        self.max_requests = max_requests

    def by_tenant(self) -> dict[str, int]:
        return dict(self._tenants)

    def use(self, request_id: RequestId, tenant: str, count: UseCount) -> None:
        """Enter before leaving the former one, so that neither is unused in between. `leave_used` must follow."""
        count.enter(tenant)
        self.leave_used(request_id)
        self._uses[request_id] = count, tenant

    def leave_used(self, request_id: RequestId) -> None:
        if (used := self._uses.pop(request_id, None)) is not None:
            used[0].leave(used[1])

    @contextmanager
    def admit(self, request_id: RequestId, tenant: str, cut: CutOff) -> Iterator[None]:
        """Raises Draining after `drain` and Overloaded at a cap; the request is not counted then."""
        if self.is_draining:
            raise Draining("This server is shutting down and takes no new requests.", retry_after_s=5.0)
        if len(self._open) >= self.max_requests:
            raise Overloaded(f"This server already works on {counted(self.max_requests, 'request')}.", retry_after_s=1.0)
        most = max(1, int(self.max_requests * self._tenant_share()))
        if self._tenants[tenant] >= most:
            raise Overloaded(f"This server already works on {counted(most, 'request')} of this tenant.", retry_after_s=1.0)
        assert request_id not in self._open, "request ids are unique"
        self._open[request_id] = cut
        self._tenants[tenant] += 1
        self._empty.clear()
        try:
            yield
        finally:
            del self._open[request_id]
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
            if not self._open:
                self._empty.set()

    def drain(self) -> None:
        self.is_draining = True

    def cut(self, error: HeadraceError) -> None:
        """A request is counted as open until its task has left the `admit` block."""
        for end in list(self._open.values()):
            end(error)

    async def wait_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


MAX_READS = 64


class KeyRevoked(Unauthorized):
    pass


class KeyUses:
    """The open requests of each key, which end when the key is revoked. A key that is missing in the store ends no request: Redis may have
    been restarted without its data.
    """

    def __init__(self) -> None:
        self._ends: dict[str, set[CutOff]] = {}

    @contextmanager
    def use(self, key_id: str, end: CutOff) -> Iterator[None]:
        ends = self._ends.setdefault(key_id, set())
        ends.add(end)
        try:
            yield
        finally:
            ends.discard(end)
            if not ends and self._ends.get(key_id) is ends:
                del self._ends[key_id]

    async def end_revoked(self, read: Callable[[str], Awaitable[KeyRecord | None]]) -> None:
        """After StoreFailed of `read` some keys are unchecked."""
        in_use = list(self._ends)
        for first in range(0, len(in_use), MAX_READS):
            for record in await asyncio.gather(*map(read, in_use[first : first + MAX_READS])):
                if record is not None and record.revoked_at is not None:
                    for end in list(self._ends.get(record.id, ())):
                        end(KeyRevoked("This request's API key was revoked."))


BEGINS_PER_ROUND = 8
"""Each takes about a millisecond."""

MAX_WAIT_S = 1.0
"""When the first in the line has waited longer, further requests of the tenants that fill the line are refused as they come."""

STORM_WAIT_S = 0.1
STORM_S = 5.0
"""For STORM_S after that, the line is held to STORM_WAIT_S."""


class BeginTurns:
    """Lets a few requests begin in each round of the event loop, in the order of arrival. Used on one event loop. Without turns a thousand
    requests that arrive at once are refused in one round of a second, in which running streams stall.
    """

    __slots__ = ("_clock", "_is_scheduled", "_num_left", "_storm_until", "_tenants", "_waiting")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_left = BEGINS_PER_ROUND
        self._waiting: deque[tuple[asyncio.Future[None], float, str]] = deque()
        self._tenants: Counter[str] = Counter()  # of those that wait
        self._is_scheduled = False
        self._storm_until = 0.0

    async def take(self, tenant: str) -> None:
        """Raises Overloaded where the line is too slow and the tenant has its equal part of it, or more."""
        if self._num_left and not self._waiting:
            self._use()
            return
        now = self._clock()
        if self._is_slow(now) and self._tenants[tenant] * len(self._tenants) >= len(self._waiting):
            raise Overloaded("This server receives more requests than it can read; try again later.", retry_after_s=MAX_WAIT_S)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, now, tenant))
        self._tenants[tenant] += 1
        await turn

    def _is_slow(self, now: float) -> bool:
        limit_s = STORM_WAIT_S if now < self._storm_until else MAX_WAIT_S
        if not self._waiting or now - self._waiting[0][1] <= limit_s:
            return False
        self._storm_until = now + STORM_S
        return True

    def _use(self) -> None:
        self._num_left -= 1
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._is_scheduled, self._num_left = False, BEGINS_PER_ROUND
        while self._waiting and self._num_left:
            turn, _, tenant = self._waiting.popleft()
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                self._use()
