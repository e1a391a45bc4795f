"""Keeps ended requests that are not charged yet, and the store calls that carry their charges."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import NamedTuple

from headrace.core.ids import RequestId
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.book import Charges
from headrace.policy.limits.counters import Amounts

MAX_CHARGES = 500


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
    """A charge is in at most one call at a time. After a failed or cancelled call it waits again, since a second charge of the same
    request has no effect.
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
        found: dict[str, Amounts] = {}
        for ended in self._waiting.values():
            found |= {request_id: one.used for request_id, one in ended.items()}
        for calls in self._carried.values():
            for carried in calls:
                found |= carried.charges.used
        return found

    def num_waiting(self, tenant: str) -> int:
        """Charges that are in no call."""
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
        found: _ByTenant = {}
        left = MAX_CHARGES
        for name in list(self._waiting) if tenant is None else [tenant]:
            waiting = self._waiting.get(name, {})
            ids = list(islice((request_id for request_id, one in waiting.items() if one.number < until_number), left))
            if ids:
                found[name] = {request_id: waiting.pop(request_id) for request_id in ids}
                left -= len(ids)
            if not waiting:
                self._waiting.pop(name, None)
        if not found:
            return None
        carried = CarriedCharges(self._gateway, found)
        for name in found:
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
