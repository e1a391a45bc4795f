"""Tests spenders that race for one budget through two gateways that die: the spenders of `bench/storms/spenders.py`, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from virtual_time import VirtualTimeLoop

from bench.storms.spenders import SpendingCounts, SpendingPlan, principal, spend
from headrace.core.clock import Clock
from headrace.gateway.limits.limiter import Limiter
from headrace.gateway.limits.rules import rules_of
from headrace.gateway.limits.sqlite import SqliteLimits
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.book import LEASE_S

pytestmark = pytest.mark.loop

PLAN = SpendingPlan(spenders=16, operations=1500, kills=6)


class Connection:
    """One gateway's way to the shared store. From its death on no call arrives, and no answer comes back.

    A call takes up to 4 ms each way, so that a gateway may die before a call, within it, and after it.
    """

    def __init__(self, shared: SqliteLimits, chance: random.Random) -> None:
        self.is_in_order = False
        self.progress = shared.progress
        self.is_dead = False
        self._shared, self._chance = shared, chance

    def __getattr__(self, name: str) -> Any:
        async def call(*given: Any) -> Any:
            await self._way()
            found = await getattr(self._shared, name)(*given)
            await self._way()
            return found

        return call

    async def close(self) -> None:
        return

    async def _way(self) -> None:
        self._check()
        await asyncio.sleep(self._chance.random() * 0.004)
        self._check()

    def _check(self) -> None:
        if self.is_dead:
            raise StoreFailed("this gateway is dead")


class Gateway:
    """Spends until it is ended or killed. truth: what its requests used, as an engine would have made it"""

    def __init__(self, shared: SqliteLimits, truth: Counter[bytes], chance: random.Random, clock: Clock) -> None:
        self._connection, self._truth, self._clock = Connection(shared, chance), truth, clock
        self._stop = asyncio.Event()
        self._running = asyncio.create_task(self._run())

    async def end(self) -> None:
        self._stop.set()
        await self._running

    async def kill(self) -> None:
        self._connection.is_dead = True
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running

    def write(self, line: bytes) -> int:
        """As of a file."""
        if not self._connection.is_dead:
            if line.strip().isdigit():
                self._truth[b"used"] += int(line)
            else:
                self._truth[line.strip()] += 1
        return len(line)

    async def _run(self) -> None:
        caller = principal(PLAN.budget)
        async with Limiter.running(self._connection, clock=self._clock) as limiter:
            spenders = (spend(limiter, self, caller, self._stop) for _ in range(PLAN.spenders // PLAN.gateways))  # type: ignore[arg-type]
            await asyncio.gather(*spenders)


@pytest.mark.parametrize("seed", range(2))
async def test_no_more_is_spent_than_the_budget_however_gateways_die(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    chance = random.Random(seed)
    for name in ("random", "randint"):
        monkeypatch.setattr(f"bench.storms.spenders.random.{name}", getattr(chance, name))
    shared, truth = SqliteLimits(IN_MEMORY, clock=loop.time, unix_time=loop.unix_time), Counter[bytes]()

    def start() -> Gateway:
        return Gateway(shared, truth, chance, loop.time)

    async def until(num_operations: int) -> None:
        while truth[b"ended"] + truth[b"refused"] < num_operations:
            await asyncio.sleep(0.002 * chance.random())

    gateways = [start() for _ in range(PLAN.gateways)]
    for number in range(1, PLAN.kills + 1):
        await until(number * PLAN.operations // (PLAN.kills + 1))
        await gateways[number % PLAN.gateways].kill()
        gateways[number % PLAN.gateways] = start()
    await until(PLAN.operations)
    for gateway in gateways:
        await gateway.end()
    charged, still_open = await _book(shared, loop.time)
    await shared.close()
    spent = truth[b"used"]
    counts = SpendingCounts(operations=truth[b"ended"] + truth[b"refused"], admitted=truth[b"ended"], spent=spent, kills=PLAN.kills)
    counts.overspent, counts.not_charged = max(0, spent - PLAN.budget), max(0, spent - charged)
    counts.overcharged, counts.still_open = max(0, charged - spent), still_open
    counts.check(PLAN)
    assert counts.spent > 0.9 * PLAN.budget, "the budget was in reach"
    assert counts.operations > counts.admitted, "and was exhausted"


async def _book(shared: SqliteLimits, clock: Clock) -> tuple[int, int]:
    """Tokens that are charged, and requests that are open, once a survivor has charged what the dead left."""
    rules = rules_of(principal(PLAN.budget))
    async with Limiter.running(Connection(shared, random.Random(0)), clock=clock):
        await asyncio.sleep(LEASE_S + 3.0)
        result = await shared.take(None, [rule.claim(None) for rule in rules])
    used = {rule.name: reading.current for rule, reading in zip(rules, result.readings, strict=True)}
    return used["monthly_tokens"], used["max_concurrent_requests"]
