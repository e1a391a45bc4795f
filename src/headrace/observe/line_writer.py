"""Writes log lines on a thread of its own, from a bounded queue: a stopped reader or a full disk costs lines, which are counted, and holds
up no other thread.
"""

from __future__ import annotations

import queue
import threading
from io import FileIO

CLOSE_S = 2.0
"""Seconds that the lines still queued at the end have to be written."""


class LineWriter:
    """A text stream of whole lines, for the process log and the request log. Any thread may write.

    num_dropped  lines that were not written whole
    """

    def __init__(self, file: FileIO, *, name: str, max_queued: int) -> None:
        """
        file        written unbuffered; closed when the thread ends
        name        of the thread
        max_queued  most lines that wait for the thread. One more is dropped and counted
        """
        self.num_dropped = 0
        self._max_queued = max_queued
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(file,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._queue.qsize() >= self._max_queued

    def write(self, line: str) -> None:
        """Queue a line, which has its end. Never blocks."""
        if self.is_full:
            self.num_dropped += 1
        else:
            self._queue.put(line)

    def flush(self) -> None:
        """Does nothing: the thread writes each line at once."""

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queued lines, for at most `timeout_s` seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self, file: FileIO) -> None:
        is_torn = False
        with file:
            while (line := self._queue.get()) is not None:
                data = line.encode("utf-8", "backslashreplace")
                num_left = _num_left(file, b"\n" + data if is_torn else data)
                is_torn = 0 < num_left < len(data) or (is_torn and num_left > 0)
                self.num_dropped += num_left > 0


def _num_left(file: FileIO, line: bytes) -> int:
    """Write one line. Returns the bytes that could not be written: they are not tried again."""
    data = memoryview(line)
    try:
        while data:
            num_written = file.write(data)
            if num_written is None:  # a non-blocking pipe whose reader has stopped
                break
            data = data[num_written:]
    except OSError:  # the disk is full, or the reader has closed
        pass
    return len(data)
