"""Unpacks the files of a model from a tar archive, plain or packed, with bounded memory: members may say anything."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any, cast

from headrace.core.errors import CheckpointError
from headrace.registry.manifest import MAX_FILES, StoredFile, is_kept
from headrace.registry.oci import plain_path
from headrace.registry.remote import CHUNK_BYTES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

OPENERS: dict[str, Callable[..., object]] = {"tar": open, "gzip": gzip.open, "zstd": zstd.open}


MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS_BYTES = 4 << 20
"""For all members together: names and attributes of 4 KiB each."""
MAX_RATIO = 100
FREE_BYTES = 64 << 20
"""An archive is read to MAX_RATIO times its own size, and these bytes more: text is packed to a tenth, weights hardly."""
DAMAGES = (tarfile.TarError, EOFError, ValueError, ArithmeticError, RecursionError, zlib.error, gzip.BadGzipFile, zstd.ZstdError)
"""tarfile raises those that are not its own for attributes which are no numbers, and for headers that follow each other by the hundred."""


class _Headers:
    """What tarfile reads of an archive. It would read a header of whatever size the archive says at once, and all for a negative one."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = MAX_HEADERS_BYTES
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= min(MAX_HEADER_BYTES, self._left):
            raise tarfile.ReadError(f"a header of {size} bytes, or headers of more than {MAX_HEADERS_BYTES}")
        self._left -= size
        return self._stream.read(size)


def unpack(archive: Path, packing: str, target: Path, make_room: Callable[[int], None], where: str) -> Iterator[StoredFile]:
    """Yields each file that a version may hold once it lies at `target`, from where it is to be moved away.

    packing    a key of OPENERS
    make_room  called with the bytes of a file before it is written

    Raises CheckpointError, naming `where`, for a damaged archive or a member that leads out of the folder.
    """
    try:
        with cast(IO[bytes], OPENERS[packing](archive, "rb")) as stream:
            for member in _members(stream, FREE_BYTES + MAX_RATIO * archive.stat().st_size, where):
                path = plain_path(member.name, where)
                if member.isreg() and not member.issparse() and is_kept(path):
                    make_room(member.size)
                    stream.seek(member.offset_data)
                    yield StoredFile(path, member.size, _copied(stream, member.size, target))
    except DAMAGES as error:
        raise CheckpointError(where, f"holds a damaged archive: {error}") from error


def _members(stream: IO[bytes], max_bytes: int, where: str) -> Iterator[tarfile.TarInfo]:
    """Nothing behind the first `max_bytes` is read, not even to skip it."""
    with tarfile.open(fileobj=cast(IO[bytes], _Headers(stream)), mode="r:") as members:
        for number in count():
            member = members.next()
            if member is None:
                return
            cast(Any, members).members.clear()
            if number >= MAX_FILES:
                raise CheckpointError(where, f"holds an archive of more than {MAX_FILES} files")
            if member.size < 0:
                raise tarfile.ReadError(f"a member of {member.size} bytes")
            if max(members.offset, member.offset_data + member.size) > max_bytes:
                raise CheckpointError(
                    where, f"holds an archive that unpacks to more than {max_bytes} bytes", "Push its files as raw layers."
                )
            yield member


def _copied(stream: IO[bytes], size: int, target: Path) -> str:
    """The SHA-256. Raises EOFError where the archive ends before."""
    digest = hashlib.sha256()
    with target.open("wb") as copy:
        while size:
            if not (data := stream.read(min(size, CHUNK_BYTES))):
                raise EOFError("it ends within a file")
            copy.write(data)
            digest.update(data)
            size -= len(data)
        copy.flush()
        os.fsync(copy.fileno())
    return digest.hexdigest()
