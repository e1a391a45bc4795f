"""Tests work that is given up when the answer ends early, in the task of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from asgi_connection import exchange_of

from headrace.core.errors import Unavailable
from headrace.gateway.http.errors import ClientLeft
from headrace.gateway.http.exchange import Exchange

pytestmark = pytest.mark.loop


class Work:
    """Sleeps; says how far it came."""

    def __init__(self, exchange: Exchange | None = None) -> None:
        self.steps: list[str] = []
        self.task: asyncio.Task[Any] | None = None
        self._exchange = exchange

    async def run(self) -> str:
        self.steps.append("begun")
        self.task = asyncio.current_task()
        if self._exchange is not None:
            self._exchange.end(ClientLeft("The client left."))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.steps.append("cancelled")
            await asyncio.sleep(0)
            self.steps.append("cleaned up")
            raise
        return "done"


def exchange() -> Exchange:
    async def never() -> Any:
        raise AssertionError

    async def ignored(message: Any) -> None:
        raise AssertionError

    return exchange_of(never, ignored)


def is_uncancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() == 0


async def begun(work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def test_work_runs_in_the_task_of_its_request() -> None:
    async def where() -> asyncio.Task[Any] | None:
        return asyncio.current_task()

    assert await exchange().unless_ended(where()) is asyncio.current_task()


async def test_an_early_end_cancels_work_and_is_raised() -> None:
    one, work = exchange(), Work()
    asyncio.get_running_loop().call_later(0.01, one.end, ClientLeft("The client left."))
    with pytest.raises(ClientLeft):
        await one.unless_ended(work.run())
    assert work.steps == ["begun", "cancelled", "cleaned up"]
    assert is_uncancelled()
    await asyncio.sleep(0)


async def test_work_that_ends_the_answer_itself_is_cancelled_where_it_waits() -> None:
    one = exchange()
    work = Work(one)
    with pytest.raises(ClientLeft):
        await one.unless_ended(work.run())
    assert work.steps == ["begun", "cancelled", "cleaned up"]
    assert is_uncancelled()


async def test_work_does_not_begin_where_the_answer_has_ended() -> None:
    one, work = exchange(), Work()
    one.end(Unavailable("shutting down"))
    with pytest.raises(Unavailable):
        await one.unless_ended(work.run())
    assert work.steps == []
    job: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with pytest.raises(Unavailable):
        await one.unless_ended(job)
    assert job.cancelled()


async def test_an_early_end_cancels_a_job_elsewhere() -> None:
    one = exchange()
    job: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(one.end, ClientLeft("The client left."))
    with pytest.raises(ClientLeft):
        await one.unless_ended(job)
    assert job.cancelled()


async def test_a_request_that_is_cancelled_stays_so_though_its_client_leaves_too() -> None:
    one, work = exchange(), Work()
    task = await begun(one.unless_ended(work.run()))
    one.end(ClientLeft("The client left."))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_time_limit_around_work_ends_it_as_usual() -> None:
    one, work = exchange(), Work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await one.unless_ended(work.run())
    assert one.end_reason is None
    assert is_uncancelled()


async def test_an_error_and_a_result_of_work_pass() -> None:
    async def fails() -> str:
        raise ValueError("a bug")

    async def works() -> str:
        await asyncio.sleep(0)
        return "done"

    with pytest.raises(ValueError, match="a bug"):
        await exchange().unless_ended(fails())
    one = exchange()
    assert await one.unless_ended(works()) == "done"
    one.end(ClientLeft("The client left."))  # cancels nothing: the work is done
    await asyncio.sleep(0)
    assert is_uncancelled()
