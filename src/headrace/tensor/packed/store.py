"""Packed weights kept on disk: a start reads them instead of joining, rounding and packing the checkpoint's again.

One file per (checkpoint, precision, layout), written whole or not at all. Its name comes from the checkpoint's digest and from every
weight file's size and time of change, so a changed checkpoint is packed anew; so is one whose file here is damaged. The file holds
numbers only: nothing of it can run. What is not used for long makes room. How it is read: `packed.file`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from math import prod
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.files import MAX_JSON_BYTES, decode_json
from headrace.tensor.host.unfinished import UNFINISHED, is_named, locked, remove_oldest, remove_unfinished
from headrace.tensor.kernels import Linear, PackedLinear, WeightPacking
from headrace.tensor.kernels.cpu.pages import read_open
from headrace.tensor.kernels.cpu.stored_rows import prepare, read_rows
from headrace.tensor.layers.table import Table
from headrace.tensor.packed.file import NOTE_SUFFIX, SUFFIX, TABLE, PackedFile, PackedFolder

log = logging.getLogger(__name__)

VERSION = 3
MAX_FILES = 6
"""Files kept at a time; the one read longest ago goes first."""
MAX_DISK_SHARE = 0.5
"""Of the free space that a new file may take."""
LEAST_BYTES = 4 << 20
"""Less is packed as fast as it is found."""
WRITER = "headrace-pack"
"""The thread that writes."""


def store_name(digest: str, files: Iterable[Path], *, precision: str, layout: str) -> str:
    """The file's name. files: those the weights come from."""
    state = blake2b(json.dumps([VERSION, digest, precision, layout]).encode(), digest_size=16, person=b"headrace-packed")
    for path in sorted(files):
        info = path.stat()
        state.update(f"{path.name} {info.st_size} {info.st_mtime_ns}\0".encode())
    return state.hexdigest() + SUFFIX


class StoredTable:
    """A table in an open file of packed weights."""

    resident_bytes = 0

    def __init__(self, file: PackedFile, name: str, shape: tuple[int, int]) -> None:
        """Raises KeyError for a name or a dtype that is not there, ValueError for another shape."""
        stored, self._start = file.place_of_table(name)
        self._file, self._shape, self._dtype = file, shape, _DTYPES[stored.dtype]
        if stored.shape != shape or not self._dtype.is_floating_point:
            raise ValueError(f"{name} is {stored.dtype} of {list(stored.shape)}")

    def rows(self, ids: Tensor) -> Tensor:
        return read_rows(self._file.descriptor, self._start, *self._shape, self._dtype, ids)

    def whole(self) -> Tensor:
        flat = read_open(self._file.descriptor, self._start, prod(self._shape) * self._dtype.itemsize)
        return flat.view(self._dtype).view(self._shape)


