"""Memory for weights, and files read into it. Nothing here imports torch: reading begins before torch is there.

Pages are large, because memory is filled once and then read from end to end at every step. The system maps memory at first touch, page by
page: in pages of 2 MiB that costs a few per cent of writing the memory, in pages of 4 KiB more than the writing. Where the system does
not give large pages the memory is as good as any.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from contextlib import suppress

CHUNK_BYTES = 16 << 20
"""Read by one thread at a time: a millisecond or more, since between two chunks a thread may wait that long for the interpreter."""


def map_pages(num_bytes: int) -> mmap.mmap:
    """Private memory of zeros, in large pages if the system gives them. It lives as long as something looks at it."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class FileReading:
    """Bytes of a file on their way into memory; threads of its own read, and who waits helps them.

    num_read  bytes that have arrived
    """

    def __init__(self, descriptor: int, start: int, target: memoryview, num_threads: int) -> None:
        """Bytes [start, start + len(target)) of an open file, which stays open until `wait` or `stop` has returned."""
        self.num_read = 0
        self._error: OSError | None = None
        self._parts = deque((target[first : first + CHUNK_BYTES], start + first) for first in range(0, len(target), CHUNK_BYTES))
        self._lock = threading.Lock()
        self._descriptor = descriptor
        self._threads: list[threading.Thread] = []
        with suppress(RuntimeError):  # no thread more may be had: who waits reads alone
            for _ in range(num_threads):
                thread = threading.Thread(target=self._read, daemon=True, name="headrace-read")
                thread.start()
                self._threads.append(thread)

    def wait(self) -> None:
        """Until all bytes are there. Once. Raises OSError where they cannot be read, or the file became shorter."""
        self._read()
        self._join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Nobody wants the bytes: returns once no thread writes into the memory any more."""
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
