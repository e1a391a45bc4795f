"""Tests that a request's waits for all stores are bounded together, and that a store that does not answer is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from redis_kit import RedisRelay, RedisServer
from virtual_time import VirtualTimeLoop

from headrace.gateway.stores import guard
from headrace.gateway.stores.guard import (
    LOG_EVERY_S,
    MAX_UNANSWERED,
    REQUEST_WAIT_S,
    RETRY_S,
    TICK_S,
    WRITE_PAUSES_S,
    WRITE_S,
    GuardedStore,
    StoreGuard,
    StoreWait,
)
from headrace.gateway.stores.redis import RedisCalls, RedisStore, open_redis
from headrace.gateway.stores.sqlite_thread import IN_MEMORY, SqliteForm, SqliteThread, open_sqlite
from headrace.gateway.stores.store import EntryTooLarge, Store, StoreFailed, StoreLimits, StoreProgress

pytestmark = pytest.mark.loop

LIMITS = StoreLimits(entry=100, total=500, tenant_share=lambda: 0.4)


@pytest.fixture
async def loop() -> VirtualTimeLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualTimeLoop)
    return running


@pytest.fixture
async def one(loop: VirtualTimeLoop) -> StoreGuard:
    return StoreGuard("limits", StoreProgress(), loop.time)


async def asked(one: StoreGuard, work: Callable[[], Awaitable[object]]) -> str:
    """ "" for an answer, or why there is none."""
    try:
        async with one.waiting():
            await work()
    except StoreFailed as error:
        return str(error)
    return ""


async def never() -> None:
    await asyncio.sleep(3600)


async def at_once() -> None:
    return


async def fails() -> None:
    raise StoreFailed("READONLY")


async def test_one_request_waits_for_all_stores_together_as_long_as_for_one(loop: VirtualTimeLoop) -> None:
    guards = [StoreGuard(name, StoreProgress(), loop.time) for name in ("keys", "limits", "answers", "sessions", "streams")]
    began = loop.time()
    with StoreWait(loop.time) as wait:
        assert await asked(guards[0], lambda: asyncio.sleep(0.05)) == ""
        assert wait.waited_s == pytest.approx(0.05)
        assert "in time" in await asked(guards[1], never)
        for other in guards[2:]:
            assert "as long as it may" in await asked(other, at_once)
    assert wait.waited_s == pytest.approx(REQUEST_WAIT_S)
    assert loop.time() - began == pytest.approx(REQUEST_WAIT_S)
    assert await asked(guards[1], at_once) == "", "the next request has its own time"


def test_no_request_waits_longer_for_stores_than_the_quarter_of_a_second_that_is_promised() -> None:
    """The end of a wait is seen with a look at the clock."""
    assert REQUEST_WAIT_S < 0.25


async def test_a_store_without_answers_is_left_alone_for_a_second_and_asked_again_then(one: StoreGuard, loop: VirtualTimeLoop) -> None:
    reasons = await asyncio.gather(*(asked(one, never) for _ in range(MAX_UNANSWERED)))
    assert all("in time" in reason for reason in reasons)
    began = loop.time()
    assert "a moment ago" in await asked(one, at_once)
    assert loop.time() == began, "it is refused at once"
    await asyncio.sleep(RETRY_S - 0.001)
    assert "a moment ago" in await asked(one, at_once)
    await asyncio.sleep(0.001)
    assert "in time" in await asked(one, never)
    assert "a moment ago" in await asked(one, at_once), "one more is enough"
    await asyncio.sleep(RETRY_S)
    assert await asked(one, at_once) == ""
    assert "in time" in await asked(one, never)
    assert await asked(one, at_once) == "", "the count began anew"


async def test_a_store_that_answers_with_errors_is_asked_each_time(
    one: StoreGuard, loop: VirtualTimeLoop, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3 * MAX_UNANSWERED):
        assert await asked(one, fails) == "READONLY"
    assert await asked(one, at_once) == ""
    with pytest.raises(EntryTooLarge):
        async with one.waiting():
            raise EntryTooLarge("too large")
    line = "the store of limits: READONLY (at most one such line in 10 s)"
    assert [record.getMessage() for record in caplog.records] == [line]
    await asyncio.sleep(LOG_EVERY_S)
    await asked(one, fails)
    assert [record.getMessage() for record in caplog.records] == [line] * 2


async def test_a_poll_that_succeeds_ends_the_time_alone(one: StoreGuard) -> None:
    await asyncio.gather(*(asked(one, never) for _ in range(MAX_UNANSWERED)))
    assert "a moment ago" in await asked(one, at_once)
    one.answered()
    assert await asked(one, at_once) == ""


async def test_what_no_request_waits_for_is_no_part_of_its_wait(loop: VirtualTimeLoop) -> None:
    ended: list[StoreFailed | None] = []

    class Slow:
        progress = StoreProgress()

        async def put(self) -> None:
            await asyncio.sleep(0.3)

        async def close(self) -> None:
            return

    store = GuardedStore(Slow(), "answers", loop.time)  # type: ignore[arg-type]
    with StoreWait(loop.time) as wait:
        store.write(lambda bare: bare.put(), 10, ended.append)  # type: ignore[call-arg]
        assert store.num_writing == 1
        await store.tried(lambda bare: bare.put(), 5.0)  # type: ignore[call-arg]
        assert wait.waited_s == 0.0
    await store.close()
    assert ended == [None]


async def test_every_request_of_a_flood_waits_its_time_at_most_for_a_store_that_hangs(loop: VirtualTimeLoop) -> None:
    class Hanging:
        progress = StoreProgress()

        async def get(self, _: str) -> bytes | None:
            await never()
            return None

    store = GuardedStore(Hanging(), "answers", loop.time)  # type: ignore[arg-type]
    waits = []

    async def request(number: int) -> None:
        await asyncio.sleep(number * 0.005)
        began = loop.time()
        with StoreWait(loop.time):
            for _ in range(3):
                with pytest.raises(StoreFailed):
                    await store.asked(_get)
        waits.append(loop.time() - began)

    await asyncio.gather(*(request(number) for number in range(100)))
    assert max(waits) == pytest.approx(REQUEST_WAIT_S)
    assert waits.count(0.0) > 40, "from the third unanswered call on none waits"


@pytest.mark.socket
async def test_a_call_that_is_given_up_ends_while_the_server_hangs(redis_server: RedisServer) -> None:
    """The package may take a cancellation for a timeout of its own and try again: seen to take six seconds.

    The server answers again only after all calls have ended, and each ends as cancelled: none by a timeout of the package.
    """
    async with RedisRelay.open(redis_server) as relay:
        for _ in range(6):
            store = RedisStore(open_redis(relay.url), LIMITS)  # its calls connect
            relay.hang()
            calls = [asyncio.create_task(store.get("a")) for _ in range(12)]
            await asyncio.sleep(0.001)
            for call in calls:
                call.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert all(call.done() for call in calls), "within a few turns of the event loop"
            assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*calls, return_exceptions=True))
            relay.go_on()
            assert await store.get("a") is None
            await store.close()


def _get(bare: Store) -> Awaitable[bytes | None]:
    return bare.get("a")


@pytest.mark.parametrize("error", [RuntimeError("the handler is closed"), AttributeError("write"), EOFError(), OSError("reset")])
async def test_whatever_the_package_raises_is_a_failure_of_the_store(error: Exception) -> None:
    """uvloop's RuntimeError for a connection that has just closed ended the beats of a gateway for good."""

    async def call() -> None:
        raise error

    with pytest.raises(StoreFailed, match="redis: "):
        await RedisCalls(None).answer(call())