class PackedStore:
    """The packed linears and the tables of one model by name: found in the folder's file `name`, or kept until `save` writes them there."""

    def __init__(self, folder: PackedFolder, name: str, packing: WeightPacking, content: Callable[[], str] | None = None) -> None:
        """content: digest of the weight files that are packed, hashed where it must be; "" when they have changed. It is kept with them."""
        self._folder, self._path = folder, folder.directory / name
        self._packing, self._content = packing, content
        self._made: dict[str, PackedLinear] = {}
        self._made_tables: dict[str, Tensor] = {}
        self._num_found = 0
        self._damaged: PackedFile | None = None
        self._found = self._open()

    @property
    def made_from(self) -> str | None:
        """Digest of the files that what was found here was packed from; None when nothing of it is used."""
        return self._found.facts.get(_MADE_FROM) if self._found is not None and self._num_found > 0 else None

    def find(self, name: str) -> Linear | None:
        """A linear kept by an earlier start; the file's memory lives as long as any of them. Raises nothing: one that cannot be read is
        made again, and so is the whole file at the next start."""
        if self._found is None or name not in self._found.facts:  # of a whole file: one that is packed in a way that is not kept
            return None
        try:
            facts = json.loads(self._found.facts[name])
            tensors = {part: self._tensor(f"{name}/{part}") for part in facts["tensors"]}
            linear = self._packing.load_packed(PackedLinear(tensors=tensors, **{key: facts[key] for key in _FACTS}))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self._refuse(error)
            return None
        self._num_found += 1
        return linear

    def keep(self, name: str, linear: Linear) -> None:
        if (packed := self._packing.packed(linear)) is not None:
            self._made[name] = packed

    def find_table(self, name: str, shape: tuple[int, int]) -> Table | None:
        """A table kept by an earlier start, which stays in the file."""
        if self._found is None or TABLE + name not in self._found.tensors:
            return None
        try:
            table = StoredTable(self._found, name, shape)
        except (KeyError, ValueError) as error:
            self._refuse(error)
            return None
        self._num_found += 1
        return table

    def keep_table(self, name: str, table: Tensor) -> None:
        self._made_tables[name] = table
        prepare()  # compiled now, with everything else that a first start compiles

    def save(self) -> Thread | None:
        """Begin to write what was made, unless it was all found; once. The thread ends when it is written; it logs why something was not.

        A program that ends waits for it. An engine process does not: what it leaves half written, a later start removes.
        A file of which one part could be used and another not is removed: what was found in it is not at hand to be written again.
        """
        if self._damaged is not None:
            with suppress(OSError):
                if is_named(self._damaged.descriptor, self._path):
                    self._path.unlink()
        elif self._found is not None:
            self._folder.remember(self._path.name)
        elif self._made:
            thread = Thread(target=self._write, name=WRITER, daemon=False)
            thread.start()
            return thread
        return None

    def _write(self) -> None:
        """Beside an engine that answers already: nobody changes a weight."""
        tensors = {f"{name}/{part}": tensor for name, packed in self._made.items() for part, tensor in packed.tensors.items()}
        tables = {TABLE + name: table for name, table in self._made_tables.items()}
        facts = {name: _facts(packed) for name, packed in self._made.items()} | {_MADE_FOR: self._path.name}
        size = sum(tensor.nbytes for tensor in (*tensors.values(), *tables.values()))
        self._made, self._made_tables = {}, {}
        if size < LEAST_BYTES:
            return
        try:
            if size > MAX_DISK_SHARE * shutil.disk_usage(self._path.parent).free:
                raise OSError(f"{size >> 20} MiB is more than half of the free space")
            new = self._path.with_suffix(UNFINISHED)
            with locked(new) as descriptor:
                if descriptor is None:
                    log.info("packed weights are being written by another process")
                    return
                if self._content is not None:
                    facts[_MADE_FROM] = self._content()
                    if not facts[_MADE_FROM]:
                        raise OSError("the checkpoint has changed since it was read")
                log.info("writing %d MiB of packed weights to %s", size >> 20, self._path)
                try:
                    write_tensors(descriptor, tensors, tables, facts)
                    os.replace(new, self._path)
                except BaseException:
                    new.unlink(missing_ok=True)
                    raise
            log.info("packed weights are written")
            self._folder.remember(self._path.name)
            self._make_room()
        except (OSError, CheckpointError) as error:
            log.warning("packed weights are not kept (%s); they are made again at the next start", error)

    def _open(self) -> PackedFile | None:
        if not self._path.is_file():
            self._folder.drop()
            return None
        try:
            found = self._folder.open(self._path.name, torch.get_num_threads() - 1)
            if found.facts.get(_MADE_FOR) != self._path.name:
                raise OSError("it was made for another model")
            with suppress(OSError):  # another start has just made room
                os.utime(found.descriptor)  # read now: see _make_room
        except (CheckpointError, OSError) as error:
            log.warning("packed weights %s cannot be read (%s); they are made again", self._path, error)
            return None
        return found

    def _tensor(self, name: str) -> Tensor:
        """A view of the file's memory, which lives as long as it. Raises KeyError for a name or a dtype that is not there, ValueError."""
        assert self._found is not None
        stored, memory, first = self._found.place(name)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=stored.end - stored.begin, offset=first)
        return flat.view(_DTYPES[stored.dtype]).reshape(stored.shape)

    def _refuse(self, error: Exception) -> None:
        log.warning("packed weights %s cannot be used (%s); they are made again", self._path, error)
        self._damaged = self._found if self._num_found > 0 else None
        self._found = None

    def _make_room(self) -> None:
        kept = {path.name for path in remove_oldest(list(self._path.parent.glob("*" + SUFFIX)), max_files=MAX_FILES)}
        remove_unfinished(self._path.parent)
        for note in self._path.parent.glob("*" + NOTE_SUFFIX):
            with suppress(OSError):
                if note.read_text(encoding="ascii", errors="replace") not in kept:
                    note.unlink()


def write_tensors(descriptor: int, linears: Mapping[str, Tensor], tables: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """A safetensors file, written from where the tensors lie: its own library copies them all first, which may be all the memory there is.

    Larger elements come first, so that each tensor lies as its elements need; tables come last. Raises OSError; CheckpointError, before
    anything is written, for more tensors than `read_header` takes.
    """
    linears = dict(sorted(linears.items(), key=lambda item: (-item[1].element_size(), item[0])))
    entries: dict[str, object] = {"__metadata__": dict(facts)}
    end = 0
    for name, tensor in (*linears.items(), *tables.items()):
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_JSON_BYTES:
        raise CheckpointError("packed weights", f"a header of {len(header)} bytes is more than {MAX_JSON_BYTES}")
    decode_json("packed weights", header)
    with os.fdopen(descriptor, "wb", closefd=False) as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in (*linears.values(), *tables.values()):
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())  # a file that has its name has its bytes, whatever happens to the machine


_MADE_FOR = "made for"
_MADE_FROM = "made from"
_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FACTS = ("kind", "out_features", "in_features", "group", "block")


def _facts(packed: PackedLinear) -> str:
    return json.dumps({**{key: getattr(packed, key) for key in _FACTS}, "tensors": list(packed.tensors)})
