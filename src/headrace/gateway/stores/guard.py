"""Bounds the time that a request waits for all its stores together, and leaves a failing store alone for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from itertools import chain, repeat
from types import TracebackType
from typing import TypeVar
from weakref import WeakKeyDictionary

from headrace.core.clock import Clock
from headrace.gateway.stores.store import EntryTooLarge, Store, StoreFailed, StoreProgress

log = logging.getLogger("headrace.gateway")

T = TypeVar("T")
Work = Callable[[Store], Awaitable[object]]
Ended = Callable[[StoreFailed | None], None]

WRITE_S = 5.0

WRITE_PAUSES_S = (0.1, 0.2, 0.4, 0.8)

MAX_WRITING_BYTES = 32 << 20

MAX_WRITES = 64

REQUEST_WAIT_S = 0.24
"""Seconds that a request waits for all stores together, without the event loop's delay, since a burst of requests would be refused else
although the store works.
"""

TICK_S = 0.02

MAX_UNANSWERED = 3
"""Calls in a row without an answer in time (an error is an answer), after which a store is left alone. A call counts only if the store
ended no other call meanwhile: a store that did is only slow.
"""

RETRY_S = 1.0

LOG_EVERY_S = 10.0

NO_ANSWER = "it does not answer in time"


class WaitClock:
    """A clock that leaves out the delays of its event loop, measured by one timer each TICK_S while requests wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late_s = 0.0
        self._due = float("inf")
        """Infinite while no timer is set."""
        self._waits: set[_Wait] = set()

    def now(self) -> float:
        return min(self._clock(), self._due) - self._late_s

    def begin(self, wait: _Wait) -> None:
        self._waits.add(wait)
        if wait.until < self._due - self._late_s:
            self._look_later(wait.until)

    def end(self, wait: _Wait) -> None:
        self._waits.discard(wait)

    def _look_later(self, until: float) -> None:
        now = self._clock()
        seconds = min(TICK_S, max(0.0, until + self._late_s - now))
        self._due = now + seconds
        asyncio.get_running_loop().call_later(seconds, self._look, self._due)

    def _look(self, due: float) -> None:
        if due != self._due:
            return  # an earlier look took the place of this one
        self._late_s += max(0.0, self._clock() - due)
        self._due = float("inf")
        now = self.now()
        for wait in [wait for wait in self._waits if wait.until <= now]:
            self._waits.discard(wait)
            wait.expire()
        if self._waits:
            self._look_later(min([wait.until for wait in self._waits]))


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, WaitClock] = WeakKeyDictionary()


class StoreWait:
    """Calls of stores within the block, and within tasks begun there, share one request's waiting time."""

    __slots__ = ("_token", "clock", "waited_s")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        loop = asyncio.get_running_loop()
        self.clock = _clocks.get(loop) or _clocks.setdefault(loop, WaitClock(clock))
        self.waited_s = 0.0

    def __enter__(self) -> StoreWait:
        self._token = _request_wait.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _request_wait.reset(self._token)


_request_wait: ContextVar[StoreWait | None] = ContextVar("store wait of this request", default=None)


class _Wait:
    """until: time of the clock of waits"""

    __slots__ = ("_began_at", "_guard", "_num_answers", "_request", "_timeout", "until")

    def __init__(self, guard: StoreGuard) -> None:
        self._guard = guard
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        self._request = request = _request_wait.get() or StoreWait(self._guard.clock)
        left_s = REQUEST_WAIT_S - request.waited_s
        self._guard.check_asked(left_s)
        self._num_answers = self._guard.progress.num_answers
        await self._timeout.__aenter__()
        self._began_at = request.clock.now()
        self.until = self._began_at + left_s
        request.clock.begin(self)

    def expire(self) -> None:
        """End the wait in the event loop's next round, so that an answer that has already arrived is read first."""
        self._timeout.reschedule(0.0)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        request = self._request
        request.clock.end(self)
        request.waited_s += request.clock.now() - self._began_at
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            self._guard.unanswered(self._num_answers)
            raise StoreFailed(NO_ANSWER) from None
        if kind is None:
            self._guard.answered()
        elif isinstance(error, StoreFailed) and not isinstance(error, EntryTooLarge):
            self._guard.warn(error)


