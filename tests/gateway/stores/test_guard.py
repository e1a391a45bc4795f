"""How long a request waits for all stores together, and that a store which does not answer is left alone, and a call to it given up."""

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
from gateway_kit import eventually
from lateness import machine_lateness
from redis_kit import RedisServer

from headrace.gateway.stores import guard
from headrace.gateway.stores.guard import MAX_UNANSWERED, StoreGuard, one_request
from headrace.gateway.stores.guarded import GuardedStore
from headrace.gateway.stores.redis import RedisStore
from headrace.gateway.stores.redis_client import RedisCalls
from headrace.gateway.stores.sqlite_thread import IN_MEMORY, SqliteForm, SqliteThread
from headrace.gateway.stores.store import EntryTooLarge, Store, StoreFailed, StoreLimits, StoreProgress

WAIT_S, SLACK_S = 0.4, 0.6
"""What a request may wait here, and how late a busy machine may notice the end."""

LIMITS = StoreLimits(entry=100, total=500, tenant_share=lambda: 0.4)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, patience: None) -> None:
    monkeypatch.setattr(guard, "REQUEST_WAIT_S", WAIT_S)
    monkeypatch.setattr(guard, "RETRY_S", 0.3)


@pytest.fixture
def long_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is left alone for longer than a busy machine takes to ask it again."""
    monkeypatch.setattr(guard, "RETRY_S", 60.0)


async def asked(one: StoreGuard, work: Callable[[], Awaitable[object]]) -> str:
    """ "" for an answer, or why there is none."""
    try:
        with one.waiting():
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


async def test_one_request_waits_for_all_stores_together_as_long_as_for_one() -> None:
    guards = [StoreGuard(name, StoreProgress()) for name in ("keys", "limits", "answers", "sessions", "streams")]
    began = time.monotonic()
    with one_request() as wait:
        assert await asked(guards[0], lambda: asyncio.sleep(0.05)) == ""
        assert "in time" in await asked(guards[1], never)
        for other in guards[2:]:
            assert "as long as it may" in await asked(other, at_once)
    assert WAIT_S <= wait.waited_s <= time.monotonic() - began
    assert wait.waited_s < WAIT_S + SLACK_S
    assert await asked(guards[1], at_once) == "", "the next request has its own time"


@pytest.mark.usefixtures("long_retry")
async def test_a_store_without_answers_is_left_alone_and_asked_again_later() -> None:
    one = StoreGuard("limits", StoreProgress())
    reasons = await asyncio.gather(*(asked(one, never) for _ in range(MAX_UNANSWERED)))
    assert all("in time" in reason for reason in reasons)
    with machine_lateness() as lateness:
        began = time.monotonic()
        assert "a moment ago" in await asked(one, at_once)
        assert time.monotonic() - began < 0.1 + lateness.late_s
    one._retry_at -= guard.RETRY_S  # the time has passed
    assert "in time" in await asked(one, never)
    assert "a moment ago" in await asked(one, at_once), "one more is enough"
    one._retry_at -= guard.RETRY_S
    assert await asked(one, at_once) == ""
    assert "in time" in await asked(one, never)
    assert await asked(one, at_once) == "", "the count began anew"


async def test_a_store_that_answers_with_errors_is_asked_each_time(caplog: pytest.LogCaptureFixture) -> None:
    one = StoreGuard("limits", StoreProgress())
    for _ in range(3 * MAX_UNANSWERED):
        assert await asked(one, fails) == "READONLY"
    assert await asked(one, at_once) == ""
    with pytest.raises(EntryTooLarge), one.waiting():
        raise EntryTooLarge("too large")
    assert [record.getMessage() for record in caplog.records] == ["the store of limits: READONLY (at most one such line in 10 s)"]


async def test_a_poll_that_succeeds_ends_the_time_alone() -> None:
    one = StoreGuard("keys", StoreProgress())
    await asyncio.gather(*(asked(one, never) for _ in range(MAX_UNANSWERED)))
    one.answered()
    assert await asked(one, at_once) == ""


async def test_what_no_request_waits_for_is_no_part_of_its_wait() -> None:
    ended: list[StoreFailed | None] = []

    class Slow:
        progress = StoreProgress()

        async def put(self) -> None:
            await asyncio.sleep(0.3)

        async def close(self) -> None:
            return

    store = GuardedStore(Slow(), "answers")  # type: ignore[arg-type]
    with one_request() as wait:
        store.write(lambda bare: bare.put(), 10, ended.append)  # type: ignore[call-arg]
        assert store.num_writing == 1
        await store.tried(lambda bare: bare.put(), 5.0)  # type: ignore[call-arg]
        assert wait.waited_s == 0.0
    await store.close()
    assert ended == [None]


async def test_a_call_that_is_given_up_ends_at_once_while_the_server_hangs(redis_server: RedisServer) -> None:
    """The package may take a cancellation for a timeout of its own and try again: seen to take six seconds."""
    for _ in range(6):
        store = RedisStore.open(redis_server.url, LIMITS)  # its calls connect
        redis_server.hang()
        calls = [asyncio.create_task(store.get("a")) for _ in range(12)]
        await asyncio.sleep(0.001)
        began = time.monotonic()
        for call in calls:
            call.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < 0.5
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        redis_server.go_on()
        async with asyncio.timeout(10):
            assert await store.get("a") is None
        await store.close()


async def test_requests_wait_no_longer_for_a_server_that_hangs(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = GuardedStore(RedisStore.open(redis_server.url, LIMITS), "answers")
    with monkeypatch.context() as patient:
        patient.setattr(guard, "REQUEST_WAIT_S", 10.0)  # the first connection may take a busy machine longer
        assert await store.asked(_get) is None
    redis_server.hang()
    waits = []

    async def request(number: int) -> None:
        await asyncio.sleep(number * 0.005)
        began = time.monotonic()
        with one_request():
            for _ in range(3):
                with pytest.raises(StoreFailed):
                    await store.asked(_get)
        waits.append(time.monotonic() - began)

    with machine_lateness() as lateness:
        await asyncio.gather(*(request(number) for number in range(100)))
    assert max(waits) < WAIT_S + SLACK_S + lateness.late_s
    redis_server.go_on()
    async with asyncio.timeout(5):
        while await _is_down(store):
            await asyncio.sleep(0.05)
    await store.close()


def _get(bare: Store) -> Awaitable[bytes | None]:
    return bare.get("a")


async def _is_down(store: GuardedStore) -> bool:
    try:
        await store.asked(_get)
    except StoreFailed:
        return True
    return False


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


async def test_a_write_that_fails_is_tried_again_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a claim is given back, and an answer kept, where the store was gone for a moment."""
    monkeypatch.setattr("headrace.gateway.stores.guarded.WRITE_PAUSES_S", (0.01, 0.02))
    ended: list[StoreFailed | None] = []
    bare = Failing(5)
    store = GuardedStore(bare, "answers")  # type: ignore[arg-type]
    store.write(lambda _: bare.call(), 10, ended.append)
    await eventually(lambda: ended == [None])
    bare.left = 1000
    store.write(lambda _: bare.call(), 10, ended.append, within_s=0.05)
    await eventually(lambda: len(ended) == 2)
    assert ended[1] is not None
    began = time.monotonic()
    store.write(lambda _: bare.call(), 10, ended.append)
    await store.close()
    assert time.monotonic() - began < 1.0, "at the end nothing is tried again"
    assert (len(ended), bare.done) == (3, 1)


