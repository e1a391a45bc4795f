"""Applies the limits at one gateway.

The gateway names a reservation until the store has taken its charge.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import NamedTuple, TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import counted
from headrace.core.ids import RequestId
from headrace.core.money import NANOS
from headrace.core.tasks import end_tasks
from headrace.gateway.access.principal import Principal
from headrace.gateway.http.config import FAIL_OPEN, Limits
from headrace.gateway.limits.reservation import NOTHING, LimitReservation
from headrace.gateway.limits.rules import LimitState, deployment_rules, limits_now
from headrace.gateway.limits.store import LimitStore
from headrace.gateway.stores.guard import StoreGuard
from headrace.gateway.stores.store import StoreFailed
from headrace.observe.reading_metrics import BudgetReading
from headrace.policy.limits.book import Charges, Claim, Holder, PeerWatch, TakeResult
from headrace.policy.limits.counters import Amounts
from headrace.policy.limits.tier import NO_BUDGET, DeploymentBudget

log = logging.getLogger("headrace.gateway")

T = TypeVar("T")

MAX_CHARGES = 500
BEAT_S = 1.0
"""The use of a dead gateway's requests is known to the second."""

BUDGET_READ_S = 1.0

CARRY_S = 0.05

CLOSE_S = 1.0
"""Charges that are left are made by another gateway, or the next one of this machine."""

MAX_GIVEN_UP = 10_000
"""Most waiting charges for which the gateway names requests that used nothing: while the store fails, each refused request leaves
one.
"""


class _Ended(NamedTuple):
    number: int
    used: Amounts


_ByTenant = dict[str, dict[RequestId, _Ended]]


class CarriedCharges:
    def __init__(self, gateway: str, by_tenant: _ByTenant) -> None:
        self.by_tenant = by_tenant
        self.charges = Charges(gateway, {request_id: one.used for ended in by_tenant.values() for request_id, one in ended.items()})
        self.first_number = min([one.number for ended in by_tenant.values() for one in ended.values()])
        self.is_over = asyncio.Event()
        self.failure: StoreFailed | None = None


