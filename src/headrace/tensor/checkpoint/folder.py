"""Reads tensors from a model folder in the Hugging Face layout, one tensor, or a slice, at a time.

The weights are a single `model.safetensors`, or shards that `model.safetensors.index.json` names. Every header is checked
(`tensor.checkpoint.header`) before a tensor is read. Files are read and not mapped: a file that becomes shorter raises an error with its
name. Pickle formats are refused, and no name found in a file may lead out of the folder.
"""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError, shorten
from headrace.machine.folders import inside
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.files import read_json
from headrace.tensor.checkpoint.formats.names import SEPARATE
from headrace.tensor.checkpoint.header import DAMAGED, Header, read_header
from headrace.tensor.checkpoint.values import Sample, num_not_finite
from headrace.tensor.host.pages import read_bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 4096
MAX_TENSORS = 2**17
MAX_HEADER_BYTES = 2**26
"""All files' headers together. MAX_TENSORS tensors need a third."""
PREFIX = "model."
"""Before the names of all tensors but the head's."""
READABLE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PART_DTYPES = {
    **READABLE_DTYPES,
    "I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
}  # fmt: skip
"""F8_E8M0 (powers of two) is read as bytes."""
INERT = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers that older exporters saved beside the weights. Their values follow from config.json, so they are never read."""
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SAMPLE_BYTES = 4096


class Checkpoint:
    """Notes which tensors were read, for `check_all_read`."""

    has_values = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._headers: dict[str, Header] = {}
        self._file_of: dict[str, str] = {}
        self._read: set[str] = set()
        self._header_bytes = 0
        listed = _list_shards(folder)
        for file in sorted(set(listed.values())) if listed else [SINGLE]:
            self._add_shard(file)
        self._check_index(listed)
        self._add_prefix()

    def has(self, name: str) -> bool:
        return name in self._file_of

    def stored_dtype(self, name: str) -> str:
        return self._headers[self._file(name)].tensors[name].dtype

    def read(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or a region of it, in the stored dtype, as a new tensor.

        Raises CheckpointError when the tensor is missing or has another shape or dtype, when the file cannot be read, and when a value that
        was read is NaN or infinite.
        """
        self.expect(name, shape)
        return self._values(name, shape, region)

    def read_part(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Tensor:
        """A whole tensor that is part of a quantized weight, as a new tensor. dtypes: accepted, in safetensors' names. Raises as `read`."""
        self.expect(name, shape, dtypes)
        return self._values(name, shape, ())

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return self._headers[self._file(name)].tensors[name].shape

    def _values(self, name: str, shape: tuple[int, ...], region: tuple[slice, ...]) -> Tensor:
        file = self._file(name)
        header = self._headers[file]
        stored = header.tensors[name]
        dtype = PART_DTYPES[stored.dtype]
        first, part, rest = _gapless(shape, region)
        start = header.data_start + stored.begin + first * dtype.itemsize
        try:
            data = read_bytes(self.folder / file, start, prod(part) * dtype.itemsize)
        except OSError as error:
            raise CheckpointError(str(self.folder / file), f"tensor {name} cannot be read ({error})") from error
        values = data.view(dtype)
        if stored.dtype in READABLE_DTYPES and (number := num_not_finite(values)) > 0:
            self._refuse(file, f"tensor {name} holds {number} values that are NaN or infinite", DAMAGED)
        return values.reshape(part)[rest]

    def expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = tuple(READABLE_DTYPES)) -> None:
        """Check a tensor without reading its values. `check_all_read` counts the tensor as read.

        Raises CheckpointError when the tensor is missing, has another shape, or has a dtype that is not accepted.
        """
        file = self._file(name)
        stored = self._headers[file].tensors[name]
        if stored.shape != shape:
            self._refuse(file, f"tensor {name} has shape {list(stored.shape)}, config.json makes it {list(shape)}")
        if stored.dtype not in dtypes:
            self._refuse(file, f"tensor {name} has dtype {stored.dtype}", f"Readable are {', '.join(dtypes)}.")
        self._read.add(name)

    @property
    def tensor_bytes(self) -> dict[str, int]:
        return {name: tensor.end - tensor.begin for header in self._headers.values() for name, tensor in header.tensors.items()}

    @property
    def files(self) -> list[Path]:
        return [self.folder / file for file in self._headers]

    def check_all_read(self) -> None:
        """Raises CheckpointError when the folder holds a tensor that was not read and is not INERT."""
        unread = [name for name in self._file_of if name not in self._read and not INERT.search(name)]
        extra = [name for name in unread if not self._is_zero_bias(name)]
        if extra:
            shown = ", ".join(shorten(name) for name in sorted(extra)[:3])
            self._refuse(self._file_of[extra[0]], f"{len(extra)} tensors this architecture does not have, e.g. {shown}")

    def _is_zero_bias(self, name: str) -> bool:
        """A bias that changes nothing: older exporters of GPTQ give every linear one."""
        stored = self._headers[self._file(name)].tensors[name]
        return name.endswith(".bias") and stored.dtype in READABLE_DTYPES and not bool(self._values(name, stored.shape, ()).any())

    @property
    def config_files(self) -> list[Path]:
        return [self.folder / "config.json", *(path for name in SEPARATE if (path := self.folder / name).is_file())]

    def digest(self) -> str:
        """Hex digest of config.json, of the files of SEPARATE, of every header, and of both ends (4 KiB) of every tensor's bytes.

        A sample, since reading gigabytes twice would double the time of a start. No protection against forgery.

        Raises CheckpointError when the sampled values cannot be of the dtype in the header (`checkpoint.values`).
        """
        sample = Sample()
        state = blake2b(digest_size=16, person=b"headrace-model")
        for path in self.config_files:
            state.update(path.read_bytes())
        for file, header in sorted(self._headers.items()):
            state.update(header.digest)
            with (self.folder / file).open("rb") as stream:
                for tensor in sorted(header.tensors.values(), key=lambda t: t.begin):
                    for position in {tensor.begin, max(tensor.begin, tensor.end - _SAMPLE_BYTES)}:
                        stream.seek(header.data_start + position)
                        data = stream.read(min(_SAMPLE_BYTES, tensor.end - position))
                        state.update(data)
                        if len(tensor.shape) > 1:
                            sample.add(tensor.dtype, data)
        if (reason := sample.contradiction()) is not None:
            raise CheckpointError(str(self.folder), reason, DAMAGED)
        return state.hexdigest()

    def _add_shard(self, file: str) -> None:
        header = read_header(inside(self.folder, file))
        self._headers[file] = header
        self._header_bytes += header.data_start
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(file, f"the headers of all files together have more than {MAX_HEADER_BYTES} bytes")
        if len(self._file_of) + len(header.tensors) > MAX_TENSORS:
            self._refuse(file, f"more than {MAX_TENSORS} tensors in one checkpoint")
        for name in header.tensors:
            if name in self._file_of:
                self._refuse(file, f"tensor {shorten(name)} is also in {self._file_of[name]}")
            self._file_of[name] = file

    def _check_index(self, listed: dict[str, str]) -> None:
        for name, file in listed.items():
            if self._file_of.get(name) != file:
                self._refuse(file, f"tensor {shorten(name)} is missing though {INDEX} names it")
        if listed:
            for name, file in self._file_of.items():
                if name not in listed:
                    self._refuse(file, f"tensor {shorten(name)} is not named by {INDEX}")

    def _add_prefix(self) -> None:
        """A model that was saved without its head lacks the PREFIX."""
        if any(name.startswith(PREFIX) for name in self._file_of) or not any(name.startswith("layers.") for name in self._file_of):
            return

        def renamed(name: str) -> str:
            return name if name.startswith("lm_head.") else PREFIX + name

        self._file_of = {renamed(name): file for name, file in self._file_of.items()}
        for file, header in self._headers.items():
            self._headers[file] = replace(header, tensors={renamed(name): tensor for name, tensor in header.tensors.items()})

    def _file(self, name: str) -> str:
        if name not in self._file_of:
            others = ", ".join(shorten(other) for other in sorted(self._file_of)[:3])
            raise CheckpointError(str(self.folder), f"tensor {name} is missing", f"There are {len(self._file_of)} others, e.g. {others}.")
        return self._file_of[name]

    def refuse(self, name: str, reason: str, remedy: str = "") -> NoReturn:
        raise CheckpointError(str(self.folder / self._file_of.get(name, "")), reason, remedy)

    def _refuse(self, file: str, reason: str, remedy: str = "") -> NoReturn:
        raise CheckpointError(str(self.folder / file), reason, remedy)


