"""The thread that ships usage records from the spool to one sink. Each sink has its own, so that a failing one delays no other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headrace.core.errors import counted
from headrace.gateway.ledger.record import FIRST_RETRY_S, LAST_RETRY_S, Sink, SinkFailed
from headrace.gateway.ledger.spool import Spool, read_segment

log = logging.getLogger("headrace.usage")

POLL_S = 0.25

INTERRUPT_S = 0.5

MAX_SEGMENTS = 64
MAX_BATCH_BYTES = 8 << 20
"""A single segment may be larger."""


class Shipper:
    """num_damaged_bytes: bytes of segments that were part of no whole record, and are lost"""

    def __init__(self, spool: Spool, sink: Sink) -> None:
        self.sink = sink
        self.num_shipped = self.num_failures = self.num_damaged_bytes = 0
        self._spool = spool
        self._next_sink: Sink | None = None
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"usage-{sink.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def change_sink(self, sink: Sink) -> None:
        """The thread closes the old sink."""
        self._next_sink = sink

    def stop(self) -> None:
        """Try once more to ship what waits, and end."""
        self._stopping.set()
        self._woken.set()

    def join(self, timeout_s: float) -> None:
        """A daemon thread that has not ended after INTERRUPT_S ends with the process."""
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            self.sink.interrupt()
            self._thread.join(INTERRUPT_S)

    def ship_waiting(self) -> bool:
        """The caller holds the sink's lock. Raises SinkFailed and OSError."""
        is_any = False
        while batch := self._batch():
            is_any = True
            self._ship(batch)
        return is_any

    def _ship(self, batch: Sequence[Path]) -> None:
        contents = [read_segment(path.read_bytes()) for path in batch]
        payloads = [payload for content in contents for payload in content.payloads]
        if payloads:
            self.sink.ship(payloads)
        for path in batch:
            path.unlink(missing_ok=True)
        self.num_shipped += len(payloads)
        if damaged := sum(content.num_damaged_bytes for content in contents):
            self.num_damaged_bytes += damaged
            log.warning("usage: %s of %s were damaged and are lost", counted(damaged, "byte"), counted(len(batch), "segment"))

    def _batch(self) -> list[Path]:
        chosen: list[Path] = []
        size = 0
        for path in self._spool.waiting(self.sink.name)[:MAX_SEGMENTS]:
            size += path.stat().st_size
            if chosen and size > MAX_BATCH_BYTES:
                break
            chosen.append(path)
        return chosen

    # -- in the thread -------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with suppress(OSError), self._spool.shipping(self.sink.name) as is_ours:
                if is_ours:
                    self._ship_until_stopped()
            if self._stopping.wait(POLL_S):
                break
        self._take_next_sink()
        self.sink.close()

    def _take_next_sink(self) -> None:
        sink, self._next_sink = self._next_sink, None
        if sink is not None:
            self.sink.close()
            self.sink = sink

    def _ship_until_stopped(self) -> None:
        retry_s, is_last = 0.0, False
        while not is_last:
            is_last = self._stopping.is_set()
            self._woken.clear()
            self._take_next_sink()
            reason = self._attempt()
            if not reason:
                retry_s = 0.0
                self._woken.wait(0 if is_last else POLL_S)
                continue
            if retry_s in (0.0, LAST_RETRY_S):
                log.warning("usage: %s does not take records, which wait in the spool: %s", self.sink.name, reason)
            retry_s = min(max(2 * retry_s, FIRST_RETRY_S), LAST_RETRY_S)
            self._stopping.wait(0 if is_last else retry_s)

    def _attempt(self) -> str:
        """Returns the reason of a failure; empty on success."""
        try:
            if not self.ship_waiting():
                self.sink.idle()
        except (SinkFailed, OSError) as error:
            reason = str(error)
        except Exception:  # the outermost loop: a bug must not end the shipping of later records
            log.exception("usage: shipping to %s failed", self.sink.name)
            reason = "a fault of this program"
        else:
            return ""
        self.num_failures += 1
        with suppress(OSError):
            self._spool.merge(self.sink.name)
        return reason
