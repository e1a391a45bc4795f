"""Tests the pool against workers that do exactly what a test says, in the order it says: killed too late, not startable, started again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from gateway_kit import eventually

from headrace.core.errors import CheckpointError, InvalidRequest, Unavailable
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.frames import HOST_LOST, Owner
from headrace.gateway.text_workers.limits import HEAVY_BYTES
from headrace.gateway.text_workers.pool import RETRY_S, Done, TextPool

pytestmark = pytest.mark.loop

HEAVY = b"x" * HEAVY_BYTES


class ScriptedWorker:
    """Remembers what it is told; the test speaks for it."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.num_jobs = 0
        self.is_killed = False

    def send(self, data: bytes) -> None:
        self.num_jobs += 1

    def kill(self) -> None:
        self.is_killed = True

    def answer(self) -> None:
        self._owner.answered(self, frames.Json(), memoryview(b""))

    def end(self, number: int) -> None:
        self._owner.ended(self, number)


class ScriptedWorkers:
    def __init__(self) -> None:
        self.made: list[ScriptedWorker] = []
        self.reason = ""
        self.failures: dict[str, CheckpointError] = {}
        self.can_add = True
        self.num_refused = 0
        self.is_closed = False

    async def start(self) -> None:
        return

    async def add(self, owner: Owner) -> ScriptedWorker:
        if not self.can_add:
            self.num_refused += 1
            raise OSError(11, "no process to be had")
        self.made.append(ScriptedWorker(owner))
        return self.made[-1]

    async def close(self) -> None:
        self.is_closed = True


@asynccontextmanager
async def one_worker() -> AsyncIterator[tuple[TextPool, ScriptedWorkers]]:
    workers = ScriptedWorkers()
    async with TextPool(workers, max_workers=1, max_queue=9) as pool:
        await eventually(lambda: len(pool._idle) == 1)
        yield pool, workers
        pool.check()


def submit(pool: TextPool, tail: bytes = b"") -> asyncio.Future[Done]:
    return pool.parse_body("/v1/chat/completions", tail, tenant="t")


async def test_a_worker_that_is_being_killed_gets_no_other_job() -> None:
    """Its answer was in the socket already when its client left: the next tenant's job met the signal, and got a 400 that named memory."""
    async with one_worker() as (pool, workers):
        left = submit(pool, HEAVY)
        left.cancel()
        await asyncio.sleep(0)
        doomed = workers.made[0]
        assert doomed.is_killed
        innocent = submit(pool)
        doomed.answer()
        pool.check()
        assert doomed.num_jobs == 1
        assert not innocent.done()
        doomed.end(signal.SIGKILL)
        await eventually(lambda: len(workers.made) == 2 and workers.made[1].num_jobs == 1)
        workers.made[1].answer()
        assert await innocent
        assert pool.num_killed == {"left": 1}


async def test_a_job_that_is_late_but_answered_keeps_its_answer() -> None:
    async with one_worker() as (pool, workers):
        late = submit(pool)
        wall_s = pool._running[workers.made[0]].limits.wall_s
        await asyncio.sleep(wall_s - 0.01)
        assert not workers.made[0].is_killed
        await asyncio.sleep(0.02)
        assert workers.made[0].is_killed
        workers.made[0].answer()
        assert await late
        pool.check()
        workers.made[0].end(signal.SIGKILL)
        await eventually(lambda: len(pool._idle) == 1)
        assert pool.num_killed == {"time": 1}


@pytest.mark.parametrize("number", [signal.SIGKILL, 0, HOST_LOST])
async def test_an_end_that_no_bound_explains_can_be_tried_again(number: int) -> None:
    """The kernel out of memory, an operator: nothing about the request says that it would fail again."""
    async with one_worker() as (pool, workers):
        job = submit(pool)
        workers.made[0].end(number)
        with pytest.raises(Unavailable):
            await job
        assert pool.num_killed == {"lost": 1}
        await eventually(lambda: len(pool._idle) == 1)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGPROF, "cpu"), (signal.SIGABRT, "memory"), (signal.SIGSEGV, "memory")])
async def test_an_end_at_a_bound_names_it(number: int, reason: str) -> None:
    async with one_worker() as (pool, workers):
        job = submit(pool)
        workers.made[0].end(number)
        with pytest.raises(InvalidRequest):
            await job
        assert pool.num_killed == {reason: 1}
        await eventually(lambda: len(pool._idle) == 1)


