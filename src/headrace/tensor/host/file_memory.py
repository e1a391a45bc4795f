"""Memory for weights, in large pages, and files read into it. Nothing here imports torch: reading begins before torch is imported.

Pages are large because weights are written once and then read from end to end at every step. The system maps memory at first touch, page
by page. In pages of 2 MiB that costs a few per cent of the time to write the memory, in pages of 4 KiB more than the writing itself. If
the system gives no large pages, the memory has small ones and works all the same.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from contextlib import suppress

CHUNK_BYTES = 16 << 20
"""Bytes that a thread reads at a time, which takes a millisecond or more: between two chunks it may wait as long for the interpreter."""


def map_pages(num_bytes: int) -> mmap.mmap:
    """Private zeroed memory, in large pages if the system gives them. It is freed with the last view of it."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class FileReading:
    """Reads a part of a file into memory with threads of its own; the thread that calls `wait` reads along.

    num_read  bytes read so far
    """

    def __init__(self, descriptor: int, start: int, target: memoryview, num_threads: int) -> None:
        """Begin to read bytes [start, start + len(target)) of an open file. The caller keeps it open until `wait` or `stop` returns."""
        self.num_read = 0
        self._error: OSError | None = None
        self._parts = deque((target[first : first + CHUNK_BYTES], start + first) for first in range(0, len(target), CHUNK_BYTES))
        self._lock = threading.Lock()
        self._descriptor = descriptor
        self._threads: list[threading.Thread] = []
        with suppress(RuntimeError):  # no more threads can be started: the waiting thread reads alone
            for _ in range(num_threads):
                thread = threading.Thread(target=self._read, daemon=True, name="headrace-read")
                thread.start()
                self._threads.append(thread)

    def wait(self) -> None:
        """Return once all bytes are read. Call it once. Raises OSError if the file cannot be read or became shorter."""
        self._read()
        self._join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Abandon the bytes. Returns once no thread writes into the memory any more."""
        self._parts.clear()
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        while self._error is None:
            try:
                target, position = self._parts.popleft()
            except IndexError:
                return
            try:
                with target:
                    _fill(self._descriptor, target, position)
                    with self._lock:
                        self.num_read += len(target)
            except OSError as error:
                self._error = error


def _fill(descriptor: int, target: memoryview, position: int) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], position + done)
        if count == 0:
            raise OSError("the file became shorter while it was read")
        done += count
