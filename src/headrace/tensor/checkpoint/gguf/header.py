"""The header of a GGUF file, versions 2 and 3, little-endian, checked before anything else of the file is read.

Layout: magic, version, number of tensors, number of keys, the keys with typed values, the tensors (name, dims, type, offset), padding, the
data. Every count is compared with what the file can still hold before memory is taken for it. A header that passes cannot send a reader
outside the file, nor let tensors share bytes. Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import os
import stat
import struct
from ctypes import c_float
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from headrace.core.errors import CheckpointError, shorten
from headrace.tensor.checkpoint.config import ConfigFile

MAGIC = b"GGUF"


VERSIONS = (2, 3)


MAX_HEADER_BYTES = 2**28
"""All shards of a model together."""


MAX_TENSORS = 2**17


MAX_KEYS = 2**16


MAX_ELEMENTS = 2**22
"""All arrays of a model's headers together. The largest vocabularies, merges and scores included, have a quarter."""


MAX_STRING_BYTES = 2**24


MAX_NAME_BYTES = 2**10


MAX_DIMS = 4


LEAST_ALIGNMENT, DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 8, 32, 2**16


DAMAGED = "The file is damaged or not a GGUF file: download or convert it again."


REQUANTIZE = "Take a file of another type, e.g. Q4_K_M or Q8_0, or make one with llama-quantize."


_UINT8, _BOOL, _STRING, _ARRAY = 0, 7, 8, 9


