"""Unpacks the files of a model from a tar archive, plain or packed, with bounded memory: members may say anything."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from headrace.core.errors import CheckpointError
from headrace.registry.manifest import MAX_FILES, StoredFile, is_kept
from headrace.registry.oci import plain_path
from headrace.registry.remote import CHUNK_BYTES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

OPENERS: dict[str, Callable[..., object]] = {"tar": open, "gzip": gzip.open, "zstd": zstd.open}


class _Bounded:
    """tarfile reads a header of whatever size the archive says at once."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if size > CHUNK_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._stream.read(size)


def unpack(archive: Path, packing: str, target: Path, make_room: Callable[[int], None], where: str) -> Iterator[StoredFile]:
    """Yields each file that a version may hold once it lies at `target`, from where it is to be moved away.

    packing    a key of OPENERS
    make_room  called with the bytes of a file before it is written

    Raises CheckpointError, naming `where`, for a damaged archive or a member that leads out of the folder.
    """
    try:
        with cast(IO[bytes], OPENERS[packing](archive, "rb")) as stream, tarfile.open(fileobj=cast(IO[bytes], _Bounded(stream))) as members:
            for number, member in enumerate(members):
                if number >= MAX_FILES:
                    raise CheckpointError(where, f"holds an archive of more than {MAX_FILES} files")
                path = plain_path(member.name, where)
                content = members.extractfile(member) if member.isreg() and not member.issparse() and is_kept(path) else None
                if content is not None:
                    make_room(member.size)
                    yield StoredFile(path, member.size, _copied(content, target))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError) as error:
        raise CheckpointError(where, f"holds a damaged archive: {error}") from error


def _copied(content: IO[bytes], target: Path) -> str:
    """The SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as copy:
        while data := content.read(CHUNK_BYTES):
            copy.write(data)
            digest.update(data)
        copy.flush()
        os.fsync(copy.fileno())
    return digest.hexdigest()
