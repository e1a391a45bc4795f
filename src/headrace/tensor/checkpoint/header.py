"""The header of a safetensors file, checked before anything else of the file is read.

Layout: 8 bytes little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), the data. Ranges must cover the data
exactly, without gap or overlap. A header that passes cannot send a reader outside the file.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

from headrace.core.errors import CheckpointError, shorten
from headrace.tensor.checkpoint.files import MAX_JSON_BYTES, decode_json

MAX_DIMS = 8
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
DAMAGED = "The file is damaged or not a safetensors file: download or convert it again."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """begin, end: byte offsets from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """
    data_start  byte offset of the data in the file
    metadata    the "__metadata__" entry, unchecked
    """

    tensors: dict[str, StoredTensor]
    data_start: int
    digest: bytes
    metadata: object


def read_header(path: Path) -> Header:
    try:
        text, file_bytes = _read_text(path)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read ({error.strerror})") from error
    entries = decode_json(str(path), text)
    metadata = entries.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry) for name, entry in entries.items()}
    data_start = 8 + len(text)
    _check_cover(path, tensors, file_bytes - data_start)
    return Header(tensors, data_start, blake2b(text, digest_size=16).digest(), metadata)


def _read_text(path: Path) -> tuple[bytes, int]:
    """The header's bytes and the file's length. Regular files only: opening a pipe would block, and a device reports no true length."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(str(path), "not a regular file")
    with path.open("rb") as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            _damaged(path, f"{file_bytes} bytes long, too short for a header")
        length = int.from_bytes(prefix, "little")
        if length > file_bytes - 8:
            _damaged(path, f"the header claims {length} bytes, the file has {file_bytes}")
        if length > MAX_JSON_BYTES:
            raise CheckpointError(str(path), f"header of {length} bytes, more than {MAX_JSON_BYTES}", "Save it in smaller shards.")
        text = stream.read(length)
    if len(text) != length:
        _damaged(path, "the file shrank while it was read")
    return text, file_bytes


def _damaged(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(str(path), reason, DAMAGED)


def _entry(path: Path, name: str, entry: object) -> StoredTensor:
    shown = shorten(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _damaged(path, f"tensor {shown}: an entry holds dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _damaged(path, f"tensor {shown}: unknown dtype {shorten(dtype)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS or 0 in shape:
        _damaged(path, f"tensor {shown}: shape {shorten(shape)} is not a list of at most {MAX_DIMS} positive sizes")
    if not _are_counts(offsets) or len(offsets) != 2:
        _damaged(path, f"tensor {shown}: data_offsets {shorten(offsets)} are not two byte positions")
    begin, end = offsets
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != size:
        _damaged(path, f"tensor {shown}: {size} bytes by dtype and shape, {end - begin} by data_offsets")
    return StoredTensor(dtype, tuple(shape), begin, end)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value)


def _check_cover(path: Path, tensors: dict[str, StoredTensor], data_bytes: int) -> None:
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin != position:
            kind = "overlaps the tensor before it" if tensor.begin < position else "leaves a hole before it"
            _damaged(path, f"tensor {shorten(name)} {kind}: data starts at {tensor.begin}, expected {position}")
        position = tensor.end
    if position != data_bytes:
        _damaged(path, f"the tensors need {position} bytes of data, the file has {data_bytes}")
