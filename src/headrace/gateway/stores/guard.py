"""Bounds the time that a request waits for stores, and leaves a failing store alone for a while.

A request calls a store within `StoreGuard.waiting`, and its waits for all stores together take at most REQUEST_WAIT_S. The stores of
entries (`stores.guarded_store`), of limits and of keys have a guard each. Writes, renewals and polls, which no request waits for, have
bounds of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import ContextVar
from types import TracebackType
from weakref import WeakKeyDictionary

from headrace.core.clock import Clock
from headrace.gateway.stores.store import EntryTooLarge, StoreFailed, StoreProgress

log = logging.getLogger("headrace.gateway")

REQUEST_WAIT_S = 0.24
"""Seconds that a request waits for all stores together. A quarter of a second is promised, since a busy event loop ends the wait late.

The event loop's delay does not count (`WaitClock`): the store may have answered, and the loop has not read the answer yet. If the delay
counted, a burst of requests would be refused although the store works.
"""

TICK_S = 0.02
"""Most seconds between two measurements of the event loop's delay, while requests wait for stores."""

MAX_UNANSWERED = 3
"""Calls in a row without an answer in time, after which a store is left alone. An error is an answer.

A call counts only if the store ended no other call meanwhile. A store that did is alive: it is slow, or this process got no CPU time.
Leaving such a store alone would refuse every tenant, and end no call sooner.
"""

RETRY_S = 1.0
"""Seconds for which a store is left alone: calls fail at once. If the next call gets no answer, the store is left alone again."""

LOG_EVERY_S = 10.0
"""Least seconds between two warnings about one store: under a storm each request would give one."""

NO_ANSWER = "it does not answer in time"


class WaitClock:
    """A clock that leaves out the delays of its event loop, and the waits that end by this clock.

    While requests wait, one timer fires each TICK_S for all waits. The clock leaves out the time by which the timer is late.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late_s = 0.0
        self._due = float("inf")
        """When the timer is due; infinite: it is not set."""
        self._waits: set[_Wait] = set()

    def now(self) -> float:
        return min(self._clock(), self._due) - self._late_s

    def begin(self, wait: _Wait) -> None:
        """End `wait` when its time has come, unless `end` is called before."""
        self._waits.add(wait)
        if wait.until < self._due - self._late_s:
            self._look_later(wait.until)

    def end(self, wait: _Wait) -> None:
        self._waits.discard(wait)

    def _look_later(self, until: float) -> None:
        """Set the timer. until: earliest end of a wait, on this clock"""
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
    """Calls of stores within the block, and within tasks begun there, share one request's waiting time. A call outside has its own.

    waited_s  seconds that the request has waited for stores so far, on `clock`
    """

    __slots__ = ("_token", "clock", "waited_s")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        """clock: the same for all requests of one event loop"""
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
    """`async with StoreGuard.waiting():`, an `asyncio.timeout` on the clock of waits. until: time of that clock at which it ends"""

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
        """name: word for the entries, for the log;  progress: the store's"""
        self._name = name
        self.progress = progress
        self.clock = clock
        self._num_unanswered = 0
        self._retry_at = 0.0
        self._next_log_at = 0.0

    def waiting(self) -> _Wait:
        """An `async with` block for a request's calls of the store.

        Raises StoreFailed as the store does, at once while the store is left alone, and when the request has waited REQUEST_WAIT_S for
        stores.
        """
        return _Wait(self)

    def check_asked(self, left_s: float) -> None:
        """Raises StoreFailed while the store is left alone, or without waiting time. left_s: seconds for which the request may wait"""
        if left_s <= 0:
            raise StoreFailed("the request has waited for stores as long as it may")
        if self._retry_at and self.clock() < self._retry_at:
            raise StoreFailed("it did not answer a moment ago")

    def answered(self) -> None:
        """Note an answer of the store, which ends a time of leaving it alone."""
        self._num_unanswered, self._retry_at = 0, 0.0

    def warn(self, reason: object) -> None:
        """Log a failure of the store, at most once per LOG_EVERY_S."""
        now = self.clock()
        if now >= self._next_log_at:
            self._next_log_at = now + LOG_EVERY_S
            log.warning("the store of %s: %s (at most one such line in %g s)", self._name, reason, LOG_EVERY_S)

    def unanswered(self, num_answers: int) -> None:
        """Note a call without an answer in time. num_answers: the store's `num_answers` when the call began"""
        if self.progress.num_answers == num_answers:
            self._num_unanswered += 1
            if self._num_unanswered >= MAX_UNANSWERED:
                self._retry_at = self.clock() + RETRY_S
        self.warn(NO_ANSWER)