class EndedRequests:
    """The ended requests of one gateway that are not charged yet. A charge is in at most one call at a time. After a failed or cancelled
    call it waits again, since a second charge of the same request has no effect.
    """

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._waiting: _ByTenant = {}
        self._carried: dict[str, list[CarriedCharges]] = {}
        self.num_ended = 0
        self.num_uncharged = 0
        self.has_waiting = asyncio.Event()

    def add(self, tenant: str, request_id: RequestId, used: Amounts) -> None:
        self._waiting.setdefault(tenant, {})[request_id] = _Ended(self.num_ended, used)
        self.num_ended += 1
        self.num_uncharged += 1
        self.has_waiting.set()

    def used(self) -> dict[str, Amounts]:
        amounts: dict[str, Amounts] = {}
        for ended in self._waiting.values():
            amounts |= {request_id: one.used for request_id, one in ended.items()}
        for calls in self._carried.values():
            for carried in calls:
                amounts |= carried.charges.used
        return amounts

    def num_waiting(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    async def answered(self, tenant: str) -> None:
        """Wait for the calls that carry charges of this tenant's requests that have ended by now. Raises StoreFailed."""
        until = self.num_ended
        while (carried := next((one for one in self._carried.get(tenant, ()) if one.first_number < until), None)) is not None:
            await carried.is_over.wait()
            if carried.failure is not None:
                raise StoreFailed(str(carried.failure))

    def carry(self, until_number: int, tenant: str | None = None) -> CarriedCharges | None:
        """The caller must call `charged` or `put_back` afterwards. until_number: an earlier `num_ended`"""
        by_tenant: _ByTenant = {}
        left = MAX_CHARGES
        for name in list(self._waiting) if tenant is None else [tenant]:
            waiting = self._waiting.get(name, {})
            ids = list(islice((request_id for request_id, one in waiting.items() if one.number < until_number), left))
            if ids:
                by_tenant[name] = {request_id: waiting.pop(request_id) for request_id in ids}
                left -= len(ids)
            if not waiting:
                self._waiting.pop(name, None)
        if not by_tenant:
            return None
        carried = CarriedCharges(self._gateway, by_tenant)
        for name in by_tenant:
            self._carried.setdefault(name, []).append(carried)
        if not self._waiting:
            self.has_waiting.clear()
        return carried

    def charged(self, carried: CarriedCharges) -> None:
        self._end(carried)
        self.num_uncharged -= len(carried.charges.used)

    def put_back(self, carried: CarriedCharges, failure: StoreFailed | None) -> None:
        """Charges that may have been made or not wait again. failure: None, the call was cancelled"""
        for tenant, ended in carried.by_tenant.items():
            self._waiting[tenant] = ended | self._waiting.get(tenant, {})
        carried.failure = failure
        self._end(carried)
        self.has_waiting.set()

    def _end(self, carried: CarriedCharges) -> None:
        for tenant in carried.by_tenant:
            calls = self._carried[tenant]
            calls.remove(carried)
            if not calls:
                del self._carried[tenant]
        carried.is_over.set()


class Limiter:
    """gateway: name of this process in the book, drawn at each start"""

    def __init__(self, store: LimitStore, *, clock: Clock, budget: DeploymentBudget = NO_BUDGET) -> None:
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
        limiter = cls(store, clock=clock, budget=budget)
        works = limiter._beats, limiter._charges, limiter._budget_reads
        tasks = [asyncio.create_task(work(), name=f"limits {work.__name__}") for work in works]
        try:
            yield limiter
        finally:
            await limiter._leave(tasks)

    def admit(self, request_id: RequestId, principal: Principal, limits: Limits) -> LimitReservation:
        """For `async with`, which raises RateLimitExceeded or Unavailable; the request is charged at the end."""
        is_open_on_failure = limits.on_store_failure == FAIL_OPEN
        return LimitReservation(self, request_id, principal, budget=limits.budget, is_open_on_failure=is_open_on_failure)

    def opened(self, reservation: LimitReservation) -> None:
        self._reservations[reservation.request_id] = reservation

    def closed(self, reservation: LimitReservation) -> None:
        del self._reservations[reservation.request_id]
        if reservation.is_held and (reservation.used != NOTHING or self.num_uncharged < MAX_GIVEN_UP):
            self._ended.add(reservation.principal.tenant_key, reservation.request_id, reservation.used)

    async def take(self, reservation: LimitReservation, claims: Sequence[Claim]) -> TakeResult:
        """The tenant's ended requests are charged before. Raises StoreFailed."""
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
        return self._ended.num_uncharged

    def follow_budget(self, budget: DeploymentBudget) -> None:
        self._budget = budget

    def budget_readings(self) -> list[BudgetReading]:
        """Empty without a budget, or when the store failed."""
        return [BudgetReading(each.rule.label, each.rule.number / NANOS, each.used / NANOS) for each in self._budget_states]

    def check(self) -> None:
        assert not self._reservations
        assert not self.num_uncharged

    async def _carried(self, carried: CarriedCharges, call: Awaitable[T]) -> T:
        """Raises StoreFailed."""
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
        """A task apart from the beats: a slow reading must not delay a beat."""
        while not self._is_closing.is_set():
            try:
                self._budget_states = await limits_now(self._store, deployment_rules(self._budget))
            except StoreFailed:
                self._budget_states = ()
            await self._pause(BUDGET_READ_S)

    async def _pause(self, seconds: float) -> None:
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
        """Tasks end by a flag: the redis package may swallow a cancel."""
        self._is_closing.set()
        self._ended.has_waiting.set()
        await asyncio.wait(tasks, timeout=CLOSE_S)
        await end_tasks(tasks)
        with suppress(StoreFailed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while (carried := self._ended.carry(self._ended.num_ended)) is not None:
                    await self._charge_some(carried)
                await self._renew()
                await self._store.expire(self.gateway, self._beat)
        await self._store.close()
