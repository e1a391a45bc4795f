"""Bounds how much of one round of the event loop beginning requests take.

Without turns a thousand requests that arrive at once are refused in one round of a second, in which running streams stall.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from headrace.core.clock import Clock
from headrace.core.errors import Overloaded

BEGINS_PER_ROUND = 8
"""Each takes about a millisecond."""

MAX_WAIT_S = 1.0
"""When the first in the line has waited longer, further requests of the tenants that fill the line are refused as they come."""

STORM_WAIT_S = 0.1
STORM_S = 5.0
"""For STORM_S after that, the line is held to STORM_WAIT_S."""


class BeginTurns:
    """Lets a few requests begin in each round of the event loop, in the order of arrival. Used on one event loop."""

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
