"""Delivers unread updates to their streams in order of arrival, in short slices of the event loop.

One frame may bring updates for a thousand streams. Woken all at once, the tasks that read them would hold the event loop for a tenth of a
second. So a slice delivers for about SLICE_S, and then everything else on the loop (heartbeats, new requests, sockets) runs. Rows that
arrive while their stream waits in the queue are delivered together with its earlier rows: under load several tokens leave together, and
without load nothing waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.core.clock import Clock
from headrace.wire.stream import ReplicaStream

SLICE_S = 0.0015
"""A slice ends after this time on the event loop, so that heartbeats, new requests and sockets wait no longer for their turn."""

SLICE_UNITS = 128
"""A slice ends after this many units, whatever the clock says: writing to the sockets comes after it, and costs more than the slice."""

WAKE_UNITS = 8
"""A stream whose plain row handler takes everything counts one unit. One whose task is woken counts this many, and as many again for every
WAKE_UPDATES unread updates: the task runs after the slice, and 64 sequences with log-probabilities take it a millisecond."""

WAKE_UPDATES = 4

CLOCK_UNITS = 16
"""The clock is read once in this many units."""


class DeliveryQueue:
    """Not thread-safe, like all of the wire's gateway side."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: deque[ReplicaStream] = deque()
        self._has_any = asyncio.Event()

    def add(self, stream: ReplicaStream) -> None:
        """Queue a stream. The `request_delivery` of each `ReplicaStream`."""
        self._streams.append(stream)
        self._has_any.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._has_any.wait()
            self._deliver_slice()
            if self._streams:
                await asyncio.sleep(0)
            else:
                self._has_any.clear()

    def deliver_all(self) -> None:
        """Deliver everything at once: the connection is lost, and updates that arrived before the loss must still reach their streams."""
        while self._streams:
            self._streams.popleft().deliver()

    def _deliver_slice(self) -> None:
        streams, ends_s, units, next_look = self._streams, self._clock() + SLICE_S, 0, CLOCK_UNITS
        while streams and units < SLICE_UNITS:
            stream = streams.popleft()
            num_unread = stream.num_unread
            units += 1 if stream.deliver() else WAKE_UNITS * (1 + num_unread // WAKE_UPDATES)
            if units >= next_look:
                if self._clock() > ends_s:
                    return
                next_look = units + CLOCK_UNITS
