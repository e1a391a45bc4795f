"""Streams that have something unread get their turns, one after another, in short slices of the event loop.

One frame may bring updates for a thousand streams. Woken all at once, their tasks would hold the event loop for a tenth of a second; a
slice serves as many as take about SLICE_S, then everything else (heartbeats, new requests, sockets) gets its turn. Rows that arrive while
a stream waits for its turn join what it has: under load several tokens leave together, and without load nothing waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.core.clock import Clock
from headrace.wire.stream import ReplicaStream

SLICE_S = 0.0015
SLICE_UNITS = 128
"""Of one slice, whatever the clock says: the sockets are written to after it, which costs more than what is seen of it here."""

WAKE_UNITS = 8
"""A stream whose task is woken runs after the slice and for as long as so many that are delivered directly; again for every
WAKE_UPDATES that it has: 64 sequences with log-probabilities are work of a millisecond."""

WAKE_UPDATES = 4


class ReadyStreams:
    """Not thread-safe, like all of the wire's gateway side."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: deque[ReplicaStream] = deque()
        self._has_any = asyncio.Event()

    def add(self, stream: ReplicaStream) -> None:
        """In the order of arrival. `ReplicaStream.on_ready`."""
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
        """At once: the connection is lost, and what came before that is not."""
        while self._streams:
            self._streams.popleft().deliver()

    def _deliver_slice(self) -> None:
        streams, ends_s, units = self._streams, self._clock() + SLICE_S, 0
        while streams and units < SLICE_UNITS:
            stream = streams.popleft()
            num_unread = stream.num_unread
            units += 1 if stream.deliver() else WAKE_UNITS * (1 + num_unread // WAKE_UPDATES)
            if units % 16 == 0 and self._clock() > ends_s:
                return
