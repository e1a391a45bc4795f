"""What waits for a charge in one gateway's part of the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from headrace.core.ids import RequestId
from headrace.gateway.limits.admission import NOTHING
from headrace.gateway.limits.limiter import Limiter, _Ended
from headrace.policy.limits.book import Claim, Holder, TakeResult
from headrace.policy.limits.counters import Amounts, Moment

ROUND_TRIP_S = 0.02
NUM_REQUESTS = 100


class SlowStore:
    """A `LimitStore` whose every call takes a round trip."""

    def __init__(self) -> None:
        self.num_charges = 0

    async def take(self, holder: Holder | None, claims: Sequence[Claim]) -> TakeResult:
        await asyncio.sleep(ROUND_TRIP_S)
        return TakeResult(True, Moment(0, 0), ())

    async def charge(self, gateway: str, used: Mapping[str, Amounts]) -> None:
        self.num_charges += 1
        await asyncio.sleep(ROUND_TRIP_S)

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        return {}

    async def expire(self, gateway: str, beat: int) -> int:
        return 0

    async def close(self) -> None: ...


async def test_requests_of_a_tenant_whose_others_end_all_the_time_share_a_charge() -> None:
    """Each of them found something that had ended, and charged what ended while it had waited for the one before it: 100 charges in a row,
    longer than a request may wait, so that the store seemed to give no answer and every tenant was refused."""
    store = SlowStore()
    limiter = Limiter(store, clock=time.monotonic)

    def end(number: int) -> None:
        limiter._uncharged[RequestId(f"ended-{number}")] = _Ended("flood", NOTHING)

    async def one(number: int) -> None:
        admission: Any = SimpleNamespace(
            is_held=False, request_id=RequestId(f"r{number}"), saved=NOTHING, principal=SimpleNamespace(tenant_key="flood")
        )
        await limiter.take(admission, [])
        end(NUM_REQUESTS + number)  # it was refused

    async def ending() -> None:
        for number in range(NUM_REQUESTS):
            end(number)
            await asyncio.sleep(ROUND_TRIP_S / 10)

    end(-1)
    endings = asyncio.create_task(ending())
    await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
    assert 0 < store.num_charges <= 3
    await endings