async def test_time_by_which_the_event_loop_is_late_is_not_the_stores() -> None:
    """A burst of requests made the loop late by more than a request may wait, and answers that had come were refused."""
    one = StoreGuard("keys", StoreProgress())

    async def busy(seconds: float) -> None:
        """Work of other requests, in pieces that hold the loop."""
        for _ in range(4):
            time.sleep(seconds / 4)
            await asyncio.sleep(0)

    async def answered_late() -> None:
        for _ in range(3):  # an answer that wakes a task, which wakes another one
            await asyncio.sleep(0.01)

    with one_request() as wait:
        reasons = await asyncio.gather(asked(one, answered_late), busy(2 * WAIT_S), asked(one, answered_late))
        assert list(reasons) == ["", None, ""]
        assert wait.waited_s < WAIT_S
        with machine_lateness() as lateness:
            began = time.monotonic()
            stopped, _ = await asyncio.gather(asked(one, never), busy(WAIT_S))
            waited_s = time.monotonic() - began
    assert "in time" in stopped, "one that gives no answer is given up all the same"
    assert waited_s < 2 * WAIT_S + SLACK_S + lateness.late_s, "what `busy` takes does not count"


async def test_a_wait_with_little_time_left_ends_before_the_look_that_longer_ones_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "TICK_S", WAIT_S)
    one = StoreGuard("limits", StoreProgress())
    long = asyncio.create_task(asked(one, never))
    await asyncio.sleep(0)
    with one_request() as wait:
        wait.waited_s = WAIT_S - 0.01
        assert "in time" in await asked(one, never)
        for _ in range(3):  # the turns in which the other one would end, if that look had ended both
            await asyncio.sleep(0)
        assert not long.done(), "the look for the other one was not due yet"
    assert "in time" in await long


