"""Packed weights kept on disk: a start reads them instead of joining, rounding and packing the checkpoint's weights again.

One file per rank of a (checkpoint, precision, layout), written in pieces, and whole or not at all. Its name is a hash of the checkpoint's
digest and of every weight file's size and modification time, and the rank. Norms are not kept.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.files import MAX_JSON_BYTES, decode_json
from headrace.tensor.checkpoint.header import read_header
from headrace.tensor.host.file_memory import StoredMemory
from headrace.tensor.host.pages import bytes_of
from headrace.tensor.host.unfinished import UNFINISHED, is_named, locked, remove_oldest, remove_unfinished
from headrace.tensor.kernels import Linear, PackedFormat, PackedLinear, RowReader
from headrace.tensor.layers.table import HeldTable, Table
from headrace.tensor.packed.file import NOTE_SUFFIX, SUFFIX, TABLE, PackedFile, PackedFolder

log = logging.getLogger(__name__)

VERSION = 3
"""Part of every file's name: files of another version are never opened."""
MAX_MODELS = 6
"""Each with the files of all its ranks. The one used longest ago is removed first."""
MAX_DISK_SHARE = 0.5
"""A new file takes no more of the disk's free space."""
MIN_BYTES = 4 << 20
"""Smaller models are not kept: packing them takes no longer than looking for the file."""
PIECE_BYTES = 8 << 20
"""Written and synced between two pauses: some milliseconds of one processor, and what the disk takes for them."""

Pieces = Generator[None, None, None]
"""Work that pauses at each `yield`. Closing it undoes what it has begun."""


def store_name(digest: str, files: Iterable[Path], *, precision: str, layout: str, rank: int) -> str:
    """files: the checkpoint's weight files; digest: the checkpoint's. Raises OSError for a missing file.

    precision: also how weights are divided over ranks, whose names differ in nothing but the rank.
    """
    state = blake2b(json.dumps([VERSION, digest, precision, layout]).encode(), digest_size=16, person=b"headrace-packed")
    for path in sorted(files):
        info = path.stat()
        state.update(f"{path.name} {info.st_size} {info.st_mtime_ns}\0".encode())
    return f"{state.hexdigest()}-{rank}{SUFFIX}"


class StoredTable:
    """Stays in an open file of packed weights. If the file cannot be read, the checkpoint's table takes its place."""

    def __init__(self, file: PackedFile, name: str, shape: tuple[int, int], read_rows: RowReader, reread: Callable[[], Tensor]) -> None:
        """reread: gives the whole table from the checkpoint. Raises KeyError for an unknown name or dtype, ValueError for another shape."""
        stored, self._start = file.place_of_table(name)
        self._file, self._shape, self._dtype = file, shape, _DTYPES[stored.dtype]
        self._read_rows, self._reread, self._held = read_rows, reread, HeldTable(torch.empty(0))
        if stored.shape != shape or not self._dtype.is_floating_point:
            raise ValueError(f"{name} is {stored.dtype} of {list(stored.shape)}")

    @property
    def resident_bytes(self) -> int:
        return self._held.resident_bytes

    def rows(self, ids: Tensor) -> Tensor:
        """Raises CheckpointError when neither file can be read. The step then fails, and the engine goes on."""
        if self.resident_bytes == 0:
            try:
                return self._read_rows(self._file.descriptor, self._start, *self._shape, self._dtype, ids)
            except OSError as error:
                log.error("%s (%s): the checkpoint's embeddings are read into memory instead", error, self._file.path)
                self._held = HeldTable(self._reread())
        return self._held.rows(ids)

    def whole(self) -> Tensor:
        return self._reread()


