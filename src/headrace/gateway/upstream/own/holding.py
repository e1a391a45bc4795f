"""Lets the requests of one model wait until a replica takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.errors import Unavailable
from headrace.core.ids import SeqId
from headrace.core.request import PriorityClass
from headrace.gateway.upstream.seam import Hold
from headrace.policy.admission import UnsentRequest
from headrace.policy.holding import FULL, FULL_RETRY_S, MAX_HELD, HeldQueue, HeldTerms, HeldTotals

HOLD_S = 600.0
"""The longest wait for a replica that starts."""


class HeldRequests:
    """A released request counts as unsent from that moment on, so that the next one sees it in the queue."""

    def __init__(self, totals: HeldTotals, clock: Clock) -> None:
        self._queue = HeldQueue(totals)
        self._clock = clock
        self._open: dict[SeqId, tuple[asyncio.Future[None], UnsentRequest | None]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def num_requests(self, lowest: PriorityClass) -> int:
        return self._queue.num_requests(lowest)

    def add(self, terms: HeldTerms, unsent: UnsentRequest | None, limit_s: float) -> Hold:
        """Raises Unavailable at a bound."""
        number, displaced = self._queue.add(terms, self._clock())
        for other in displaced:
            _refuse(self._open.pop(other)[0], Unavailable(FULL, retry_after_s=FULL_RETRY_S))
        released = asyncio.get_running_loop().create_future()
        self._open[number] = released, unsent
        if unsent is not None:
            unsent.uncount()
        return Hold(released, limit_s, lambda: self._leave(number))

    def _leave(self, number: SeqId) -> None:
        if self._open.pop(number, None) is not None:
            self._queue.remove(number)

    def release(self, has_room: Callable[[int], bool], *, at_most: int = MAX_HELD) -> int:
        """How many. has_room: of the model's unsent requests, asked before each one"""
        now, num_before = self._clock(), len(self._queue)
        while num_before - len(self._queue) < at_most and (number := self._queue.head(now)) is not None:
            released, unsent = self._open[number]
            if not has_room(0 if unsent is None else unsent.num_counted):
                break
            del self._open[number]
            self._queue.release(number, now)
            if unsent is not None:
                unsent.count()
            released.set_result(None)
        return num_before - len(self._queue)

    def refuse(self, error: Callable[[], Unavailable]) -> None:
        for number, (released, _) in self._open.items():
            self._queue.remove(number)
            _refuse(released, error())
        self._open.clear()

    def check(self) -> None:
        self._queue.check()
        assert len(self._open) == len(self._queue)


def _refuse(released: asyncio.Future[None], error: Unavailable) -> None:
    released.set_exception(error)
    released.exception()  # its client may have left in this moment, and then it is not read