async def test_an_answer_that_came_in_time_counts_where_the_event_loop_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "REQUEST_WAIT_S", 0.02)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int] = loop.create_future()
    store_thread = threading.Thread(target=loop.call_soon_threadsafe, args=(answer.set_result, 7))
    with StoreGuard("limits", StoreProgress()).waiting():
        store_thread.start()
        store_thread.join()
        time.sleep(0.05)  # the work of other requests: the loop sees the answer after the end of the wait
        assert await answer == 7


# -- a process without time -----------------------------------------------------------------------------------------------------------

EMPTY = SqliteForm(version=1, statements=("CREATE TABLE numbers (number INTEGER)",), synchronous="OFF")


@pytest.mark.usefixtures("long_retry")
async def test_a_store_whose_thread_is_blocked_is_left_alone() -> None:
    thread, go_on = SqliteThread.open(IN_MEMORY, EMPTY, where="state"), threading.Event()
    one = StoreGuard("limits", thread.progress)
    try:
        blocked = asyncio.create_task(thread.call(lambda: go_on.wait(30)))
        reasons = await asyncio.gather(*(asked(one, lambda: thread.call(lambda: 1)) for _ in range(MAX_UNANSWERED)))
        assert all("in time" in reason for reason in reasons)
        assert "a moment ago" in await asked(one, at_once)
    finally:
        go_on.set()
    await blocked
    await thread.close()


async def test_a_store_that_is_slow_and_gets_on_is_not_left_alone() -> None:
    """Its late answers refused requests for a second, and the first after that was late again: a gateway beside a debugger served none."""
    thread = SqliteThread.open(IN_MEMORY, EMPTY, where="state")
    one = StoreGuard("limits", thread.progress)
    calls = [lambda: thread.call(lambda: time.sleep(WAIT_S / 4), is_read=True)] * 12
    reasons = await asyncio.gather(*(asked(one, call) for call in calls))
    assert sum("in time" in reason for reason in reasons) >= MAX_UNANSWERED
    assert await asked(one, at_once) == ""
    await thread.close()


STOPPED = """
import asyncio, sys, uvloop
from headrace.gateway.stores.guard import StoreGuard, one_request
from headrace.gateway.stores.sqlite_thread import IN_MEMORY, SqliteForm, SqliteThread
from headrace.gateway.stores.store import StoreFailed

async def main():
    form = SqliteForm(version=1, statements=("CREATE TABLE numbers (number INTEGER)",), synchronous="OFF")
    thread = SqliteThread.open(IN_MEMORY, form, where="state")
    guard, ends, waits = StoreGuard("limits", thread.progress), [], []
    async def one():
        with one_request() as wait:
            try:
                with guard.waiting():
                    await thread.call(lambda: thread.connection.execute("INSERT INTO numbers VALUES (1)").fetchall())
                ends.append("answered")
            except StoreFailed as error:
                ends.append(str(error))
            waits.append(wait.waited_s)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    tasks, end_at = [], loop.time() + float(sys.argv[1])
    while loop.time() < end_at:
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    print(len(ends), ends.count("answered"), sum("a moment ago" in end for end in ends), max(waits))

uvloop.run(main())
"""


@pytest.mark.parametrize(
    ("stop_s", "run_s", "num"), [(0.4, 0.3, 3), (0.02, 0.005, 60)], ids=["stopped for 400 ms", "stopped most of the time"]
)
async def test_a_process_that_was_stopped_leaves_no_store_alone(stop_s: float, run_s: float, num: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", STOPPED, "1.5"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        for _ in range(num):
            await asyncio.sleep(run_s)
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(stop_s)
            os.kill(process.pid, signal.SIGCONT)
        shown = await asyncio.to_thread(process.stdout.read)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    num_asked, num_answered, num_left_alone, longest_s = map(float, shown.split())
    assert num_left_alone == 0
    assert num_answered > 0.5 * num_asked > 0
    assert longest_s < 0.25, "the wait that is counted is the store's"
