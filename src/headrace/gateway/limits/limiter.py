"""One gateway's part in the limits: it admits requests, shows each second that it lives, charges what has ended, and what dead ones left.

Requests wait for `take` alone. A charge that the store does not take is kept and tried again with the next beat: the reservation is named
until it is charged.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import NamedTuple

from headrace.core.clock import Clock
from headrace.core.counted import counted
from headrace.core.ids import RequestId
from headrace.gateway.config import FAIL_OPEN
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.limits.admission import NOTHING, Admission
from headrace.gateway.limits.store import LimitStore
from headrace.gateway.stores.guard import StoreGuard
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.book import Claim, Holder, TakeResult
from headrace.policy.limits.counters import Amounts
from headrace.policy.limits.peers import PeerWatch

log = logging.getLogger("headrace.gateway")

BEAT_S = 1.0
"""Seconds between two beats. What a dead gateway's requests used is known to the second."""

CLOSE_S = 1.0
"""Seconds for the last charges at the end. What is left then is charged by another gateway, or by the next one of this machine."""

MAX_CHARGES = 500
"""Charges in one call of the store."""

MAX_GIVEN_UP = 10_000
"""Charges that may wait before a request that used nothing is no longer named: while the store fails, each refused request leaves one. The
book finds by itself what is not named."""


class _Ended(NamedTuple):
    """A request that is over and not charged yet."""

    tenant: str
    used: Amounts


class Limiter:
    """gateway: name of this process in the book, another one at each start"""

    def __init__(self, store: LimitStore, *, clock: Clock) -> None:
        self.gateway = secrets.token_hex(8)
        self._store = store
        self._clock = clock
        self._watch = PeerWatch(self.gateway)
        self._beat = 0
        self._admissions: dict[RequestId, Admission] = {}
        self._uncharged: dict[RequestId, _Ended] = {}
        self._has_uncharged = asyncio.Event()
        self._charging: asyncio.Task[None] | None = None
        self._is_closing = asyncio.Event()
        self._guard = StoreGuard("limits")

    @classmethod
    @asynccontextmanager
    async def running(cls, store: LimitStore, *, clock: Clock) -> AsyncIterator[Limiter]:
        """A limiter that beats until the block ends, and the store closed then."""
        limiter = cls(store, clock=clock)
        tasks = [asyncio.create_task(work(), name=f"limits {work.__name__}") for work in (limiter._beats, limiter._charges)]
        try:
            yield limiter
        finally:
            await limiter._leave(tasks)

    @asynccontextmanager
    async def admit(self, exchange: Exchange, *, on_failure: str) -> AsyncIterator[None]:
        """Hold a generating request to its limits until the block ends; then it is charged. on_failure: `limits.on_store_failure`

        Raises RateLimitExceeded, or Unavailable where the store fails.
        """
        admission = self._admissions[exchange.request_id] = Admission(self, exchange, is_open_on_failure=on_failure == FAIL_OPEN)
        try:
            await admission.begin()
            yield
        finally:
            self._close(admission)

    def admission(self, request_id: RequestId) -> Admission:
        """What an open request has taken of its limits."""
        return self._admissions[request_id]

    async def take(self, admission: Admission, claims: Sequence[Claim]) -> TakeResult:
        """Raises StoreFailed. A client's request that has ended is charged before its next one takes anything."""
        holder = None
        if admission.is_held:
            holder = Holder(id=admission.request_id, gateway=self.gateway, beat=self._beat, saved=admission.saved)
        async with self._guard.waiting():
            await self._charge_ended(admission.principal.tenant_key)
            return await self._store.take(holder, claims)

    def check(self) -> None:
        """Nothing is open or uncharged: for a gateway without requests."""
        assert not self._admissions
        assert not self._uncharged

    def _close(self, admission: Admission) -> None:
        del self._admissions[admission.request_id]
        if admission.is_held and (admission.used != NOTHING or len(self._uncharged) < MAX_GIVEN_UP):
            self._uncharged[admission.request_id] = _Ended(admission.principal.tenant_key, admission.used)
            self._has_uncharged.set()

    async def _charge_ended(self, tenant: str) -> None:
        """Charge what this tenant had that ended before this call. Raises StoreFailed.

        What ends while the call waits is not its own, so a tenant with many refusals does not have its requests charge one after the other.
        """
        ended = [request_id for request_id, one in self._uncharged.items() if one.tenant == tenant]
        while ended:
            await self._charge()
            ended = [request_id for request_id in ended if request_id in self._uncharged]

    async def _charge(self) -> None:
        """Write the charges of what has ended, up to MAX_CHARGES. Raises StoreFailed; they are kept then.

        All callers that wait share the charge that is under way, and the event loop wakes them together: a lock would be handed on once in
        each turn of the loop, which for hundreds of callers took longer than they may wait.
        """
        if self._charging is None or self._charging.done():
            self._charging = asyncio.create_task(self._charge_batch(), name="limits charged")
            self._charging.add_done_callback(_look_at_failure)
        await asyncio.shield(self._charging)

    async def _charge_batch(self) -> None:
        batch = dict(islice(self._uncharged.items(), MAX_CHARGES))
        if not batch:
            return
        await self._store.charge(self.gateway, {request_id: ended.used for request_id, ended in batch.items()})
        for request_id in batch:
            del self._uncharged[request_id]
        if not self._uncharged:
            self._has_uncharged.clear()

    async def _charges(self) -> None:
        while not self._is_closing.is_set():
            await self._has_uncharged.wait()
            try:
                await self._charge()
            except StoreFailed as error:
                self._guard.warn(error)
                await self._pause()

    async def _beats(self) -> None:
        while not self._is_closing.is_set():
            try:
                await self._renew()
                self._guard.answered()
            except StoreFailed as error:
                self._guard.warn(error)
            await self._pause()

    async def _pause(self) -> None:
        """Until the next beat, or the end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._is_closing.wait()

    async def _renew(self) -> None:
        self._beat += 1
        held = [admission for admission in self._admissions.values() if admission.is_held]
        saved: dict[str, Amounts] = {admission.request_id: admission.save() for admission in held}
        saved |= {request_id: ended.used for request_id, ended in self._uncharged.items()}
        beats = await self._store.renew(self.gateway, self._beat, saved)
        for gateway, beat in self._watch.dead(beats, self._clock()):
            if num_charged := await self._store.expire(gateway, beat):
                log.warning("charged %s of a gateway that died", counted(num_charged, "request"))

    async def _leave(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Charge the rest, and be no gateway any more. tasks: see the flag besides being cancelled, which the package redis may swallow"""
        self._is_closing.set()
        self._has_uncharged.set()
        _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(StoreFailed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._uncharged:
                    await self._charge()
                await self._renew()
                await self._store.expire(self.gateway, self._beat)
        if self._charging is not None:
            self._charging.cancel()
        await self._store.close()


def _look_at_failure(charge: asyncio.Task[None]) -> None:
    """asyncio would log it where no caller waits any more."""
    if not charge.cancelled():
        charge.exception()
