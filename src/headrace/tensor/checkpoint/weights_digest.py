"""Computes a hash over every byte of a model's weight files and its config.json, and stores the hash for the next start.

Equal digests mean equal weights; `Checkpoint.digest` in contrast samples the files. Hashing takes about half a second per gigabyte, in
pieces between which the caller may pause. The record beside the packed weights has a stamp of each file (size, mtime, ctime, inode);
ctime, since a copy may preserve the mtime. Files that were pulled from a registry have been hashed then (`registry.cache`): they are not
hashed again.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Generator, Sequence
from hashlib import blake2b, sha256
from pathlib import Path

from headrace.core.regular_files import MAX_FILE_BYTES, read_file
from headrace.machine.cache_folder import cache_root
from headrace.tensor.host.unfinished import UNFINISHED, locked, remove_oldest, remove_unfinished

log = logging.getLogger(__name__)

SUFFIX = ".weights"
MAX_RECORDS = 64
MAX_RECORD_BYTES = 1 << 20
"""A larger record is not written. A record has some hundred bytes per weight file."""
MAX_RECORDS_BYTES = 4 << 20
PIECE_BYTES = 4 << 20
"""Hashed between two pauses, which takes some milliseconds of one CPU core."""

Stamps = list[list[object]]


class WeightsDigest:
    """Used by one thread at a time. Made before the weights are read, so that later changes are noticed.

    known  hex digest; "" before `compute`, unless an earlier start has stored a record
    """

    def __init__(self, files: Sequence[Path], directory: Path | None) -> None:
        """
        files      config.json and the weight files
        directory  folder of the records; None: no record is read or stored

        Raises OSError for a missing file.
        """
        self._files = sorted(files)
        self._stamps = _stamps(self._files)
        self._record = None if directory is None else directory / f"{_key(self._files)}{SUFFIX}"
        self._packed_from: str | None = None
        self._content = _pulled(self._files) or self._recorded()

    @property
    def known(self) -> str:
        if not self._content or self._packed_from in (None, self._content):
            return self._content
        # Some weights in memory were packed from files other than those in the folder now: neither digest alone covers them all.
        return sha256(f"{self._packed_from} {self._content}".encode()).hexdigest()

    def packed_from(self, content: str) -> None:
        """content: digest of the files from which the packed form was made."""
        self._packed_from = content

    def content(self) -> Generator[None, None, str]:
        """Returns the digest of the files, which are hashed unless it is known. Yields after every PIECE_BYTES.

        Returns "" and logs the reason when a file cannot be read, or has changed since this object was made.
        """
        if not self._content:
            try:
                found = yield from _hashed(self._files)
                if _stamps(self._files) == self._stamps:
                    self._content = found
                    self._write_record()
                else:
                    log.warning("weight files have changed since they were read: no stream will be resumed here")
            except OSError as error:
                log.warning("weight files cannot be hashed (%s): no stream will be resumed here", error)
        return self._content

    def compute(self) -> str:
        deque(self.content(), maxlen=0)
        return self.known

    def _recorded(self) -> str:
        if self._record is None:
            return ""
        try:
            record = json.loads(self._record.read_bytes()[:MAX_RECORD_BYTES])
            return str(record["digest"]) if record["stamps"] == self._stamps else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _write_record(self) -> None:
        if self._record is None:
            return
        data = json.dumps({"stamps": self._stamps, "digest": self._content}).encode()
        if len(data) > MAX_RECORD_BYTES:
            log.warning("the next start will hash the weights again: their record would have %d bytes", len(data))
            return
        try:
            with locked(self._record.with_suffix(UNFINISHED)) as descriptor:
                if descriptor is None:  # another start writes the same record
                    return
                with os.fdopen(descriptor, "wb", closefd=False) as stream:
                    stream.write(data)
                os.replace(self._record.with_suffix(UNFINISHED), self._record)
        except OSError as error:
            log.warning("the next start will hash the weights again: %s", error)
        remove_unfinished(self._record.parent)
        records = list(self._record.parent.glob(f"*{SUFFIX}"))
        remove_oldest(records, max_files=MAX_RECORDS, max_bytes=MAX_RECORDS_BYTES)


def _pulled(files: Sequence[Path]) -> str:
    """What `_hashed` would return, by the digests that a pull has checked; "" for files of another folder, or changed since."""
    home = files[0].parent.parent
    if home.parent.resolve() != (cache_root(os.environ) / "registry" / "versions").resolve():
        return ""
    try:
        seen, since_ns = json.loads(read_file(home / ".seen", MAX_FILE_BYTES)), (home / ".seen").stat().st_mtime_ns
        digests = {file["path"]: file["sha256"] for file in seen["manifest"]["files"]}
        found = [(path.name, path.stat()) for path in files]
        if any(info.st_ctime_ns > since_ns or seen["stamps"][name][0] != info.st_size for name, info in found):
            return ""
        return sha256("".join(f"{path.name}\0{digests[path.name]}\0" for path in files).encode()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _stamps(files: Sequence[Path]) -> Stamps:
    found = [(path.name, path.stat()) for path in files]
    return [[name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_dev] for name, info in found]


def _hashed(files: Sequence[Path]) -> Generator[None, None, str]:
    state, buffer = sha256(), memoryview(bytearray(PIECE_BYTES))
    for path in files:
        of_file = sha256()
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                of_file.update(buffer[:count])
                yield
        state.update(f"{path.name}\0{of_file.hexdigest()}\0".encode())
    return state.hexdigest()


def _key(files: Sequence[Path]) -> str:
    names = "\0".join(str(path.absolute()) for path in files)
    return blake2b(os.fsencode(names), digest_size=16, person=b"headrace-weights").hexdigest()
