"""Values of flat columns as bytes: what the codecs of plans and results share. Never pickle.

    data = header length (u32) | header (JSON, utf-8) | columns, back to back, 4 bytes per entry, little endian

The header holds the columns' lengths under "columns"; the reader knows their types. Every length is checked against the data before
anything is read.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

INT, FLOAT = "i", "f"
"""Type codes of the columns: 32-bit integer, 32-bit float."""
_U32 = struct.Struct("<I")
ENTRY_BYTES = 4


def pack(header: Mapping[str, Any], columns: list[array[Any]]) -> bytes:
    """header: JSON values; "columns" is added."""
    text = json.dumps({**header, "columns": [len(column) for column in columns]}, separators=(",", ":")).encode()
    return _U32.pack(len(text)) + text + b"".join(_to_bytes(column) for column in columns)


class Unpacked:
    """What `pack` wrote, column by column. Raises ValueError, KeyError, TypeError or struct.error for anything else."""

    def __init__(self, data: memoryview) -> None:
        (length,) = _U32.unpack_from(data, 0)
        self.header: dict[str, Any] = json.loads(bytes(data[_U32.size : _U32.size + length]))
        lengths = self.header["columns"]
        if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
            raise ValueError("column lengths are no counts")
        if _U32.size + length + ENTRY_BYTES * sum(lengths) != len(data):
            raise ValueError("columns do not fill the data")
        self.num_columns = len(lengths)
        self._lengths: Iterator[int] = iter(lengths)
        self._data, self._position = data, _U32.size + length

    def take(self, typecode: str) -> array[Any]:
        """The next column. The caller compared `num_columns` with what it expects."""
        begin = self._position
        self._position += ENTRY_BYTES * next(self._lengths)
        column: array[Any] = array(typecode)
        column.frombytes(bytes(self._data[begin : self._position]))
        if sys.byteorder == "big":
            column.byteswap()
        return column


def _to_bytes(column: array[Any]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()
