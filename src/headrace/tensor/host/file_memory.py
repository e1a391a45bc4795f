"""Allocates memory for weights in huge pages, and reads weight files into it with several threads.

With pages of 4 KiB, mapping takes longer than writing the weights; with huge pages of 2 MiB it adds a few per cent. No torch is imported
here: an engine begins to read weights before torch is imported.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from contextlib import suppress

CHUNK_BYTES = 16 << 20
"""A thread reads these in a millisecond or more. Waiting for the GIL between two chunks may take as long."""


def map_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory, in huge pages where the kernel gives them, freed with its last view."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class FileReading:
    def __init__(self, descriptor: int, start: int, target: memoryview, num_threads: int) -> None:
        """Bytes [start, start + len(target)). The caller keeps the file open until `wait` or `stop` returns."""
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
        """Called once. Raises OSError when the file cannot be read or became shorter."""
        self._read()
        self._join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Returns when no thread writes into the memory any more."""
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