async def test_why_there_is_no_worker_is_logged_once_until_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    """Every worker of the pool had a line twice a second."""
    async with one_worker() as (pool, workers):
        for _ in range(2):
            caplog.clear()
            workers.can_add, workers.num_refused = False, 0
            workers.made[-1].end(HOST_LOST)
            await asyncio.sleep(5.5 * RETRY_S)
            assert workers.num_refused == 5
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "no process to be had" in caplog.text
            workers.can_add = True
            await asyncio.sleep(RETRY_S)
            assert len(pool._idle) == 1


async def test_without_any_worker_jobs_are_refused_until_there_is_one() -> None:
    """They waited for ever."""
    async with one_worker() as (pool, workers):
        workers.can_add = False
        running, waiting = submit(pool), submit(pool)
        assert not pool.reason
        workers.made[0].end(HOST_LOST)
        began = asyncio.get_running_loop().time()
        for job in (running, waiting):
            with pytest.raises(Unavailable):
                await job
        assert asyncio.get_running_loop().time() == began, "at once"
        assert pool.reason
        pool.check()
        with pytest.raises(Unavailable):
            submit(pool)
        workers.can_add = True
        await asyncio.sleep(RETRY_S + 0.01)
        assert not pool.reason
        job = submit(pool)
        workers.made[1].answer()
        assert await job


# -- another source of workers -----------------------------------------------------------------------------------------------------


async def test_a_running_job_ends_at_its_worker_and_later_ones_go_to_new_workers() -> None:
    async with one_worker() as (pool, former):
        running, waiting = submit(pool), submit(pool)
        present = ScriptedWorkers()
        pool.replace(present, max_workers=2)
        pool.check()
        await eventually(lambda: [worker.num_jobs for worker in present.made] == [1, 0])
        assert not former.is_closed
        former.made[0].answer()
        assert await running
        assert former.made[0].is_killed
        assert former.made[0].num_jobs == 1
        present.made[0].answer()
        assert await waiting
        former.made[0].end(signal.SIGKILL)
        await eventually(lambda: former.is_closed)
        pool.check()
        assert pool.num_killed == {}
        assert not present.is_closed


async def test_idle_workers_of_a_former_source_are_ended_and_it_is_closed_after_them() -> None:
    async with one_worker() as (pool, former):
        present = ScriptedWorkers()
        pool.replace(present, max_workers=1)
        assert former.made[0].is_killed
        await eventually(lambda: len(present.made) == 1)
        assert not former.is_closed
        former.made[0].end(signal.SIGKILL)
        await eventually(lambda: former.is_closed)
        assert len(present.made) == 1


async def test_a_worker_that_a_former_source_still_makes_is_ended() -> None:
    """The source was replaced while a worker was being forked there."""
    made = asyncio.Event()

    class Slow(ScriptedWorkers):
        async def add(self, owner: Owner) -> ScriptedWorker:
            await made.wait()
            return await super().add(owner)

    former, present = Slow(), ScriptedWorkers()
    async with TextPool(former, max_workers=1, max_queue=9) as pool:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pool.replace(present, max_workers=1)
        job = submit(pool)
        made.set()
        await eventually(lambda: len(present.made) == 1 and present.made[0].num_jobs == 1)
        assert former.made[0].is_killed
        assert former.made[0].num_jobs == 0
        present.made[0].answer()
        assert await job
        former.made[0].end(signal.SIGKILL)
        await eventually(lambda: former.is_closed)
        pool.check()


async def test_fewer_workers_than_were_starting_are_started() -> None:
    former, present = ScriptedWorkers(), ScriptedWorkers()
    former.can_add = False
    async with TextPool(former, max_workers=3, max_queue=9) as pool:
        await eventually(lambda: former.num_refused == 3)
        pool.replace(present, max_workers=1)
        await eventually(lambda: pool._num_starting == 0)
        assert len(present.made) == 1
        pool.check()


async def test_a_job_that_kills_its_former_worker_is_refused_and_starts_no_worker() -> None:
    async with one_worker() as (pool, former):
        job = submit(pool)
        present = ScriptedWorkers()
        pool.replace(present, max_workers=1)
        former.made[0].end(signal.SIGPROF)
        with pytest.raises(InvalidRequest):
            await job
        await eventually(lambda: former.is_closed)
        assert len(present.made) == 1
        pool.check()
