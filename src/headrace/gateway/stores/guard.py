"""How long a request waits for stores, and when a store that fails is left alone.

Whatever a request asks of a store stands within `StoreGuard.waiting`. Its waits for all stores together take REQUEST_WAIT_S at most.
`stores.guarded` is a `Store` with such a guard; limits and keys have one beside stores of their own kind. Work that no request waits for
(writes, renewals, polls) has other bounds and is not within.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from headrace.gateway.stores.store import EntryTooLarge, StoreFailed

log = logging.getLogger("headrace.gateway")

REQUEST_WAIT_S = 0.24
"""Seconds that a request waits for all stores together. A quarter of a second is promised: a busy event loop notices the end late.

Time by which the event loop is late does not count (`LoopDelay`): the answer may have come and not have been seen, and the requests of a
burst would be refused for a store that works.
"""

TICK_S = 0.02
"""Seconds between two looks at how late the event loop is, while requests wait for stores."""

MAX_UNANSWERED = 3
"""After this many calls in a row without an answer in time a store is left alone. One that answers with errors takes no time."""

RETRY_S = 1.0
"""Seconds for which a store is left alone: calls fail at once. The next call after that leaves it alone again if it gets no answer."""

LOG_EVERY_S = 10.0
"""Least seconds between two warnings about one store: under a storm each request would give one."""

NO_ANSWER = "it does not answer in time"


@dataclass(slots=True)
class StoreWait:
    """Seconds that one request has waited for stores so far."""

    waited_s: float = 0.0


class LoopDelay:
    """By how many seconds an event loop was late so far, measured while a request waits."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._num_asking = 0
        self._due: float | None = None
        """When the next look is due; None: there is none."""

    def begin(self) -> float:
        """Measure until `end` is called as often as this. Returns `sum_s`."""
        self._num_asking += 1
        if self._due is None:
            self._look_later()
        return self.sum_s()

    def end(self) -> None:
        self._num_asking -= 1

    def sum_s(self) -> float:
        return self._sum_s + (0.0 if self._due is None else max(0.0, _now() - self._due))

    def _look_later(self) -> None:
        self._due = _now() + TICK_S
        asyncio.get_running_loop().call_at(self._due, self._look)

    def _look(self) -> None:
        self._sum_s, self._due = self.sum_s(), None
        if self._num_asking:
            self._look_later()


_delays: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopDelay] = WeakKeyDictionary()

_request_wait: ContextVar[StoreWait | None] = ContextVar("store wait of this request", default=None)


@contextmanager
def one_request() -> Iterator[StoreWait]:
    """Calls within the block, and within tasks that it begins, are one request's. Outside of such a block each call is a request."""
    wait = StoreWait()
    token = _request_wait.set(wait)
    try:
        yield wait
    finally:
        _request_wait.reset(token)


class _Wait:
    """The wait for one answer, from now on. Within `limit` it raises TimeoutError when it has taken its time, less the loop's delay."""

    def __init__(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._delay = _delays.get(loop) or _delays.setdefault(loop, LoopDelay())
        self._began_at, self._late_s = loop.time(), self._delay.begin()
        self._timer = loop.call_later(seconds, self._look)
        self.limit = asyncio.timeout(None)

    def end(self) -> float:
        """Seconds that it took."""
        self._timer.cancel()
        self._delay.end()
        return self._taken_s()

    def _taken_s(self) -> float:
        return max(0.0, _now() - self._began_at - (self._delay.sum_s() - self._late_s))

    def _look(self) -> None:
        left_s = self._seconds - self._taken_s()
        if left_s <= 0:
            self.limit.reschedule(_now())
        else:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)


class StoreGuard:
    """name: of what is kept, for the log"""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_unanswered = 0
        self._retry_at = 0.0
        self._next_log_at = 0.0

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """A request waits for the block, which asks the store.

        Raises StoreFailed where the block does, at once while the store is left alone, and when the request has waited REQUEST_WAIT_S for
        stores.
        """
        wait = _request_wait.get() or StoreWait()
        left_s = REQUEST_WAIT_S - wait.waited_s
        if _now() < self._retry_at or left_s <= 0:
            raise StoreFailed("it did not answer a moment ago" if left_s > 0 else "the request has waited for stores as long as it may")
        running = _Wait(left_s)
        try:
            async with running.limit:
                yield
            self.answered()
        except TimeoutError:
            self._unanswered()
            raise StoreFailed(NO_ANSWER) from None
        except StoreFailed as error:
            if not isinstance(error, EntryTooLarge):
                self.warn(error)
            raise
        finally:
            wait.waited_s += running.end()

    def answered(self) -> None:
        """The store works: ask it again."""
        self._num_unanswered, self._retry_at = 0, 0.0

    def warn(self, reason: object) -> None:
        """Log that something of the store failed, if nothing was logged of late."""
        now = _now()
        if now >= self._next_log_at:
            self._next_log_at = now + LOG_EVERY_S
            log.warning("the store of %s: %s (at most one such line in %g s)", self._name, reason, LOG_EVERY_S)

    def _unanswered(self) -> None:
        self._num_unanswered += 1
        if self._num_unanswered >= MAX_UNANSWERED:
            self._retry_at = _now() + RETRY_S
        self.warn(NO_ANSWER)


def _now() -> float:
    return asyncio.get_running_loop().time()
