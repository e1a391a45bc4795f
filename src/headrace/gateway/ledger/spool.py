"""Manages the spool, a folder of usage records that have not been shipped.

    open/NAME.seg   being written by one process, which holds a lock on it
    SINK/NAME.seg   a closed segment that waits for this sink: a hard link, unlinked once it is shipped
    SINK/lock       held by the process that ships for this sink

Names sort by the time at which their segments were begun. A segment is a file:

    magic, then per record: length (4 bytes, big-endian), CRC-32 of the payload (4 bytes), payload

Reading skips a record whose CRC is wrong and ends where no whole record follows.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from headrace.core.errors import ConfigError

MAGIC = b"HRUSAGE1"
HEAD = struct.Struct(">II")
MAX_RECORD_BYTES = 1 << 20


class SegmentContent(NamedTuple):
    """num_damaged_bytes: the file's bytes outside of whole records"""

    payloads: list[bytes]
    num_damaged_bytes: int


def frame(payload: bytes) -> bytes:
    assert 0 < len(payload) <= MAX_RECORD_BYTES
    return HEAD.pack(len(payload), crc32(payload)) + payload


def read_segment(data: bytes) -> SegmentContent:
    """Never raises."""
    if not data.startswith(MAGIC):
        return SegmentContent([], len(data))
    payloads, good_bytes, place = [], len(MAGIC), len(MAGIC)
    while place + HEAD.size < len(data):
        size, checksum = HEAD.unpack_from(data, place)
        end = place + HEAD.size + size
        if not 0 < size <= MAX_RECORD_BYTES or end > len(data):
            break
        payload = data[place + HEAD.size : end]
        if crc32(payload) == checksum:
            payloads.append(payload)
            good_bytes += HEAD.size + size
        place = end
    return SegmentContent(payloads, len(data) - good_bytes)


def num_whole(frames: Iterable[bytes], num_bytes: int) -> tuple[int, int]:
    """The number of frames that are whole within the first `num_bytes` of all frames, and the bytes of these."""
    count = size = 0
    for one in frames:
        if size + len(one) > num_bytes:
            break
        count, size = count + 1, size + len(one)
    return count, size


OPEN = "open"
LOCK = "lock"
SUFFIX = ".seg"
DISK_BLOCK_BYTES = 4096
"""A file takes whole blocks, so a small segment counts as one of them."""

MERGED_BYTES = 4 << 20
"""Segments are merged into files of about this size, so that there are never many."""

MANY_SEGMENTS = 256

MAX_BYTES = 1 << 30
"""Beyond it the newest records are dropped and counted."""


class Spool:
    def __init__(self, folder: Path, sinks: Sequence[str]) -> None:
        """Closed to other users. Raises ConfigError."""
        self.folder = folder
        self.sinks = tuple(sinks)
        self.make_folders(sinks)

    def make_folders(self, sinks: Sequence[str]) -> None:
        """Raises ConfigError."""
        try:
            for path in (self.folder, self.folder / OPEN, *(self.folder / sink for sink in sinks)):
                path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError("state", f"{error.filename} cannot be made ({error.strerror})") from None

    def waiting(self, sink: str) -> list[Path]:
        """Oldest first."""
        return sorted(self._segments(sink))

    def waiting_bytes(self, sink: str) -> int:
        size = 0
        for path in self._segments(sink):
            with suppress(FileNotFoundError):
                size += -(-path.stat().st_size // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES
        return size

    def adopt(self) -> Counter[str]:
        """Returns, per sink, the records dropped because its spool is full."""
        num_dropped: Counter[str] = Counter()
        for path in self._segments(OPEN):
            with suppress(OSError), _locked(path) as is_abandoned:
                if is_abandoned:
                    num_dropped += self.close_segment(path)
        return num_dropped

    def close_segment(self, path: Path) -> Counter[str]:
        """The caller holds its lock. Returns dropped records per sink, as `adopt`.

        A repetition after a crash at any point is safe: sinks keep one record per request. Raises OSError.
        """
        num_dropped: Counter[str] = Counter()
        for sink in self.sinks:
            if self.waiting_bytes(sink) + path.stat().st_size > MAX_BYTES:
                num_dropped[sink] += len(read_segment(path.read_bytes()).payloads)
                continue
            with suppress(FileExistsError):
                os.link(path, self.folder / sink / path.name)
        path.unlink()
        return num_dropped

    def merge(self, sink: str) -> None:
        """Only for the process that ships for the sink.

        After a crash in between a record may be in two files; the sink keeps one.

        Raises OSError.
        """
        paths = self.waiting(sink)
        if len(paths) <= MANY_SEGMENTS:
            return
        small = [path for path in paths if path.stat().st_size < MERGED_BYTES // 2]
        for first in range(0, len(small), MANY_SEGMENTS // 4):
            chosen = small[first : first + MANY_SEGMENTS // 4]
            payloads = [payload for path in chosen for payload in read_segment(path.read_bytes()).payloads]
            unfinished = self.folder / sink / f"{chosen[0].name}.unfinished"
            unfinished.write_bytes(MAGIC + b"".join(map(frame, payloads)))
            unfinished.chmod(0o600)
            unfinished.replace(chosen[0])
            for path in chosen[1:]:
                path.unlink()

    @contextmanager
    def shipping(self, sink: str) -> Iterator[bool]:
        """Yields whether this process ships for the sink until the block ends. Raises OSError."""
        descriptor = os.open(self.folder / sink / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _segments(self, place: str) -> list[Path]:
        with os.scandir(self.folder / place) as entries:
            return [self.folder / place / entry.name for entry in entries if entry.name.endswith(SUFFIX)]


class OpenSegment:
    """A segment that this process appends records to. Not thread-safe.

    num_bytes  bytes of whole records that were written
    error      the latest error of writing; None: no record is missing
    """

    def __init__(self, spool: Spool, *, serial: int) -> None:
        """Raises OSError; BlockingIOError if another process adopted it."""
        self._spool = spool
        self.path = spool.folder / OPEN / f"{time.time_ns():020d}-{os.getpid()}-{serial}{SUFFIX}"
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.num_bytes = 0
        self.error: OSError | None = None
        try:
            # Another process may have taken it for a dead one's, in the moment before it was locked. Sinks have links to it then.
            if not _try_lock(self._descriptor) or not self.path.exists():
                raise BlockingIOError(0, "the new segment was taken away", str(self.path))
            if self.append([MAGIC]) == 0 and self.error is not None:
                raise self.error
        except OSError:
            with suppress(FileNotFoundError):
                self.path.unlink()
            os.close(self._descriptor)
            raise

    def append(self, frames: Sequence[bytes]) -> int:
        """Returns how many were written whole; a partly written frame is cut off again."""
        data = memoryview(b"".join(frames))
        written = self._write(data)
        count, size = num_whole(frames, written)
        if size < written:
            with suppress(OSError):  # readers skip what is left of it
                os.ftruncate(self._descriptor, self.num_bytes + size)
            os.lseek(self._descriptor, self.num_bytes + size, os.SEEK_SET)
        self.num_bytes += size
        return count

    def sync(self) -> None:
        """Raises OSError."""
        os.fsync(self._descriptor)

    def close(self) -> Counter[str]:
        """Returns dropped records per sink. Raises OSError; `adopt` closes it then."""
        try:
            return self._spool.close_segment(self.path)
        finally:
            os.close(self._descriptor)

    def _write(self, data: memoryview) -> int:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            self.error = error
        return written


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yields False when another process holds the lock, or has unlinked the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _try_lock(descriptor) and path.exists()
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
