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
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.book import Claim, Holder, TakeResult
from headrace.policy.limits.counters import Amounts, Moment

ROUND_TRIP_S = 0.02
NUM_REQUESTS = 100


class SlowStore:
    """A `LimitStore` whose every call takes a round trip."""

    def __init__(self) -> None:
        self.num_charges = 0
        self.num_takes = 0
        self.fails = False

    async def take(self, holder: Holder | None, claims: Sequence[Claim]) -> TakeResult:
        self.num_takes += 1
        await asyncio.sleep(ROUND_TRIP_S)
        return TakeResult(True, Moment(0, 0), ())

    async def charge(self, gateway: str, used: Mapping[str, Amounts]) -> None:
        self.num_charges += 1
        await asyncio.sleep(ROUND_TRIP_S)
        if self.fails:
            raise StoreFailed("READONLY")

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        return {}

    async def expire(self, gateway: str, beat: int) -> int:
        return 0

    async def close(self) -> None: ...


def admission(number: int) -> Any:
    return SimpleNamespace(is_held=False, request_id=RequestId(f"r{number}"), saved=NOTHING, principal=SimpleNamespace(tenant_key="flood"))


async def test_requests_of_a_tenant_whose_others_end_all_the_time_share_a_charge() -> None:
    """Each of them found something that had ended, and charged what ended while it had waited for the one before it: 100 charges in a row,
    longer than a request may wait, so that the store seemed to give no answer and every tenant was refused."""
    store = SlowStore()
    limiter = Limiter(store, clock=time.monotonic)

    def end(number: int) -> None:
        limiter._uncharged[RequestId(f"ended-{number}")] = _Ended("flood", NOTHING)

    async def one(number: int) -> None:
        await limiter.take(admission(number), [])
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


async def test_requests_that_wait_for_a_charge_go_on_together() -> None:
    """A lock woke one of them in each turn of the event loop, and a turn of a busy one takes milliseconds."""
    store, num_turns = SlowStore(), 0
    limiter = Limiter(store, clock=time.monotonic)
    limiter._uncharged[RequestId("ended")] = _Ended("flood", NOTHING)
    waiting = [asyncio.create_task(limiter.take(admission(number), [])) for number in range(NUM_REQUESTS)]
    while limiter._uncharged or limiter._charging is None:
        await asyncio.sleep(0.001)
    while store.num_takes < NUM_REQUESTS:
        num_turns += 1
        await asyncio.sleep(0)
    assert num_turns < 10
    await asyncio.gather(*waiting)
    assert store.num_charges == 1


async def test_a_failed_charge_fails_all_that_wait_for_it_and_the_next_one_tries_again() -> None:
    store = SlowStore()
    limiter = Limiter(store, clock=time.monotonic)
    limiter._uncharged[RequestId("ended")] = _Ended("flood", NOTHING)
    store.fails = True
    found = await asyncio.gather(*(limiter.take(admission(number), []) for number in range(3)), return_exceptions=True)
    assert [type(each) for each in found] == [StoreFailed] * 3
    assert (store.num_charges, store.num_takes, len(limiter._uncharged)) == (1, 0, 1)
    store.fails = False
    await limiter.take(admission(3), [])
    assert (store.num_charges, store.num_takes, len(limiter._uncharged)) == (2, 1, 0)