class PackedStore:
    """One model's packed linears and its tables, by name: found in its packed file, or made in this start and written there by `save`."""

    def __init__(
        self,
        folder: PackedFolder,
        name: str,
        form: PackedFormat,
        content: Callable[[], Generator[None, None, str]] | None = None,
    ) -> None:
        """
        name     the model's packed file, from `store_name`
        form     how linears are packed and loaded, and tables read
        content  gives the digest of the checkpoint's bytes, hashing them in pieces if it must; "" if they changed. Written into the packed
                 file
        """
        self._folder, self._path = folder, folder.directory / name
        self._form, self._content = form, content
        self._made: dict[str, PackedLinear] = {}
        self._made_tables: dict[str, Tensor] = {}
        self._num_found = 0
        self._damaged: PackedFile | None = None
        self._written: Mapping[str, Tensor] | None = None
        self._first_inode = _inode(self._path)
        self._found = self._open()

    @property
    def made_from(self) -> str | None:
        """Digest of the checkpoint that the linears found here were packed from; None if none was found, or the file has no digest."""
        return self._found.facts.get(_MADE_FROM) if self._found is not None and self._num_found > 0 else None

    def find(self, name: str) -> Linear | None:
        """The linear that an earlier start kept. Its weights are views of the file's memory, which lives as long.

        Raises nothing: after a linear that cannot be loaded the whole file counts as damaged, and every later linear is packed again.
        """
        if self._found is None or name not in self._found.facts:  # a whole file lacks linears whose packing is not kept
            return None
        try:
            facts = json.loads(self._found.facts[name])
            tensors = {part: self._tensor(f"{name}/{part}") for part in facts["tensors"]}
            linear = self._form.load_packed(PackedLinear(tensors=tensors, **{key: facts[key] for key in _FACTS}))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self._refuse(error)
            return None
        self._num_found += 1
        return linear

    def keep(self, name: str, linear: Linear) -> None:
        if (packed := self._form.packed(linear)) is not None:
            self._made[name] = packed

    def find_table(self, name: str, shape: tuple[int, int], reread: Callable[[], Tensor]) -> Table | None:
        """reread: gives the whole table from the checkpoint."""
        if self._found is None or TABLE + name not in self._found.tensors:
            return None
        try:
            table = StoredTable(self._found, name, shape, self._form.row_reader(), reread)
        except (KeyError, ValueError) as error:
            self._refuse(error)
            return None
        self._num_found += 1
        return table

    def keep_table(self, name: str, table: Tensor) -> None:
        self._made_tables[name] = table
        self._form.row_reader()  # compiled now, with everything else that a first start compiles

    def save(self) -> Pieces | None:
        """The writing of what was made in this start, for a thread that goes on with it when there is time; None if there is nothing to
        write. Call it once.

        The writing logs why a file was not written. If it is closed before its end, there is no file. A file of which
        only some weights could be loaded is removed: the weights that were found are not here to be written again.
        """
        if self._damaged is not None:
            with suppress(OSError):
                if is_named(self._damaged.descriptor, self._path):
                    self._path.unlink()
            return None
        if self._found is not None:
            self._folder.remember(self._path.name)
            return None
        linears = {f"{name}/{part}": tensor for name, packed in self._made.items() for part, tensor in packed.tensors.items()}
        facts = {name: _facts(packed) for name, packed in self._made.items()} | {_MADE_FOR: self._path.name}
        tables = {TABLE + name: table for name, table in self._made_tables.items()}
        self._made, self._made_tables = {}, {}
        size = sum(tensor.nbytes for tensor in (*linears.values(), *tables.values()))
        if linears and size >= MIN_BYTES:
            return self._write(linears, tables, facts, size)
        self._written = {}
        return None

    def stored(self) -> StoredMemory | None:
        """The memory whose bytes the packed file has, after `save`; None while there is no file. Raises OSError, CheckpointError."""
        if self._found is not None:
            return self._found.linears
        if self._damaged is not None or self._written is None:
            return None
        if not self._written:
            return StoredMemory(-1, [])
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        header = read_header(self._path)
        if not is_named(descriptor, self._path):
            os.close(descriptor)
            raise OSError(f"{self._path} was replaced while it was opened")
        places = {name: header.data_start + stored.begin for name, stored in header.tensors.items()}
        memory = StoredMemory(descriptor, [(bytes_of(tensor), places[name]) for name, tensor in self._written.items()])
        weakref.finalize(memory, os.close, descriptor)
        return memory

    def _write(self, linears: Mapping[str, Tensor], tables: Mapping[str, Tensor], facts: dict[str, str], size: int) -> Pieces:
        try:
            if size > MAX_DISK_SHARE * shutil.disk_usage(self._path.parent).free:
                raise OSError(f"{size >> 20} MiB is more than half of the free space")
            if (yield from self._write_file(linears, tables, facts, size)):
                self._folder.remember(self._path.name)
                self._written = {name: tensor for name, tensor in {**linears, **tables}.items() if tensor.is_contiguous()}
                self._remove_old()
        except (OSError, CheckpointError) as error:
            log.warning("packed weights are not kept (%s); the next start packs them again", error)
        except GeneratorExit:
            log.info("packed weights are not written before the end; the next start packs them again")
            raise

    def _write_file(
        self, linears: Mapping[str, Tensor], tables: Mapping[str, Tensor], facts: dict[str, str], size: int
    ) -> Generator[None, None, bool]:
        """False if another process is writing the file. Raises OSError, CheckpointError."""
        new = self._path.with_suffix(UNFINISHED)
        with locked(new) as descriptor:
            if descriptor is None:
                log.info("packed weights are being written by another process")
                return False
            try:
                if _inode(self._path) not in (None, self._first_inode):
                    log.info("packed weights were written by another process")
                    new.unlink()
                    return True
                if self._content is not None:
                    facts[_MADE_FROM] = yield from self._content()
                    if not facts[_MADE_FROM]:
                        raise OSError("the checkpoint has changed since it was read")
                log.info("writing %d MiB of packed weights to %s", size >> 20, self._path)
                yield from write_tensors(descriptor, linears, tables, facts)
                os.replace(new, self._path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
        log.info("packed weights are written")
        return True

    def _open(self) -> PackedFile | None:
        if not self._path.is_file():
            self._folder.drop()
            return None
        try:
            found = self._folder.open(self._path.name, torch.get_num_threads() - 1)
            if found.facts.get(_MADE_FOR) != self._path.name:
                raise OSError("it was made for another model")
            with suppress(OSError):  # another start may have removed the file just now
                os.utime(found.descriptor)  # marks the file as used now: see _remove_old
        except (CheckpointError, OSError) as error:
            log.warning("packed weights %s cannot be read (%s); they are packed again", self._path, error)
            return None
        return found

    def _tensor(self, name: str) -> Tensor:
        """A view of the file's memory. Raises KeyError for an unknown name or dtype, ValueError for an impossible shape."""
        assert self._found is not None
        stored, memory, first = self._found.place(name)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=stored.end - stored.begin, offset=first)
        return flat.view(_DTYPES[stored.dtype]).reshape(stored.shape)

    def _refuse(self, error: Exception) -> None:
        log.warning("packed weights %s cannot be used (%s); they are packed again", self._path, error)
        self._damaged = self._found if self._num_found > 0 else None
        self._found = None

    def _remove_old(self) -> None:
        files = list(self._path.parent.glob("*" + SUFFIX))
        kept = {path.name for path in remove_oldest(files, max_files=MAX_MODELS, group_of=lambda path: path.name.partition("-")[0])}
        remove_unfinished(self._path.parent)
        for note in self._path.parent.glob("*" + NOTE_SUFFIX):
            with suppress(OSError):
                if note.read_text(encoding="ascii", errors="replace") not in kept:
                    note.unlink()