class StoreGuard:
    def __init__(self, name: str, progress: StoreProgress, clock: Clock = time.monotonic) -> None:
        self._name = name
        self.progress = progress
        self.clock = clock
        self._num_unanswered = 0
        self._retry_at = 0.0
        self._next_log_at = 0.0

    def waiting(self) -> _Wait:
        """Raises StoreFailed as the store does, and when the request has waited REQUEST_WAIT_S for stores."""
        return _Wait(self)

    def check_asked(self, left_s: float) -> None:
        """left_s: seconds for which the request may wait. Raises StoreFailed."""
        if left_s <= 0:
            raise StoreFailed("the request has waited for stores as long as it may")
        if self._retry_at and self.clock() < self._retry_at:
            raise StoreFailed("it did not answer a moment ago")

    def answered(self) -> None:
        self._num_unanswered, self._retry_at = 0, 0.0

    def warn(self, reason: object) -> None:
        now = self.clock()
        if now >= self._next_log_at:
            self._next_log_at = now + LOG_EVERY_S
            log.warning("the store of %s: %s (at most one such line in %g s)", self._name, reason, LOG_EVERY_S)

    def unanswered(self, num_answers: int) -> None:
        """num_answers: the store's `num_answers` when the call began"""
        if self.progress.num_answers == num_answers:
            self._num_unanswered += 1
            if self._num_unanswered >= MAX_UNANSWERED:
                self._retry_at = self.clock() + RETRY_S
        self.warn(NO_ANSWER)


class TooMuchToWrite(StoreFailed):
    pass


class GuardedStore:
    def __init__(self, store: Store, name: str, clock: Clock = time.monotonic) -> None:
        self.store = store
        self.guard = StoreGuard(name, store.progress, clock)
        self._writes: set[asyncio.Task[None]] = set()
        self._writing_bytes = 0
        self._turns = asyncio.Semaphore(MAX_WRITES)
        self._is_closing = False

    async def asked(self, work: Callable[[Store], Awaitable[T]]) -> T:
        async with self.guard.waiting():
            return await work(self.store)

    async def tried(self, work: Work, within_s: float) -> None:
        """A failure is only logged, since the caller repeats the work."""
        try:
            async with asyncio.timeout(within_s):
                await work(self.store)
        except (StoreFailed, TimeoutError) as error:
            self.guard.warn(_as_failure(error))

    def write(self, work: Work, num_bytes: int, ended: Ended, *, within_s: float | None = None) -> None:
        """ended: called once, with None after success, else with the failure"""
        if self._writing_bytes + num_bytes > MAX_WRITING_BYTES:
            ended(self._not_written(TooMuchToWrite(f"more than {MAX_WRITING_BYTES} bytes wait to be written")))
            return
        self._writing_bytes += num_bytes
        write = asyncio.create_task(self._written(work, num_bytes, ended, WRITE_S if within_s is None else within_s))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)

    @property
    def num_writing(self) -> int:
        return len(self._writes)

    async def close(self) -> None:
        """Finishes the running writes within WRITE_S, without repeating failed ones."""
        self._is_closing = True
        if self._writes:
            await asyncio.wait(self._writes, timeout=WRITE_S)
        for write in list(self._writes):
            write.cancel()
        await self.store.close()

    async def _written(self, work: Work, num_bytes: int, ended: Ended, within_s: float) -> None:
        failure: StoreFailed | None = StoreFailed("the gateway ended first")
        try:
            async with asyncio.timeout(within_s):
                for pause_s in chain(WRITE_PAUSES_S, repeat(WRITE_PAUSES_S[-1])):
                    if await self._is_written(work):
                        break
                    await asyncio.sleep(pause_s)
            failure = None
        except (StoreFailed, TimeoutError) as error:
            failure = self._not_written(_as_failure(error))
        finally:
            self._writing_bytes -= num_bytes
            ended(failure)

    async def _is_written(self, work: Work) -> bool:
        """False: it failed and may be repeated. Raises StoreFailed if it must not be repeated."""
        async with self._turns:
            try:
                await work(self.store)
            except StoreFailed as error:
                if self._is_closing or isinstance(error, EntryTooLarge):
                    raise
                self.guard.warn(f"something was not written yet: {error}")
                return False
        return True

    def _not_written(self, failure: StoreFailed) -> StoreFailed:
        self.guard.warn(f"something was not written: {failure}")
        return failure


def _as_failure(error: StoreFailed | TimeoutError) -> StoreFailed:
    return error if isinstance(error, StoreFailed) else StoreFailed(NO_ANSWER)
