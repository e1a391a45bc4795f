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

from headrace.gateway.stores.store import EntryTooLarge, StoreFailed

log = logging.getLogger("headrace.gateway")

REQUEST_WAIT_S = 0.24
"""Seconds that a request waits for all stores together. A quarter of a second is promised: a busy event loop notices the end late."""

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
        wait, began = _request_wait.get() or StoreWait(), _now()
        left_s = REQUEST_WAIT_S - wait.waited_s
        if began < self._retry_at or left_s <= 0:
            raise StoreFailed("it did not answer a moment ago" if left_s > 0 else "the request has waited for stores as long as it may")
        try:
            async with asyncio.timeout(left_s):
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
            wait.waited_s += _now() - began

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
