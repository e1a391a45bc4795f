"""Limits of one gateway: it reserves for new requests, raises its beat each second, and charges requests that ended.

The gateway also charges what the requests of dead gateways used. A request waits for `take` alone. `take` carries charges of the same
tenant's earlier requests (`limits.ended`); all other charges are made in the background. A charge that the store does not take is tried
again, and the gateway names its reservation until then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from headrace.core.clock import Clock
from headrace.core.counted import counted
from headrace.core.ids import RequestId
from headrace.core.money import NANOS
from headrace.gateway.http.config import FAIL_OPEN, Limits
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.limits.ended import MAX_CHARGES, CarriedCharges, EndedRequests
from headrace.gateway.limits.reservation import NOTHING, LimitReservation
from headrace.gateway.limits.rules import LimitState, deployment_rules, limits_now
from headrace.gateway.limits.store import LimitStore
from headrace.gateway.stores.guard import StoreGuard
from headrace.gateway.stores.store import StoreFailed
from headrace.observe.budget_metrics import BudgetReading
from headrace.policy.limits.book import Claim, Holder, TakeResult
from headrace.policy.limits.counters import Amounts
from headrace.policy.limits.peers import PeerWatch
from headrace.policy.limits.tier import NO_BUDGET, DeploymentBudget

log = logging.getLogger("headrace.gateway")

T = TypeVar("T")

BEAT_S = 1.0
"""Seconds between two beats. The use of a dead gateway's requests is known to the second."""

BUDGET_READ_S = 1.0
"""Seconds between two readings of the deployment's budget for the metrics page."""

CARRY_S = 0.05
"""Seconds that a charge waits for a `take` that carries it. A gateway that dies meanwhile leaves the request charged by what was saved."""

CLOSE_S = 1.0
"""Seconds for the last charges at shutdown. Another gateway makes the charges that are left, or the next one of this machine."""

MAX_GIVEN_UP = 10_000
"""Charges that may wait. Beyond them the gateway no longer names requests that used nothing: while the store fails, each refused request
leaves one. The book finds such reservations by itself (`UNNAMED_BEATS`)."""


