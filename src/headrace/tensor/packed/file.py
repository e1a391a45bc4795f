"""A file of packed weights, and the folder that holds such files: the part of a start that needs no torch.

A packed file is a safetensors file: linears first, tables (embeddings) last. Linears are read into one piece of memory and are views of it;
tables stay in the file, which stays open. Which file a start needs is known only after torch has been imported: reading begins earlier,
with the file that the last start with the same configuration used.
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
from headrace.tensor.host.file_memory import FileReading, StoredMemory, map_pages
from headrace.tensor.host.unfinished import is_named

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
NOTE_SUFFIX = ".last"
TABLE = "table:"
"""Before the names of tensors that stay in the file."""
_NAME = re.compile(r"[0-9a-f]{32}-[0-9]+\.safetensors")


class PackedFile:
    """Open, with reading begun.

    facts       the file's metadata: text by name
    descriptor  the open file's; closed with this object
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        """num_threads: reading threads, started here; the thread that calls `wait` reads too.

        Raises CheckpointError for a damaged file; OSError for one that cannot be opened or was replaced meanwhile.
        """
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
        self._num_bytes = min(tables, default=end)
        self._memory = map_pages(max(1, self._num_bytes))
        if end > self._num_bytes and hasattr(os, "posix_fadvise"):
            # Rows of tables are read one by one. The system reads the tables into its page cache meanwhile.
            os.posix_fadvise(self.descriptor, self._data_start + self._num_bytes, end - self._num_bytes, os.POSIX_FADV_WILLNEED)
        self._reading: FileReading | None = FileReading(self.descriptor, self.linears.regions, num_threads)

    @property
    def num_bytes_read(self) -> int:
        return self._num_bytes if self._reading is None else self._reading.num_read

    @property
    def linears(self) -> StoredMemory:
        return StoredMemory(self.descriptor, [(memoryview(self._memory)[: self._num_bytes], self._data_start)])

    def wait(self) -> None:
        """Returns once all linears are in memory. Raises OSError if the file cannot be read."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.wait()

    def drop(self) -> None:
        """Nothing of the file may be used afterwards."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.stop()

    def place(self, name: str) -> tuple[StoredTensor, mmap.mmap, int]:
        """(a linear's tensor, the memory it lies in, its first byte there), valid after `wait`.

        Raises KeyError for an unknown name; ValueError for a tensor that comes after a table, and so is not in memory.
        """
        stored = self.tensors[name]
        if stored.end > self._num_bytes:
            raise ValueError(f"{name} comes after a table")
        return stored, self._memory, stored.begin

    def place_of_table(self, name: str) -> tuple[StoredTensor, int]:
        stored = self.tensors[TABLE + name]
        return stored, self._data_start + stored.begin


class PackedFolder:
    """The folder of packed files as one configuration uses it, with the file that is being read ahead.

    A note per configuration, a small file in the folder, names the packed file that the configuration's last start used.
    """

    def __init__(self, directory: Path, configuration: Mapping[str, object]) -> None:
        """configuration: the options, JSON values, that decide which file a start needs."""
        key = blake2b(json.dumps(configuration, sort_keys=True).encode(), digest_size=16, person=b"headrace-asked")
        self.directory = directory
        self._note = directory / (key.hexdigest() + NOTE_SUFFIX)
        self._ahead: PackedFile | None = None

    @property
    def num_bytes_ahead(self) -> int:
        return 0 if self._ahead is None else self._ahead.num_bytes_read

    def read_ahead(self, max_bytes: int) -> None:
        """Raises nothing: `open` reports errors."""
        try:
            name = self._note.read_text(encoding="ascii")[:64]
            path = self.directory / name
            if _NAME.fullmatch(name) and path.stat().st_size <= max_bytes:
                self._ahead = PackedFile(path, 1)
        except (OSError, ValueError, CheckpointError):
            self._ahead = None

    def open(self, name: str, num_threads: int) -> PackedFile:
        """Raises CheckpointError for a damaged file, OSError for one that cannot be read."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.path.name != name:
            ahead.drop()
            ahead = None
        file = ahead or PackedFile(self.directory / name, num_threads)
        file.wait()
        return file

    def drop(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None

    def remember(self, name: str) -> None:
        """The configuration's next start reads the file `name` ahead."""
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
