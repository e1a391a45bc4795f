"""Writes and numbers server-sent events, keeps quiet streams alive, and gives up on clients that do not read.

A stream is written by its own task. `StreamWatch` checks all streams four times per second, which is cheaper than a timer each. The bytes
that wait for a client are bounded, and so are those of all streams together (`access.memory_charges`). Log-probabilities come faster than
many clients read, so some are allowed beyond the bound (`logprob_bytes`).

Clients that continue a stream send back the number of its last event (`Last-Event-ID`).

Coalescing needs no timer: while a stream waits for the socket or a busy event loop, updates pile up and leave as one chunk. Where the
socket has room, events are written without waking the stream's task (`write_now`).
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.ids import RequestId
from headrace.gateway.http.errors import SlowReader
from headrace.gateway.http.exchange import Exchange

TICK_S = 0.25

PING_S = 10.0
"""Proxies and browsers give up silent connections after 30 s or more."""

MAX_PENDING_BYTES = 256 << 10
"""Beyond it the request is cancelled."""

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
)


class SseStream:
    """One answer's event stream, as it is written to its client. Made by `StreamWatch.open`."""

    __slots__ = (
        "_clock",
        "_exchange",
        "_is_inside",
        "_ping",
        "_unwritten_bytes",
        "_watch",
        "is_cut",
        "last_write_at",
        "logprob_bytes",
        "unread_bytes",
    )

    def __init__(self, exchange: Exchange, watch: StreamWatch, unread_bytes: Callable[[], int], logprob_bytes: int, clock: Clock) -> None:
        """unread_bytes: of events that are not encoded yet; logprob_bytes: may wait beyond MAX_PENDING_BYTES"""
        self._exchange = exchange
        self._watch = watch
        self._clock = clock
        self.unread_bytes = unread_bytes
        self.logprob_bytes = logprob_bytes
        self.last_write_at = clock()
        self._ping: asyncio.Task[None] | None = None
        self._is_inside = False
        self._unwritten_bytes = 0
        self.is_cut = False

    async def __aenter__(self) -> SseStream:
        if not self._exchange.status:  # else it was opened while the request waited
            await self._exchange.start(200, HEADERS, is_event_stream=True)
        self._watch.streams.add(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._watch.streams.discard(self)
        if self._ping is not None:
            self._ping.cancel()

    async def write(self, payload: bytes) -> None:
        """On a lost connection, raises the exchange's `end_reason` if it is set, else ClientLeft or SlowReader."""
        await self._send(payload, is_last=False)

    async def write_slices(self, slices: AsyncGenerator[bytes], *, num_bytes: int) -> None:
        """Each slice is made after the transport has taken the one before. num_bytes: counts as waiting meanwhile"""
        self._unwritten_bytes = num_bytes
        self._is_inside = True
        try:
            async with aclosing(slices):
                async for made in slices:
                    await self.write(made)
        finally:
            self._is_inside = False
            self._unwritten_bytes = 0

    async def end(self, payload: bytes) -> None:
        await self._send(payload + self._exchange.framing.end, is_last=True)

    async def _send(self, payload: bytes, *, is_last: bool) -> None:
        if self._ping is not None and not self._ping.done():
            await self._ping  # a comment that waits for the socket is written first
        self._watch.writing.add(self)
        try:
            await self._exchange.write(payload, is_last=is_last)
        finally:
            self._watch.writing.discard(self)
        self.last_write_at = self._clock()

    @property
    def has_room(self) -> bool:
        return (self._ping is None or self._ping.done()) and self._exchange.has_room

    def write_now(self, payload: bytes, now: float) -> None:
        """Call right after `has_room`. now: on the watch's clock"""
        self._exchange.write_now(payload)
        self.last_write_at = now

    def cut_if_beyond_bound(self) -> bool:
        if self.waiting_bytes <= MAX_PENDING_BYTES + self.logprob_bytes:
            return False
        self.cut(f"More than {MAX_PENDING_BYTES} bytes of the answer waited for the client.")
        return True

    def ping(self, now: float) -> None:
        if not (self._exchange.pending_bytes or self._is_inside):
            self.last_write_at = now
            self._ping = asyncio.create_task(self._send_ping())

    @property
    def waiting_bytes(self) -> int:
        if self.is_cut or not self._exchange.pending_bytes:
            return 0
        return self._exchange.pending_bytes + self._unwritten_bytes + self.unread_bytes()

    def cut(self, reason: str) -> None:
        """A stream that has already ended keeps its first `end_reason`."""
        self.is_cut = True
        self._exchange.abort(SlowReader(reason))

    async def _send_ping(self) -> None:
        with suppress(HeadraceError):  # the stream's own task hears of it
            await self._exchange.write(self._exchange.framing.ping)


class StreamWatch:
    """Checks all open event streams: pings quiet ones, ends those that are not read. writing: only these can have bytes that wait for the
    client; on_lag: gets the event loop's delay in seconds
    """

    def __init__(
        self,
        *,
        left_bytes: Callable[[], int] = lambda: 1 << 62,
        on_lag: Callable[[float], None] = lambda _: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.streams: set[SseStream] = set()
        self.writing: set[SseStream] = set()
        self.ping_s = PING_S
        self._left_bytes = left_bytes
        self.num_cut = 0
        self._on_lag = on_lag
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def open(self, exchange: Exchange, unread_bytes: Callable[[], int], *, logprob_bytes: int = 0) -> SseStream:
        return SseStream(exchange, self, unread_bytes, logprob_bytes, self._clock)

    async def __aenter__(self) -> StreamWatch:
        self._task = asyncio.create_task(self._run(), name="stream watch")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def enforce(self) -> None:
        now = self._clock()
        for stream in list(self.writing):
            self.num_cut += stream.cut_if_beyond_bound()
        self._cut_largest(list(self.writing))
        quiet_since = now - self.ping_s
        for stream in [stream for stream in self.streams if stream.last_write_at < quiet_since]:
            stream.ping(now)

    def _cut_largest(self, writing: list[SseStream]) -> None:
        """The most waiting bytes first."""
        waiting = sorted((size, number) for number, stream in enumerate(writing) if (size := stream.waiting_bytes))
        excess = sum(size for size, _ in waiting) - max(0, self._left_bytes())
        while excess > 0 and waiting:
            size, number = waiting.pop()
            writing[number].cut("The memory for answers that wait for their clients is used up.")
            self.num_cut += 1
            excess -= size

    async def _run(self) -> None:
        while True:
            due = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._on_lag(max(0.0, self._clock() - due))
            self.enforce()


LAST_EVENT = "Last-Event-ID"
LAST_EVENT_ID = LAST_EVENT.lower().encode()

NO_EVENT = "0"
"""The header's value in the first request of a stream. Without the header events have no ids, since many clients take every line of a
stream for data.
"""
_EVENT_ID = re.compile(r"([0-9a-f]{24})/([1-9][0-9]{0,8})")


class EventId(NamedTuple):
    answer_id: RequestId
    number: int


def last_event(exchange: Exchange) -> EventId | None:
    """None: the request begins a new stream. Raises InvalidRequest."""
    given = (exchange.header(LAST_EVENT_ID) or b"").decode("latin-1")
    if given in ("", NO_EVENT):
        return None
    match = _EVENT_ID.fullmatch(given)
    if match is None:
        raise InvalidRequest(LAST_EVENT, "the id of an event of this server (REQUEST/NUMBER)", given, "Send it as it was received.")
    return EventId(RequestId(match[1]), int(match[2]))


class EventLog:
    """Which sequence and output offset each event of one stream belongs to. An entry is offset * num_sequences + index, in four bytes.
    Event number N has entries[N - 1]. The usage after the last event has the next number and no entry.

    Adjacent equal entries are chunks of one `OutputEvent`. Their number depends on that `OutputEvent` alone, they are numbered together,
    and the ids between two offsets give the same `OutputEvent` again, however they arrived at first. So a stream that is made again has the
    same chunks under the same numbers, wherever its client left it, between two chunks of one offset too.
    """

    __slots__ = ("answer_id", "entries", "num_seen", "num_sequences", "prefix")

    def __init__(self, answer_id: RequestId, num_sequences: int, *, num_seen: int = 0) -> None:
        self.answer_id = answer_id
        self.num_sequences = num_sequences
        self.prefix = b"id: %b/" % answer_id.encode()
        self.entries = array("i")
        self.num_seen = num_seen

    def line(self, index: int, offset: int) -> bytes:
        self.entries.append(offset * self.num_sequences + index)
        return b"%b%d\n" % (self.prefix, len(self.entries))

    def usage_line(self) -> bytes:
        return b"%b%d\n" % (self.prefix, len(self.entries) + 1)

    @property
    def is_usage_seen(self) -> bool:
        return self.num_seen > len(self.entries)


def offsets_of(entries: Sequence[int], num_sequences: int) -> Iterator[tuple[int, int]]:
    for entry in entries:
        offset, index = divmod(entry, num_sequences)
        yield index, offset