_FORMATS = {_UINT8: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


_LEAST_KEY_BYTES = 8 + 1 + 4 + 1


class BlockKind(NamedTuple):
    """`block` values, consecutive in a row, are in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


READABLE = {
    0: BlockKind("F32", 1, 4),
    1: BlockKind("F16", 1, 2),
    2: BlockKind("Q4_0", 32, 18),
    3: BlockKind("Q4_1", 32, 20),
    6: BlockKind("Q5_0", 32, 22),
    7: BlockKind("Q5_1", 32, 24),
    8: BlockKind("Q8_0", 32, 34),
    10: BlockKind("Q2_K", 256, 84),
    11: BlockKind("Q3_K", 256, 110),
    12: BlockKind("Q4_K", 256, 144),
    13: BlockKind("Q5_K", 256, 176),
    14: BlockKind("Q6_K", 256, 210),
    30: BlockKind("BF16", 1, 2),
}
KINDS = {kind.name: kind for kind in READABLE.values()}
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S", 32: "BF16",
}  # fmt: skip
"""Value of the key general.file_type -> the mixture of types, as llama.cpp calls it."""


_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: outermost dimension first, unlike in the file; begin, end: bytes of the file."""

    kind: BlockKind
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """
    keys    numbers, strings, flags, lists of these
    digest  of the header's bytes
    """

    path: Path
    keys: ConfigFile
    tensors: dict[str, GgufTensor]
    digest: bytes


@dataclass(slots=True)
class HeaderLimits:
    """What the headers of one model may still hold."""

    num_bytes: int = MAX_HEADER_BYTES
    num_elements: int = MAX_ELEMENTS
    num_tensors: int = MAX_TENSORS
    num_keys: int = MAX_KEYS


def read_gguf_header(path: Path, limits: HeaderLimits | None = None) -> GgufHeader:
    """limits: what is left by the shards before. Raises CheckpointError naming the file and, where there is one, the key or the tensor."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(str(path), "not a regular file")
        with path.open("rb") as stream:
            return _Reader(path, stream, limits or HeaderLimits()).header()
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read ({error.strerror})") from error


class _Reader:
    def __init__(self, path: Path, stream: BinaryIO, limits: HeaderLimits) -> None:
        self._path, self._stream, self._limits = path, stream, limits
        self._file_bytes = os.fstat(stream.fileno()).st_size
        self._left = min(self._file_bytes, limits.num_bytes)
        self._position = 0
        self._digest = blake2b(digest_size=16, person=b"headrace-gguf")
        self._where = "the header"

    def header(self) -> GgufHeader:
        if self._file_bytes < 24 or self._take(4) != MAGIC:
            self._damaged(f"does not begin with {MAGIC.decode()}")
        version = self._number("I")
        if version not in VERSIONS:
            is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            reason = "is big-endian" if is_big else f"GGUF version {version}"
            raise CheckpointError(str(self._path), reason, "Supported are versions 2 and 3, little-endian: convert it again.")
        num_tensors = self._count("Q", "tensors", self._limits.num_tensors, _LEAST_TENSOR_BYTES)
        num_keys = self._count("Q", "keys", self._limits.num_keys, _LEAST_KEY_BYTES)
        self._limits.num_tensors -= num_tensors
        self._limits.num_keys -= num_keys
        keys = ConfigFile(str(self._path), self._keys(num_keys))
        entries = self._entries(num_tensors)
        alignment = keys.integer("general.alignment", LEAST_ALIGNMENT, MAX_ALIGNMENT, default=DEFAULT_ALIGNMENT)
        if alignment & (alignment - 1):
            keys.refuse("general.alignment", "must be a power of two", DAMAGED)
        start = -(-self._position // alignment) * alignment
        tensors = {name: self._placed(name, entry, start, alignment) for name, entry in entries.items()}
        self._check_apart(tensors)
        return GgufHeader(self._path, keys, tensors, self._digest.digest())

    def _keys(self, count: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for _ in range(count):
            self._where = "the header"
            name = self._string(MAX_NAME_BYTES)
            self._where = f"key {shorten(name)}"
            if name in values:
                self._damaged("stands in the header twice")
            values[name] = self._value(self._number("I"))
        return values

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array()
        if kind not in _FORMATS:
            self._damaged(f"has a value of type {kind}, which GGUF does not have")
        return _shortest(self._number("f")) if _FORMATS[kind] == "f" else self._number(_FORMATS[kind])

    def _array(self) -> list[object]:
        kind = self._number("I")
        if kind != _STRING and kind not in _FORMATS:
            self._damaged("is an array of arrays" if kind == _ARRAY else f"is an array of type {kind}, which GGUF does not have")
        letter = _FORMATS.get(kind, "")
        size = struct.calcsize(f"<{letter}") if letter else 8
        count = self._count("Q", "elements", self._limits.num_elements, size)
        self._limits.num_elements -= count
        if kind == _STRING:
            return [self._string(MAX_STRING_BYTES) for _ in range(count)]
        return list(struct.unpack(f"<{count}{letter}", self._take(size * count)))

    def _entries(self, count: int) -> dict[str, tuple[BlockKind, list[int], int]]:
        entries: dict[str, tuple[BlockKind, list[int], int]] = {}
        for _ in range(count):
            self._where = "the list of tensors"
            name = self._string(MAX_NAME_BYTES)
            self._where = f"tensor {shorten(name)}"
            if name in entries:
                self._damaged("stands in the header twice")
            num_dims = self._number("I")
            if not 1 <= num_dims <= MAX_DIMS:
                self._damaged(f"has {num_dims} dimensions, not 1 to {MAX_DIMS}")
            dims = [self._number("Q") for _ in range(num_dims)]
            kind = self._kind(self._number("I"))
            entries[name] = kind, dims, self._number("Q")
        return entries

    def _kind(self, number: int) -> BlockKind:
        if number not in READABLE:
            known = OTHERS.get(number, f"number {number}")
            raise CheckpointError(str(self._path), f"{self._where} has type {known}, which is not supported", REQUANTIZE)
        return READABLE[number]

    def _placed(self, name: str, entry: tuple[BlockKind, list[int], int], start: int, alignment: int) -> GgufTensor:
        kind, dims, offset = entry
        self._where = f"tensor {shorten(name)}"
        if 0 in dims or dims[0] % kind.block:
            self._damaged(f"has dims {dims}, not rows of whole blocks of {kind.block} values ({kind.name})")
        begin, end = start + offset, start + offset + prod(dims) // kind.block * kind.num_bytes
        if offset % alignment:
            self._damaged(f"begins at {offset}, no multiple of the alignment {alignment}")
        if end > self._file_bytes:
            self._damaged(f"ends at byte {end}, the file has {self._file_bytes}")
        return GgufTensor(kind, tuple(reversed(dims)), begin, end)

    def _check_apart(self, tensors: dict[str, GgufTensor]) -> None:
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                self._where = f"tensor {shorten(name)}"
                self._damaged(f"overlaps the tensor before it: begins at {tensor.begin}, which ends at {end}")
            end = tensor.end

    def _count(self, letter: str, what: str, limit: int, least_bytes: int) -> int:
        """A number of things, each of at least `least_bytes`, checked before any is read."""
        count = self._number(letter)
        if count > limit:
            self._damaged(f"claims {count} {what}, and {limit} are allowed")
        if count * least_bytes > self._left:
            self._damaged(f"claims {count} {what}, and {self._left} bytes are left")
        return count

    def _string(self, limit: int) -> str:
        length = self._count("Q", "bytes of text", limit, 1)
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            self._damaged("holds text that is not UTF-8")

    def _number(self, letter: str) -> int:
        (value,) = struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))
        return value  # type: ignore[no-any-return]

    def _take(self, count: int) -> bytes:
        if count > self._left:
            is_cut = self._position + self._left < self._file_bytes
            self._damaged(f"reaches beyond {f'the {MAX_HEADER_BYTES} bytes that headers may have' if is_cut else 'the end of the file'}")
        data = self._stream.read(count)
        if len(data) != count:
            self._damaged("ends early: the file shrank while it was read")
        self._left -= count
        self._limits.num_bytes -= count
        self._position += count
        self._digest.update(data)
        return data

    def _damaged(self, reason: str) -> NoReturn:
        raise CheckpointError(str(self._path), f"{self._where} {reason}", DAMAGED)


def _shortest(value: float) -> float:
    """A float32 as the decimal that was meant: 1e-05, not 9.999999747378752e-06."""
    return next((short for digits in range(6, 9) if c_float(short := float(f"{value:.{digits}g}")).value == value), value)
