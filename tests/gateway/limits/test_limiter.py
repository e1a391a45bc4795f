"""Tests that a gateway charges ended requests with the next take of the tenant, once, and before that take counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from dict_rows import DictRows
from gateway_kit import eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.ids import RequestId
from headrace.gateway.limits.limiter import MAX_CHARGES, Limiter
from headrace.gateway.limits.reservation import NOTHING
from headrace.gateway.stores.store import StoreFailed, StoreProgress
from headrace.policy.limits.book import NO_CHARGES, Charges, Claim, Holder, LimitBook, TakeResult
from headrace.policy.limits.counters import Amounts, Moment, Unit, Window

pytestmark = pytest.mark.loop

ROUND_TRIP_S = 0.02
NUM_REQUESTS = 100


class SlowStore:
    """A `LimitStore` whose every call takes a round trip. carried: the charges of each call that had some, in order"""

    is_in_order = False

    def __init__(self) -> None:
        self.carried: list[Mapping[str, Amounts]] = []
        self.progress = StoreProgress()
        self.num_takes = 0
        self.fails = False

    async def take(self, holder: Holder | None, claims: Sequence[Claim], charges: Charges = NO_CHARGES) -> TakeResult:
        self.num_takes += 1
        await self._call(charges)
        return TakeResult(True, Moment(0, 0), ())

    async def charge(self, charges: Charges) -> None:
        await self._call(charges)

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        return {}

    async def expire(self, gateway: str, beat: int) -> int:
        return 0

    async def close(self) -> None: ...

    async def _call(self, charges: Charges) -> None:
        if charges.used:
            self.carried.append(charges.used)
        await asyncio.sleep(ROUND_TRIP_S)
        if self.fails:
            raise StoreFailed("READONLY")


def reservation(name: str | int, tenant: str = "flood", *, is_held: bool = False) -> Any:
    return SimpleNamespace(is_held=is_held, request_id=RequestId(f"r{name}"), saved=NOTHING, principal=SimpleNamespace(tenant_key=tenant))


def end(limiter: Limiter, name: str | int, tenant: str = "flood") -> None:
    limiter._ended.add(tenant, RequestId(f"r{name}"), NOTHING)


async def test_a_take_has_the_charges_of_its_tenant_alone_and_each_is_in_one_call() -> None:
    store = SlowStore()
    limiter = Limiter(store, clock=asyncio.get_running_loop().time)
    for number in range(3):
        end(limiter, number)
    end(limiter, "other", "quiet")
    await asyncio.gather(*(limiter.take(reservation(f"new-{number}"), []) for number in range(NUM_REQUESTS)))
    assert store.carried == [{f"r{number}": NOTHING for number in range(3)}]
    assert (store.num_takes, limiter.num_uncharged) == (NUM_REQUESTS, 1)


async def test_requests_of_a_tenant_whose_others_end_all_the_time_wait_for_one_call() -> None:
    """Each of them found something that had ended, and charged what ended while it had waited for the one before it: 100 charges in a row,
    longer than a request may wait, so that the store seemed to give no answer and every tenant was refused."""
    store = SlowStore()
    limiter = Limiter(store, clock=asyncio.get_running_loop().time)

    loop = asyncio.get_running_loop()

    async def one(number: int) -> float:
        began = loop.time()
        await limiter.take(reservation(number), [])
        end(limiter, NUM_REQUESTS + number)  # it was refused
        return loop.time() - began

    async def ending() -> None:
        for number in range(NUM_REQUESTS):
            end(limiter, f"ended-{number}")
            await asyncio.sleep(ROUND_TRIP_S / 10)

    end(limiter, -1)
    endings = asyncio.create_task(ending())
    waits_s = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
    assert 0 < len(store.carried) <= 3
    assert max(waits_s) <= 2 * ROUND_TRIP_S + 1e-9, "the call that charges, and its own"
    await endings


async def test_requests_that_wait_for_a_charge_go_on_together() -> None:
    """A lock woke one of them in each turn of the event loop, and a turn of a busy one takes milliseconds."""
    store, num_turns = SlowStore(), 0
    limiter = Limiter(store, clock=asyncio.get_running_loop().time)
    end(limiter, "ended")
    waiting = [asyncio.create_task(limiter.take(reservation(number), [])) for number in range(NUM_REQUESTS)]
    while limiter.num_uncharged:
        await asyncio.sleep(0.001)
    while store.num_takes < NUM_REQUESTS:
        num_turns += 1
        await asyncio.sleep(0)
    assert num_turns < 10
    await asyncio.gather(*waiting)
    assert len(store.carried) == 1


async def test_a_failed_charge_fails_all_that_wait_for_it_and_the_next_one_tries_again() -> None:
    store = SlowStore()
    limiter = Limiter(store, clock=asyncio.get_running_loop().time)
    end(limiter, "ended")
    store.fails = True
    found = await asyncio.gather(*(limiter.take(reservation(number), []) for number in range(3)), return_exceptions=True)
    assert [type(each) for each in found] == [StoreFailed] * 3
    assert (store.num_takes, limiter.num_uncharged) == (1, 1)
    store.fails = False
    await limiter.take(reservation(3), [])
    assert (store.num_takes, limiter.num_uncharged) == (2, 0)
    assert store.carried == [{"rended": NOTHING}] * 2


async def test_takes_that_wait_for_a_call_whose_client_leaves_wait_for_the_one_that_has_its_charges_then() -> None:
    store = SlowStore()
    limiter = Limiter(store, clock=asyncio.get_running_loop().time)
    end(limiter, "ended")
    leaving, *waiting = [asyncio.create_task(limiter.take(reservation(number), [])) for number in range(4)]
    await asyncio.sleep(0)
    leaving.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (store.num_takes, len(store.carried)) == (2, 2), "one of them has the charge now, and the others wait for it"
    await asyncio.gather(*waiting)
    assert (store.num_takes, limiter.num_uncharged) == (4, 0)


async def test_a_take_whose_tenant_has_more_to_charge_than_one_call_may_have_sends_the_rest_before_it() -> None:
    store = SlowStore()
    limiter = Limiter(store, clock=asyncio.get_running_loop().time)
    for number in range(2 * MAX_CHARGES + 1):
        end(limiter, number)
    await limiter.take(reservation("new"), [])
    assert [len(used) for used in store.carried] == [MAX_CHARGES, MAX_CHARGES, 1]
    assert limiter.num_uncharged == 0


async def test_what_no_take_carries_is_charged_in_the_background() -> None:
    store = SlowStore()
    async with Limiter.running(store, clock=asyncio.get_running_loop().time) as limiter:
        end(limiter, 1, "one")
        end(limiter, 2, "two")
        await eventually(lambda: not limiter.num_uncharged)
    assert store.carried == [{"r1": NOTHING, "r2": NOTHING}]


# -- any order of answers, failures and callers that leave ----------------------------------------------------------------------------

TENANTS = ("acme", "other")
LIMIT = 1000


class SteppedStore:
    """A `LimitStore` over the book whose calls wait until a test steps them: each call's request, and then its answer, may be lost.

    owed          what a store that is in order has been given to charge, by calls that it has not done
    ended_before  requests of the tenant that had ended when one began its take; the book must not have them when it takes
    """

    def __init__(self, *, is_in_order: bool) -> None:
        self.is_in_order = is_in_order
        self.progress = StoreProgress()
        self.rows = DictRows()
        self.book = LimitBook(self.rows)
        self.calls: list[tuple[Holder | None, Sequence[Claim], Charges, asyncio.Future[TakeResult]]] = []
        self.owed: dict[str, Amounts] = {}
        self.ended_before: dict[str, list[RequestId]] = {}

    async def take(self, holder: Holder | None, claims: Sequence[Claim], charges: Charges = NO_CHARGES) -> TakeResult:
        answer: asyncio.Future[TakeResult] = asyncio.get_running_loop().create_future()
        if self.is_in_order:
            self.owed |= charges.used
        self.calls.append((holder, claims, charges, answer))
        return await answer

    async def charge(self, charges: Charges) -> None:
        await self.take(None, (), charges)

    async def renew(self, gateway: str, beat: int, saved: Mapping[str, Amounts]) -> dict[str, int]:
        return {}

    async def expire(self, gateway: str, beat: int) -> int:
        return 0

    async def close(self) -> None: ...

    def step(self, place: int, fate: str) -> None:
        """Do the call at this place of those that wait; one of a store that is in order does the first."""
        holder, claims, charges, answer = self.calls.pop(0 if self.is_in_order else place % len(self.calls))
        is_done = fate != "lost request"
        if is_done:
            for one in {**self.owed, **charges.used}.items():
                self.book.charge(*one)
            self.owed.clear()
        if answer.cancelled():
            return
        if not is_done:
            answer.set_exception(StoreFailed(fate))
            return
        found = self.book.take(holder, claims, Moment(0, 0))
        if holder is not None:
            left = [name for name in self.ended_before[holder.id] if name in self.rows.reservations]
            assert not left, "a request that had ended was not charged before the next one took"
        if fate == "answered":
            answer.set_result(found)
        else:
            answer.set_exception(StoreFailed(fate))


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "begin", "end", "end", "step", "step", "leave", "background"]), st.integers(0, 9)),
    max_size=60,
)
FATES = st.lists(st.sampled_from(["answered", "answered", "answered", "lost request", "lost answer"]), min_size=1, max_size=8)


class LimiterRun:
    """Requests of two tenants that take, end and leave in any order."""

    def __init__(self, *, is_in_order: bool) -> None:
        self.store = SteppedStore(is_in_order=is_in_order)
        self.limiter = Limiter(self.store, clock=lambda: 0.0)
        self.takes: list[asyncio.Task[None]] = []
        self.open: list[Any] = []
        self.ended: dict[str, list[RequestId]] = {tenant: [] for tenant in TENANTS}
        self.number = 0
        self.used = dict.fromkeys(TENANTS, 0)

    def claims(self, tenant: str, amount: int | None = 10) -> list[Claim]:
        return [Claim(f"{tenant}:tokens", Window.DAY, Unit.TOKENS, LIMIT, amount)]

    def begin(self, place: int) -> None:
        self.number += 1
        one = reservation(self.number, TENANTS[place % 2], is_held=True)
        one.used, one.is_admitted = NOTHING, False
        self.limiter.opened(one)
        self.takes.append(asyncio.create_task(self.take(one)))

    async def take(self, one: Any) -> None:
        tenant = one.principal.tenant_key
        self.store.ended_before[one.request_id] = list(self.ended[tenant])
        try:
            await self.limiter.take(one, self.claims(tenant))
            one.is_admitted = True
            self.open.append(one)
        except (StoreFailed, asyncio.CancelledError):
            self.end(one)

    def end(self, one: Any) -> None:
        tenant = one.principal.tenant_key
        if one.is_admitted:
            one.used = Amounts(requests=1, tokens=self.number % 7)
            self.used[tenant] += one.used.tokens
        self.limiter.closed(one)
        self.ended[tenant].append(one.request_id)

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)


@pytest.mark.pure
@pytest.mark.parametrize("is_in_order", [True, False])
@given(STEPS, FATES)
@settings(max_examples=150, deadline=None)
def test_each_request_is_charged_once_and_before_the_next_take(is_in_order: bool, steps: list[tuple[str, int]], fates: list[str]) -> None:
    asyncio.run(_run(is_in_order=is_in_order, steps=steps, fates=fates))


async def _run(*, is_in_order: bool, steps: list[tuple[str, int]], fates: list[str]) -> None:
    run = LimiterRun(is_in_order=is_in_order)
    background: set[asyncio.Task[None]] = set()
    for number, (kind, place) in enumerate(steps):
        if kind == "begin":
            run.begin(place)
        elif kind == "end" and run.open:
            run.end(run.open.pop(place % len(run.open)))
        elif kind == "step" and run.store.calls:
            run.store.step(place, fates[number % len(fates)])
        elif kind == "leave" and (waiting := [task for task in run.takes if not task.done()]):
            waiting[place % len(waiting)].cancel()
        elif kind == "background":
            carried = run.limiter._ended.carry(run.limiter._ended.num_ended - place)
            background.add(asyncio.create_task(run.limiter._charge_some(carried)))
        await run.settle()
    while run.store.calls:
        run.store.step(0, "answered")
        await run.settle()
    await asyncio.gather(*run.takes)
    for ended in await asyncio.gather(*background, return_exceptions=True):
        assert ended is None or isinstance(ended, StoreFailed)
    for one in run.open:
        run.end(one)
    while (carried := run.limiter._ended.carry(run.limiter._ended.num_ended)) is not None:
        task = asyncio.create_task(run.limiter._charge_some(carried))
        await run.settle()
        run.store.step(0, "answered")
        await task
    run.limiter.check()
    assert run.limiter._ended.used() == {}
    assert not run.store.rows.reservations
    for tenant in TENANTS:
        assert run.store.book.read(run.claims(tenant, None)[0], Moment(0, 0)).current == run.used[tenant]
