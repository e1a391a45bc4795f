"""Allocates memory for weights in huge pages, and reads weight files into it with several threads.

The kernel maps anonymous memory page by page, when a page is first written. With pages of 4 KiB the mapping takes longer than writing the
weights; with huge pages of 2 MiB it adds a few per cent. Weights are also read from end to end at every step. Where the kernel
gives no huge pages, the memory has small pages and works all the same.

No torch is imported here: an engine begins to read weights before torch is imported.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from contextlib import suppress

CHUNK_BYTES = 16 << 20
"""Bytes that a thread reads at a time, which takes a millisecond or more. Waiting for the GIL between two chunks may take as long."""


def map_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory of `num_bytes`, in huge pages where the kernel gives them. The memory is freed with its last view."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class FileReading:
    """Reads a part of a file into memory with several threads. The thread that calls `wait` reads too."""

    def __init__(self, descriptor: int, start: int, target: memoryview, num_threads: int) -> None:
        """Begin to read bytes [start, start + len(target)) of an open file into `target`.

        descriptor  of the file; the caller keeps the file open until `wait` or `stop` returns
        """
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
        """Read along, and return when all bytes are read. Called once. Raises OSError when the file cannot be read or became shorter."""
        self._read()
        self._join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Abandon the reading. Returns when no thread writes into the memory any more."""
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
