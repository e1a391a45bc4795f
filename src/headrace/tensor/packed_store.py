"""Packed weights kept on disk: a start reads them instead of rounding and packing the checkpoint's again.

One safetensors file per (checkpoint, precision, layout), written whole or not at all. Its name comes from the checkpoint's digest and from
every weight file's size and time of change, so a changed checkpoint is packed anew; so is one whose file here is damaged. The file holds
numbers only: nothing of it can run. What is not used for long makes room.

A file is read whole, by several threads, into memory that the linears then lie in: no page of it is mapped twice, none copied again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint_header import StoredTensor, read_header
from headrace.tensor.kernels import Kernels, Linear, PackedLinear
from headrace.tensor.kernels.compile_cache import cache_root, open_private
from headrace.tensor.kernels.pages import read_bytes

log = logging.getLogger(__name__)

VERSION = 1
MAX_FILES = 4
"""Models kept at a time; the one read longest ago goes first."""
MAX_DISK_SHARE = 0.5
"""Of the free space that a new file may take."""
SUFFIX = ".safetensors"


def store_name(digest: str, files: Iterable[Path], *, precision: str, layout: str) -> str:
    """The file's name. files: those the weights come from."""
    state = blake2b(json.dumps([VERSION, digest, precision, layout]).encode(), digest_size=16, person=b"headrace-packed")
    for path in sorted(files):
        info = path.stat()
        state.update(f"{path.name} {info.st_size} {info.st_mtime_ns}\0".encode())
    return state.hexdigest() + SUFFIX


def packed_directory() -> Path | None:
    """This user's folder for packed weights, closed to others; None, with a log line, where there cannot be one."""
    try:
        return open_private(cache_root(os.environ), ("packed",))
    except OSError as error:
        log.warning("packed weights are not kept: %s", error)
        return None


class _PackedFile:
    """A file read into memory. Raises CheckpointError for a damaged one, OSError for one that cannot be read.

    facts  its metadata: text by name
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.facts: dict[str, str] = header.metadata if isinstance(header.metadata, dict) else {}
        self._tensors = header.tensors
        size = max((tensor.end for tensor in header.tensors.values()), default=0)
        self._memory = read_bytes(path, header.data_start, size)

    def tensor(self, name: str) -> Tensor:
        """A view of the memory, which lives as long as it. Raises KeyError for a name or a dtype that is not there."""
        stored: StoredTensor = self._tensors[name]
        return self._memory[stored.begin : stored.end].view(_DTYPES[stored.dtype]).reshape(stored.shape)


class PackedStore:
    """The packed linears of one model by name: found in `path`, or kept until `save` writes them there."""

    def __init__(self, path: Path, kernels: Kernels) -> None:
        self._path = path
        self._kernels = kernels
        self._made: dict[str, PackedLinear] = {}
        self._num_found, self._is_damaged = 0, False
        self._found = self._open()

    @property
    def is_complete(self) -> bool:
        """Nothing had to be made."""
        return self._found is not None and not self._made

    def find(self, name: str) -> Linear | None:
        """A linear kept by an earlier start; the file's memory lives as long as any of them. Raises nothing: one that cannot be read is
        made again, and so is the whole file at the next start."""
        if self._found is None:
            return None
        try:
            facts = json.loads(self._found.facts[name])
            tensors = {part: self._found.tensor(f"{name}/{part}") for part in facts["tensors"]}
            linear = self._kernels.load_packed(PackedLinear(tensors=tensors, **{key: facts[key] for key in _FACTS}))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            log.warning("packed weights %s cannot be used (%s); they are made again", self._path, error)
            self._found, self._is_damaged = None, self._num_found > 0
            return None
        self._num_found += 1
        return linear

    def keep(self, name: str, linear: Linear) -> None:
        if (packed := self._kernels.packed(linear)) is not None:
            self._made[name] = packed

    def save(self) -> None:
        """Write what was made, unless it was all found or the disk has no room. Logs why it was not written; never raises for it.

        A file of which one part could be used and another not is removed: what was found in it is not at hand to be written again.
        """
        if self._is_damaged:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            return
        if not self._made or self._found is not None:
            return
        tensors = {f"{name}/{part}": tensor for name, packed in self._made.items() for part, tensor in packed.tensors.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        facts = {name: _facts(packed) for name, packed in self._made.items()} | {_MADE_FOR: self._path.name}
        try:
            if size > MAX_DISK_SHARE * shutil.disk_usage(self._path.parent).free:
                raise OSError(f"{size >> 20} MiB is more than half of the free space")
            descriptor, new = tempfile.mkstemp(dir=self._path.parent, suffix=".new")
            os.close(descriptor)
            try:
                save_file(tensors, new, metadata=facts)
                os.replace(new, self._path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(new)
            self._make_room()
        except (OSError, SafetensorError) as error:
            log.warning("packed weights are not kept (%s); they are made again at the next start", error)

    def _open(self) -> _PackedFile | None:
        if not self._path.is_file():
            return None
        try:
            found = _PackedFile(self._path)
            if found.facts.get(_MADE_FOR) != self._path.name:
                raise OSError("it was made for another model")
            os.utime(self._path)  # read now: see _make_room
        except (CheckpointError, OSError) as error:
            log.warning("packed weights %s cannot be read (%s); they are made again", self._path, error)
            return None
        return found

    def _make_room(self) -> None:
        files = sorted(self._path.parent.glob("*" + SUFFIX), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[MAX_FILES:]:
            path.unlink(missing_ok=True)


_MADE_FOR = "made for"
_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "BF16": torch.bfloat16, "F32": torch.float32}
_FACTS = ("kind", "out_features", "in_features", "group")


def _facts(packed: PackedLinear) -> str:
    return json.dumps({**{key: getattr(packed, key) for key in _FACTS}, "tensors": list(packed.tensors)})
