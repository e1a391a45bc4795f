"""Allocates memory for weights in huge pages, and reads weight files into it with several threads.

With pages of 4 KiB, mapping takes longer than writing the weights; with huge pages of 2 MiB it adds a few per cent. No torch is imported
here: an engine begins to read weights before torch is imported.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

CHUNK_BYTES = 16 << 20
"""A thread reads these in a millisecond or more. Waiting for the GIL between two chunks may take as long."""


def map_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed private memory, in huge pages where the kernel gives them, freed with its last view."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give_back(memory: memoryview) -> None:
    """Whole pages within private memory go back to the system; they are zeros when they are next read."""
    if len(memory) == 0:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + len(memory)) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


Region = tuple[memoryview, int]
"""Memory, and the place of its first byte in a file."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class StoredMemory:
    """Memory whose bytes are in a file that `descriptor` keeps open."""

    descriptor: int
    regions: Sequence[Region]

    @property
    def num_bytes(self) -> int:
        return sum(len(memory) for memory, _ in self.regions)

    def give_back(self) -> None:
        for memory, _ in self.regions:
            give_back(memory)

    def read(self, num_threads: int) -> None:
        """Raises OSError."""
        FileReading(self.descriptor, self.regions, num_threads).wait()


class FileReading:
    def __init__(self, descriptor: int, regions: Sequence[Region], num_threads: int) -> None:
        """The caller keeps the file open until `wait` or `stop` returns."""
        self.num_read = 0
        self._error: OSError | None = None
        self._parts = deque(
            (target[first : first + CHUNK_BYTES], start + first)
            for target, start in regions
            for first in range(0, len(target), CHUNK_BYTES)
        )
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
