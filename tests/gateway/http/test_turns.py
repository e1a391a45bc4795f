"""Tests that requests which arrive together begin over several rounds of the event loop, in order."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from headrace.core.errors import Overloaded
from headrace.gateway.access.open_requests import BEGINS_PER_ROUND, MAX_WAIT_S, STORM_S, STORM_WAIT_S, BeginTurns

pytestmark = pytest.mark.loop


class Rounds:
    """Counts the rounds of the loop."""

    def __init__(self) -> None:
        self.number = 0
        asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._count)


async def test_a_crowd_begins_a_few_in_each_round_and_in_order() -> None:
    turns, rounds, begun = BeginTurns(asyncio.get_running_loop().time), Rounds(), list[tuple[int, int]]()

    async def request(number: int) -> None:
        await turns.take("acme")
        begun.append((rounds.number, number))

    await asyncio.gather(*[request(number) for number in range(100)])
    assert [number for _, number in begun] == list(range(100))
    assert max(Counter(at for at, _ in begun).values()) <= BEGINS_PER_ROUND


async def test_a_request_that_comes_alone_waits_for_nothing() -> None:
    turns = BeginTurns(asyncio.get_running_loop().time)
    for _ in range(3):
        taking = turns.take("acme")
        with pytest.raises(StopIteration):
            taking.send(None)
        await asyncio.sleep(0)


async def test_a_cancelled_request_uses_no_turn() -> None:
    turns, begun = BeginTurns(asyncio.get_running_loop().time), list[int]()

    async def request(number: int) -> None:
        await turns.take("acme")
        begun.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(4 * BEGINS_PER_ROUND)]
    await asyncio.sleep(0)
    for task in tasks[BEGINS_PER_ROUND : 3 * BEGINS_PER_ROUND]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [*range(BEGINS_PER_ROUND), *range(3 * BEGINS_PER_ROUND, 4 * BEGINS_PER_ROUND)]


async def test_requests_behind_a_slow_line_are_refused_as_they_come() -> None:
    now = 0.0
    turns = BeginTurns(lambda: now)
    for _ in range(BEGINS_PER_ROUND):
        await turns.take("acme")  # without a pause: all in this round
    waiting = asyncio.ensure_future(turns.take("acme"))
    late = turns.take("acme")
    late.send(None)
    now = MAX_WAIT_S + 0.1
    with pytest.raises(Overloaded, match="more requests than it can read"):
        await turns.take("acme")
    other = asyncio.ensure_future(turns.take("other"))
    await other
    late.close()
    await waiting
    await turns.take("acme")


async def test_a_crowd_of_one_moment_is_let_in_and_a_storm_is_held_to_a_short_line() -> None:
    now = 0.0
    turns = BeginTurns(lambda: now)

    async def is_let_in(*, waited_s: float) -> bool:
        """Whether a request is, behind one that has waited so long."""
        nonlocal now
        for _ in range(BEGINS_PER_ROUND):
            await turns.take("acme")
        first = asyncio.ensure_future(turns.take("acme"))
        late = turns.take("acme")
        late.send(None)
        now += waited_s
        try:
            turns.take("acme").send(None)
        except Overloaded:
            return False
        finally:
            late.close()
            await first
            while turns._waiting:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        return True

    assert await is_let_in(waited_s=MAX_WAIT_S)
    assert not await is_let_in(waited_s=MAX_WAIT_S + 0.01)
    assert not await is_let_in(waited_s=STORM_WAIT_S + 0.01)
    assert await is_let_in(waited_s=STORM_WAIT_S - 0.01)
    now += STORM_S
    assert await is_let_in(waited_s=MAX_WAIT_S)