def _gapless(shape: tuple[int, ...], region: tuple[slice, ...]) -> tuple[int, list[int], tuple[slice, ...]]:
    """The smallest part of a tensor that is contiguous in the file and holds the region: (first element, shape, the region within it)."""
    first, part, rest = 0, list(shape), list(region)
    for dim, taken in enumerate(region):
        start, stop, _ = taken.indices(shape[dim])
        first += start * prod(shape[dim + 1 :])
        part[dim] = stop - start
        rest[dim] = slice(None)
        if part[dim] != 1:
            break
    return first, part, tuple(rest)


def _list_shards(folder: Path) -> dict[str, str]:
    if (folder / SINGLE).exists():
        return {}
    path = folder / INDEX
    if not path.exists():
        pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
        if pickles:
            raise CheckpointError(
                str(folder / pickles[0]), "a pickle format, which can run code when loaded", "Convert the weights to safetensors."
            )
        others = sorted(f.name for f in folder.iterdir() if f.suffix == ".safetensors")
        held = f", but {shorten(others[0])}, which is of another layout" if others else ""
        raise CheckpointError(str(folder), f"neither {SINGLE} nor {INDEX}{held}", f"Save the model as safetensors, shards with {INDEX}.")
    listed = ConfigFile(str(path), read_json(folder, INDEX)).section("weight_map").values
    if not listed:
        raise CheckpointError(str(path), "weight_map names no tensor")
    files: dict[str, str] = {}
    for name, file in listed.items():
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise CheckpointError(str(path), f"{shorten(file)} is not the name of a safetensors file in this folder")
        files[name] = file
    if len(set(files.values())) > MAX_SHARDS:
        raise CheckpointError(str(path), f"more than {MAX_SHARDS} shards")
    return files