class Failing:
    """A store whose first calls fail."""

    def __init__(self, num_failures: int) -> None:
        self.progress = StoreProgress()
        self.left = num_failures
        self.done = 0

    async def call(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise StoreFailed("READONLY")
        self.done += 1

    async def close(self) -> None:
        return


async def test_a_write_that_fails_is_tried_again_for_its_time(loop: VirtualTimeLoop) -> None:
    """So a claim is given back, and an answer kept, where the store was gone for a moment."""
    ended: list[tuple[float, StoreFailed | None]] = []
    bare, began = Failing(5), loop.time()

    def note(failure: StoreFailed | None) -> None:
        ended.append((loop.time() - began, failure))

    store = GuardedStore(bare, "answers", loop.time)  # type: ignore[arg-type]
    store.write(lambda _: bare.call(), 10, note)
    await asyncio.sleep(WRITE_S)
    [(after_s, failure)] = ended
    assert after_s == pytest.approx(sum(WRITE_PAUSES_S) + WRITE_PAUSES_S[-1])
    assert failure is None
    bare.left = 1000
    for within_s, shown_s in ((None, WRITE_S), (0.05, 0.05)):
        began = loop.time()
        store.write(lambda _: bare.call(), 10, note, within_s=within_s)
        await asyncio.sleep(2 * WRITE_S)
        assert ended[-1][0] == pytest.approx(shown_s)
        assert ended[-1][1] is not None
    began = loop.time()
    store.write(lambda _: bare.call(), 10, note)
    await store.close()
    assert ended[-1][0] == loop.time() - began == 0.0, "at the end nothing is tried again"
    assert (len(ended), bare.done) == (4, 1)


async def busy(loop: VirtualTimeLoop, seconds: float) -> None:
    """Work of other requests, in pieces that hold the loop."""
    for _ in range(4):
        loop.be_late(seconds / 4)
        await asyncio.sleep(0)


async def test_time_by_which_the_event_loop_is_late_is_not_the_stores(one: StoreGuard, loop: VirtualTimeLoop) -> None:
    """A burst of requests made the loop late by more than a request may wait, and answers that had come were refused."""

    async def answered_late() -> None:
        for _ in range(3):  # an answer that wakes a task, which wakes another one
            await asyncio.sleep(0.01)

    with StoreWait(loop.time) as wait:
        reasons = await asyncio.gather(asked(one, answered_late), busy(loop, 2 * REQUEST_WAIT_S), asked(one, answered_late))
        assert list(reasons) == ["", None, ""]
        assert wait.waited_s < REQUEST_WAIT_S / 2
    with StoreWait(loop.time) as wait:
        began = loop.time()
        stopped, _ = await asyncio.gather(asked(one, never), busy(loop, REQUEST_WAIT_S))
    assert "in time" in stopped, "one that gives no answer is given up all the same"
    assert wait.waited_s == pytest.approx(REQUEST_WAIT_S)
    assert 2 * REQUEST_WAIT_S - 3 * TICK_S <= loop.time() - began <= 2 * REQUEST_WAIT_S, "what `busy` takes does not count"


async def test_a_wait_with_little_time_left_ends_before_the_look_that_longer_ones_need(
    one: StoreGuard, loop: VirtualTimeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "TICK_S", REQUEST_WAIT_S)
    long, began = asyncio.create_task(asked(one, never)), loop.time()
    await asyncio.sleep(0)
    with StoreWait(loop.time) as wait:
        wait.waited_s = REQUEST_WAIT_S - 0.01
        assert "in time" in await asked(one, never)
    assert loop.time() - began == pytest.approx(0.01)
    assert not long.done(), "the look for the other one was not due yet"
    assert "in time" in await long
    assert loop.time() - began == pytest.approx(REQUEST_WAIT_S)


async def test_an_answer_that_came_in_time_counts_where_the_event_loop_is_late(one: StoreGuard, loop: VirtualTimeLoop) -> None:
    answer: asyncio.Future[int] = loop.create_future()
    async with one.waiting():
        loop.call_soon(answer.set_result, 7)
        loop.be_late(2 * REQUEST_WAIT_S)  # the work of other requests: the loop sees the answer after the end of the wait
        assert await answer == 7


# -- a process without time -----------------------------------------------------------------------------------------------------------


class SerialStore:
    """A store that does one call at a time, in `call_s`, and gets on."""

    def __init__(self, call_s: float) -> None:
        self.progress = StoreProgress()
        self._call_s = call_s
        self._turn = asyncio.Lock()

    async def call(self) -> None:
        async with self._turn:
            for _ in range(3):
                await asyncio.sleep(self._call_s / 3)
            self.progress.num_answers += 1


async def test_a_store_that_is_slow_and_gets_on_is_not_left_alone(loop: VirtualTimeLoop) -> None:
    """Its late answers refused requests for a second, and the first after that was late again: a gateway beside a debugger served none."""
    store = SerialStore(REQUEST_WAIT_S / 4)
    one = StoreGuard("limits", store.progress, loop.time)
    reasons = await asyncio.gather(*(asked(one, store.call) for _ in range(12)))
    assert sum("in time" in reason for reason in reasons) >= MAX_UNANSWERED
    assert await asked(one, at_once) == ""


@pytest.mark.parametrize(("stop_s", "run_s"), [(0.4, 0.3013), (0.02, 0.0063), (2.0, 0.1013)])
async def test_a_machine_that_stands_still_leaves_no_store_alone_and_refuses_nobody(
    loop: VirtualTimeLoop, stop_s: float, run_s: float
) -> None:
    """The whole process was stopped, again and again: its store as well, whose answer takes a moment after each stop."""
    store = SerialStore(0.003)
    one = StoreGuard("limits", store.progress, loop.time)
    waits, is_over = [], asyncio.Event()

    async def request() -> str:
        with StoreWait(loop.time) as wait:
            said = await asked(one, store.call)
        waits.append(wait.waited_s)
        return said

    async def stops() -> None:
        for _ in range(60):
            await asyncio.sleep(run_s)
            loop.be_late(stop_s)
        is_over.set()

    stopping = asyncio.create_task(stops())
    requests = []
    while not is_over.is_set():
        requests.append(asyncio.create_task(request()))
        await asyncio.sleep(0.005)
    await stopping
    assert set(await asyncio.gather(*requests)) == {""}
    assert len(requests) >= 60
    assert max(waits) < REQUEST_WAIT_S / 2, "the wait that is counted is the store's"


ASKS_A_STORE = """
import asyncio, sys, time, uvloop
from headrace.gateway.stores.guard import StoreGuard, StoreWait
from headrace.gateway.stores.sqlite_thread import IN_MEMORY, SqliteForm, SqliteThread, open_sqlite
from headrace.gateway.stores.store import StoreFailed

async def main():
    form = SqliteForm(version=1, statements=("CREATE TABLE numbers (number INTEGER)",), synchronous="OFF")
    thread = SqliteThread(open_sqlite(IN_MEMORY, form))
    guard = StoreGuard("limits", thread.progress)

    is_over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, is_over.set)

    def insert():
        time.sleep(0.001)
        thread.connection.execute("INSERT INTO numbers VALUES (1)")

    async def client():
        while not is_over.is_set():
            with StoreWait():
                try:
                    async with guard.waiting():
                        await thread.call(insert)
                    print("answered", flush=True)
                except StoreFailed as error:
                    print(error, flush=True)
                    await asyncio.sleep(0.001)

    await asyncio.gather(*(client() for _ in range(20)))
    await thread.close()

uvloop.run(main())
"""


@pytest.mark.process
def test_a_process_that_is_stopped_again_and_again_never_leaves_its_store_alone() -> None:
    """A real event loop and a real thread, which calls wait for at each stop. A stop is longer than they may wait, or comes soon again."""
    process = subprocess.Popen([sys.executable, "-c", ASKS_A_STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    ends = [process.stdout.readline()]
    try:
        for stop_s in (2 * REQUEST_WAIT_S, 0.02, 0.02, 0.02, 0.02) * 4:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            time.sleep(stop_s)
            os.kill(process.pid, signal.SIGCONT)
            ends += [process.stdout.readline() for _ in range(3)]
        process.stdin.close()
        ends += process.stdout.readlines()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert "answered\n" in ends
    assert [end for end in ends if "a moment ago" in end] == []


EMPTY = SqliteForm(version=1, statements=("CREATE TABLE numbers (number INTEGER)",), synchronous="OFF")


@pytest.mark.socket
async def test_a_store_whose_thread_is_blocked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "REQUEST_WAIT_S", 0.05)
    monkeypatch.setattr(guard, "RETRY_S", 600.0)
    thread, go_on = SqliteThread(open_sqlite(IN_MEMORY, EMPTY)), threading.Event()
    one = StoreGuard("limits", thread.progress)
    try:
        blocked = asyncio.create_task(thread.call(lambda: go_on.wait(600)))
        reasons = await asyncio.gather(*(asked(one, lambda: thread.call(lambda: 1)) for _ in range(MAX_UNANSWERED)))
        assert all("in time" in reason for reason in reasons)
        assert "a moment ago" in await asked(one, at_once)
        assert thread.progress.num_answers == 0
    finally:
        go_on.set()
    assert await blocked
    assert await thread.call(lambda: 2) == 2
    assert thread.progress.num_answers >= 2, "what the guard takes for a sign of life"
    await thread.close()
