"""A file of packed weights, and the folder of them: what of it can be done before torch is there.

A safetensors file: linears first, tables (embeddings) last. Linears are read whole, by several threads, into memory that they then lie
in: no page of them is mapped twice, none copied again. Tables stay in the file, which stays open: rows are read when they are looked up.

Which file a start needs is known only after torch has been imported. Reading begins before, with the file that the last start with the
same configuration needed; if it turns out to be another one, what was read is dropped.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import weakref
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.header import StoredTensor, read_header
from headrace.tensor.host.file_memory import FileReading, map_pages
from headrace.tensor.host.unfinished import is_named

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
NOTE_SUFFIX = ".last"
TABLE = "table:"
"""How the names of tensors begin that stay in the file."""
_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")


class PackedFile:
    """An open file. Raises CheckpointError for a damaged one, OSError for one that cannot be opened.

    facts       its metadata: text by name
    tensors     what it holds, by name
    descriptor  of the open file, for as long as this object
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        """num_threads  that read the linears from now on, besides whoever waits for them."""
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        header = read_header(path)
        if not is_named(self.descriptor, path):
            raise OSError("it was replaced while it was opened")
        self.path, self.tensors = path, header.tensors
        self.facts: dict[str, str] = header.metadata if isinstance(header.metadata, dict) else {}
        self._data_start = header.data_start
        end = max((tensor.end for tensor in header.tensors.values()), default=0)
        tables = [tensor.begin for name, tensor in header.tensors.items() if name.startswith(TABLE)]
        self._num_read = min(tables, default=end)
        self._memory = map_pages(max(1, self._num_read))
        if end > self._num_read and hasattr(os, "posix_fadvise"):
            # Rows of tables are read one by one; by then the system is to have them.
            os.posix_fadvise(self.descriptor, self._data_start + self._num_read, end - self._num_read, os.POSIX_FADV_WILLNEED)
        target = memoryview(self._memory)[: self._num_read]
        self._reading: FileReading | None = FileReading(self.descriptor, header.data_start, target, num_threads)

    @property
    def num_bytes_read(self) -> int:
        return self._num_read if self._reading is None else self._reading.num_read

    def wait(self) -> None:
        """Until the linears are in memory. Raises OSError where they cannot be read."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.wait()

    def drop(self) -> None:
        """Stop reading; nothing of it is to be used."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.stop()

    def place(self, name: str) -> tuple[StoredTensor, mmap.mmap, int]:
        """(a linear's tensor, memory it lies in, first byte there); after `wait`. Raises KeyError for a name that is not there, ValueError
        for a linear that stands behind a table."""
        stored = self.tensors[name]
        if stored.end > self._num_read:
            raise ValueError(f"{name} stands behind a table")
        return stored, self._memory, stored.begin

    def place_of_table(self, name: str) -> tuple[StoredTensor, int]:
        """(the table, first byte in the file). Raises KeyError."""
        stored = self.tensors[TABLE + name]
        return stored, self._data_start + stored.begin


class PackedFolder:
    """Where packed weights are kept for one configuration, and the file of it that is being read already."""

    def __init__(self, directory: Path, configuration: Mapping[str, object]) -> None:
        """configuration: all that decides which file is needed, as far as it was asked for; JSON."""
        key = blake2b(json.dumps(configuration, sort_keys=True).encode(), digest_size=16, person=b"headrace-asked")
        self.directory = directory
        self._note = directory / (key.hexdigest() + NOTE_SUFFIX)
        self._ahead: PackedFile | None = None

    @property
    def num_bytes_ahead(self) -> int:
        """Memory that reading ahead has taken so far."""
        return 0 if self._ahead is None else self._ahead.num_bytes_read

    def read_ahead(self, most_bytes: int) -> None:
        """Begin with the file of the last time, if it is there and not larger. Raises nothing: it is opened again when it is needed."""
        try:
            name = self._note.read_text(encoding="ascii")[:64]
            path = self.directory / name
            if _NAME.fullmatch(name) and path.stat().st_size <= most_bytes:
                self._ahead = PackedFile(path, 1)
        except (OSError, ValueError, CheckpointError):
            self._ahead = None

    def open(self, name: str, num_threads: int) -> PackedFile:
        """The file, in memory. Raises CheckpointError, OSError."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.path.name != name:
            ahead.drop()
            ahead = None
        file = ahead or PackedFile(self.directory / name, num_threads)
        file.wait()
        return file

    def drop(self) -> None:
        """Nothing more is needed of what is being read."""
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None

    def remember(self, name: str) -> None:
        """This is the file that the configuration needs."""
        with suppress(OSError, ValueError):
            if self._note.read_text(encoding="ascii") == name:
                return
        new = self._note.with_suffix(f".{os.getpid()}")
        try:
            new.write_text(name, encoding="ascii")
            os.replace(new, self._note)
        except OSError as error:
            log.warning("the next start will not read ahead: %s", error)
            with suppress(OSError):
                new.unlink(missing_ok=True)