def write_tensors(descriptor: int, linears: Mapping[str, Tensor], tables: Mapping[str, Tensor], facts: Mapping[str, str]) -> Pieces:
    """Write a safetensors file straight from the tensors' memory: the safetensors library would copy all of them first.

    Linears' tensors of larger elements come first, so that each is aligned to its element size; tables come last. `facts` become the
    file's metadata. Each piece is synced, so that the rename that follows makes no file visible whose bytes a power loss could still take.

    Raises OSError; CheckpointError, before anything is written, for more tensors than `read_header` accepts.
    """
    tensors = dict(sorted(linears.items(), key=lambda item: (-item[1].element_size(), item[0]))) | dict(tables)
    entries: dict[str, object] = {"__metadata__": dict(facts)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_JSON_BYTES:
        raise CheckpointError("packed weights", f"a header of {len(header)} bytes is more than {MAX_JSON_BYTES}")
    decode_json("packed weights", header)
    num_unsynced = 0
    with os.fdopen(descriptor, "wb", closefd=False) as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for part in _parts(tensors.values()):
            stream.write(part)
            num_unsynced += len(part)
            if num_unsynced >= PIECE_BYTES:
                _sync(stream)
                num_unsynced = 0
                yield
        _sync(stream)


def _parts(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        whole = bytes_of(tensor.contiguous())
        for begin in range(0, len(whole), PIECE_BYTES):
            yield whole[begin : begin + PIECE_BYTES]


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


_MADE_FOR = "made for"
_MADE_FROM = "made from"
_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FACTS = ("kind", "out_features", "in_features", "group", "block")


def _facts(packed: PackedLinear) -> str:
    return json.dumps({**{key: getattr(packed, key) for key in _FACTS}, "tensors": list(packed.tensors)})
