"""Writes usage records from a queue to segments on the disk, in a thread, and counts those that it must drop."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep

from headrace.core.clock import Clock
from headrace.core.errors import counted
from headrace.gateway.ledger.record import UsageRecord, encode_record
from headrace.gateway.ledger.spool import OpenSegment, Spool, frame

log = logging.getLogger("headrace.usage")

MAX_QUEUED = 20_000
MAX_QUEUED_BYTES = 32 << 20
"""One more record is dropped and counted."""

MAX_BATCH = 512

GATHER_S = 0.01
"""A process that is killed loses those that came in this time."""

SEGMENT_S = 0.5
SEGMENT_BYTES = 4 << 20

ADOPT_S = 1.0

LOGGED_EVERY_S = 10.0


class SpoolThread:
    """dropped       dropped records by reason: "queue", "disk", or "full:SINK" when too many bytes wait for a sink"""

    def __init__(self, spool: Spool, *, on_segment: Callable[[], None], clock: Clock = monotonic) -> None:
        """on_segment: called in the thread when a segment waits for the sinks"""
        self.num_recorded = 0
        self.dropped: Counter[str] = Counter()
        self._spool = spool
        self._on_segment = on_segment
        self._clock = clock
        self._queue: queue.SimpleQueue[UsageRecord | None] = queue.SimpleQueue()
        self._bytes_put = self._bytes_taken = 0  # each is written by one thread
        self._segment: OpenSegment | None = None
        self._close_at = 0.0
        self._adopt_at = 0.0
        self._logged_at = -LOGGED_EVERY_S
        self._serials = itertools.count()
        self._thread = threading.Thread(target=self._run, name="usage-spool", daemon=True)
        self._thread.start()

    def put(self, record: UsageRecord) -> None:
        """From one thread only."""
        size = len(record.prompt or "")
        if self._queue.qsize() >= MAX_QUEUED or self._bytes_put - self._bytes_taken + size > MAX_QUEUED_BYTES:
            self.dropped["queue"] += 1
            return
        self._bytes_put += size
        self._queue.put(record)

    def close(self, timeout_s: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = self._next_batch()
            is_open = None not in batch
            try:
                self._write([record for record in batch if record is not None])
                self._tend(is_last=not is_open)
            except Exception:  # the outermost loop: a bug must not end the ledger
                log.exception("usage: a batch of records failed")

    def _next_batch(self) -> list[UsageRecord | None]:
        due = self._adopt_at if self._segment is None else min(self._adopt_at, self._close_at)
        batch: list[UsageRecord | None] = []
        with suppress(queue.Empty):
            batch.append(self._queue.get(timeout=max(0.0, due - self._clock())))
            sleep(GATHER_S)
            while len(batch) < MAX_BATCH:
                batch.append(self._queue.get_nowait())
        self._bytes_taken += sum(len(record.prompt or "") for record in batch if record is not None)
        return batch

    def _write(self, records: Sequence[UsageRecord]) -> None:
        if not records:
            return
        frames = [frame(encode_record(record)) for record in records]
        num_written = 0
        try:
            segment = self._open_segment()
            num_written = segment.append(frames)
            if segment.error is not None:
                raise segment.error
        except OSError as error:
            self._lost(len(frames) - num_written, error)
        self.num_recorded += num_written

    def _open_segment(self) -> OpenSegment:
        """Raises OSError."""
        if self._segment is None:
            try:
                self._segment = OpenSegment(self._spool, serial=next(self._serials))
            except BlockingIOError:  # another process took it; its next search is ADOPT_S away
                self._segment = OpenSegment(self._spool, serial=next(self._serials))
            self._close_at = self._clock() + SEGMENT_S
        return self._segment

    def _tend(self, *, is_last: bool) -> None:
        now = self._clock()
        segment = self._segment
        if segment is not None and (is_last or now >= self._close_at or segment.num_bytes >= SEGMENT_BYTES or segment.error is not None):
            self._segment = None
            self._close(segment)
        if now >= self._adopt_at:
            self._adopt_at = now + ADOPT_S
            with suppress(OSError):
                self._found_no_room(self._spool.adopt())

    def _close(self, segment: OpenSegment) -> None:
        try:
            segment.sync()  # half a second's records at once, not a hundred syncs a second
        except OSError as error:
            self._lost(0, error)
        try:
            self._found_no_room(segment.close())
        except OSError as error:  # the segment stays open, and a later `adopt` closes it
            self._lost(0, error)
        self._on_segment()

    def _found_no_room(self, by_sink: Counter[str]) -> None:
        for sink, count in by_sink.items():
            self.dropped[f"full:{sink}"] += count
            self._warn(f"{sink} is behind: {counted(count, 'record')} found no room in the spool")

    def _lost(self, count: int, error: OSError) -> None:
        self.dropped["disk"] += count
        self._warn(f"the spool cannot be written ({error.strerror or error}): {counted(count, 'record')} lost")

    def _warn(self, text: str) -> None:
        if self._clock() - self._logged_at >= LOGGED_EVERY_S:
            self._logged_at = self._clock()
            log.warning("usage: %s", text)