class Limiter:
    """gateway: name of this process in the book, another one at each start"""

    def __init__(self, store: LimitStore, *, clock: Clock, budget: DeploymentBudget = NO_BUDGET) -> None:
        """budget: of the deployment, for `budget_readings` alone"""
        self.gateway = secrets.token_hex(8)
        self._budget = budget
        self._budget_states: Sequence[LimitState] = ()
        self._store = store
        self._clock = clock
        self._watch = PeerWatch(self.gateway)
        self._beat = 0
        self._reservations: dict[RequestId, LimitReservation] = {}
        self._ended = EndedRequests(self.gateway)
        self._is_closing = asyncio.Event()
        self._guard = StoreGuard("limits", store.progress, clock)

    @classmethod
    @asynccontextmanager
    async def running(cls, store: LimitStore, *, clock: Clock, budget: DeploymentBudget = NO_BUDGET) -> AsyncIterator[Limiter]:
        """A limiter that beats until the block ends, and the store closed then."""
        limiter = cls(store, clock=clock, budget=budget)
        works = limiter._beats, limiter._charges, limiter._budget_reads
        tasks = [asyncio.create_task(work(), name=f"limits {work.__name__}") for work in works]
        try:
            yield limiter
        finally:
            await limiter._leave(tasks)

    def admit(self, exchange: Exchange, limits: Limits) -> LimitReservation:
        """Hold a generating request to its limits while inside the `async with` block; then it is charged.

        Entering it raises RateLimitExceeded, or Unavailable where the store fails.
        """
        return LimitReservation(self, exchange, budget=limits.budget, is_open_on_failure=limits.on_store_failure == FAIL_OPEN)

    def opened(self, reservation: LimitReservation) -> None:
        """A request has begun."""
        self._reservations[reservation.request_id] = reservation

    def closed(self, reservation: LimitReservation) -> None:
        """It has ended: charge it."""
        del self._reservations[reservation.request_id]
        if reservation.is_held and (reservation.used != NOTHING or self.num_uncharged < MAX_GIVEN_UP):
            self._ended.add(reservation.principal.tenant_key, reservation.request_id, reservation.used)

    def reservation(self, request_id: RequestId) -> LimitReservation:
        """What an open request has taken of its limits."""
        return self._reservations[request_id]

    async def take(self, reservation: LimitReservation, claims: Sequence[Claim]) -> TakeResult:
        """Raises StoreFailed. A client's request that has ended is charged before its next one takes anything."""
        holder = None
        if reservation.is_held:
            holder = Holder(id=reservation.request_id, gateway=self.gateway, beat=self._beat, saved=reservation.saved)
        tenant = reservation.principal.tenant_key
        async with self._guard.waiting():
            if not self._store.is_in_order:
                await self._ended.answered(tenant)
            for _ in range((self._ended.num_waiting(tenant) - 1) // MAX_CHARGES):
                await self._charge_some(self._ended.carry(self._ended.num_ended, tenant))
            if (carried := self._ended.carry(self._ended.num_ended, tenant)) is None:
                return await self._store.take(holder, claims)
            return await self._carried(carried, self._store.take(holder, claims, carried.charges))

    @property
    def num_uncharged(self) -> int:
        """Requests that have ended and whose charges the store has not taken, as far as this gateway knows."""
        return self._ended.num_uncharged

    def follow_budget(self, budget: DeploymentBudget) -> None:
        """Read another budget from the next time on: the configuration has changed."""
        self._budget = budget

    def budget_readings(self) -> list[BudgetReading]:
        """What was used of the deployment's budget a moment ago; none without one, and none where the store failed."""
        return [BudgetReading(rule.label, rule.number / NANOS, used / NANOS) for rule, used, _ in self._budget_states]

    def check(self) -> None:
        """Nothing is open or uncharged: for a gateway without requests."""
        assert not self._reservations
        assert not self.num_uncharged

    async def _carried(self, carried: CarriedCharges, call: Awaitable[T]) -> T:
        """What a call gives that has these charges. Raises StoreFailed; the charges are kept then, and where the caller is cancelled."""
        try:
            answer = await call
        except BaseException as error:
            self._ended.put_back(carried, error if isinstance(error, StoreFailed) else None)
            raise
        self._ended.charged(carried)
        return answer

    async def _charge_some(self, carried: CarriedCharges | None) -> None:
        """Raises StoreFailed."""
        if carried is not None:
            await self._carried(carried, self._store.charge(carried.charges))

    async def _charges(self) -> None:
        """Charge what no `take` has carried within CARRY_S."""
        while not self._is_closing.is_set():
            await self._ended.has_waiting.wait()
            until_number = self._ended.num_ended
            await self._pause(CARRY_S)
            try:
                await self._charge_some(self._ended.carry(until_number))
            except StoreFailed as error:
                self._guard.warn(error)
                await self._pause(BEAT_S)

    async def _beats(self) -> None:
        while not self._is_closing.is_set():
            try:
                await self._renew()
                self._guard.answered()
            except StoreFailed as error:
                self._guard.warn(error)
            await self._pause(BEAT_S)

    async def _budget_reads(self) -> None:
        """Not with the beats: a store that is slow twice would let this gateway seem dead."""
        while not self._is_closing.is_set():
            try:
                self._budget_states = await limits_now(self._store, deployment_rules(self._budget))
            except StoreFailed:
                self._budget_states = ()
            await self._pause(BUDGET_READ_S)

    async def _pause(self, seconds: float) -> None:
        """So long, or until the end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_closing.wait()

    async def _renew(self) -> None:
        self._beat += 1
        held = [reservation for reservation in self._reservations.values() if reservation.is_held]
        saved: dict[str, Amounts] = {reservation.request_id: reservation.save() for reservation in held}
        saved |= self._ended.used()
        beats = await self._store.renew(self.gateway, self._beat, saved)
        for gateway, beat in self._watch.dead(beats, self._clock()):
            if num_charged := await self._store.expire(gateway, beat):
                log.warning("charged %s of a gateway that died", counted(num_charged, "request"))

    async def _leave(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Charge the rest, and be no gateway any more. tasks: see the flag besides being cancelled, which the package redis may swallow"""
        self._is_closing.set()
        self._ended.has_waiting.set()
        _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(StoreFailed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while (carried := self._ended.carry(self._ended.num_ended)) is not None:
                    await self._charge_some(carried)
                await self._renew()
                await self._store.expire(self.gateway, self._beat)
        await self._store.close()
