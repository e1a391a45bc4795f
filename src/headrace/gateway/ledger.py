"""One entry per generating request, opened at admission and closed exactly once: whatever it counts returns to its earlier value.

The ledger is where "how many are in the gateway now" lives: it refuses beyond the cap (429), refuses while draining (503), and tells the
server when the last running request has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from headrace.core.errors import HeadraceError, Overloaded, Unavailable
from headrace.core.ids import RequestId


class Entry:
    """An admitted request. Leave it by scope: `with ledger.admit(request_id) as entry:`."""

    __slots__ = ("_ledger", "cut", "request_id")

    def __init__(self, ledger: Ledger, request_id: RequestId, cut: Callable[[HeadraceError], None]) -> None:
        self._ledger = ledger
        self.request_id = request_id
        self.cut = cut

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ledger._close(self)


class Ledger:
    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._open: dict[RequestId, Entry] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_draining = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, request_id: RequestId, cut: Callable[[HeadraceError], None]) -> Entry:
        """
        cut  ends the request with an error before its time

        Raises Unavailable while draining and Overloaded at the cap; nothing was counted then.
        """
        if self.is_draining:
            raise Unavailable("This server is shutting down and takes no new requests.", retry_after_s=5.0)
        if len(self._open) >= self._max_requests:
            raise Overloaded(f"This server already works on {self._max_requests} requests.", retry_after_s=1.0)
        assert request_id not in self._open, "request ids are unique"
        entry = self._open[request_id] = Entry(self, request_id, cut)
        self._empty.clear()
        return entry

    def drain(self) -> None:
        """From now on nothing is admitted; what runs goes on."""
        self.is_draining = True

    def cut(self, error: HeadraceError) -> None:
        """End everything that is open with `error`. They leave as soon as they had their turn to say so."""
        for entry in list(self._open.values()):
            entry.cut(error)

    async def wait_empty(self, timeout_s: float) -> bool:
        """True as soon as nothing is open, False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _close(self, entry: Entry) -> None:
        assert entry.request_id in self._open, "closed twice"
        del self._open[entry.request_id]
        if not self._open:
            self._empty.set()
