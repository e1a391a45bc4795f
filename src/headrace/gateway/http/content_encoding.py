"""Undoes the Content-Encoding of a body slice by slice, so that the output of a compression bomb is counted before it is made."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from headrace.core.errors import InvalidRequest
from headrace.gateway.http.errors import UnsupportedEncoding

SLICE_BYTES = 64 << 10
"""Bytes inflated in one call: a tenth of a millisecond of the event loop's time."""

_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""Encoding -> zlib's window bits, where 16 added means gzip's frame. deflate is zlib's frame (RFC 9110), never bare."""


class BodyDecoder(Protocol):
    """Decodes the bytes of one body, chunk by chunk."""

    def parts(self, chunk: bytes) -> Iterator[bytes]:
        """The decoded bytes of a chunk, in slices that are made when they are asked for. Raises InvalidRequest for damaged bytes."""
        ...

    def end(self) -> None:
        """Called after the last chunk. Raises InvalidRequest when the body is not complete."""
        ...


class Identity:
    """A body without Content-Encoding."""

    def parts(self, chunk: bytes) -> Iterator[bytes]:
        yield chunk

    def end(self) -> None:
        return


class Inflater:
    """One stream of zlib's or gzip's frame; nothing may follow its end."""

    def __init__(self, name: str, window_bits: int) -> None:
        self._name = name
        self._stream = zlib.decompressobj(window_bits)

    def parts(self, chunk: bytes) -> Iterator[bytes]:
        is_full = True
        while chunk or is_full:  # after a full slice the stream may hold more output, though its input is used up
            try:
                part = self._stream.decompress(chunk, SLICE_BYTES)
            except zlib.error:
                raise InvalidRequest("body", f"valid {self._name}", remedy="Its bytes are damaged.") from None
            if self._stream.unused_data:
                raise InvalidRequest("body", f"one {self._name} stream", remedy="Other bytes follow its end.")
            chunk, is_full = self._stream.unconsumed_tail, len(part) == SLICE_BYTES
            if part:
                yield part

    def end(self) -> None:
        if not self._stream.eof:
            raise InvalidRequest("body", f"a whole {self._name} stream", remedy="The body ends before the stream does.")


def decoder_of(values: Sequence[bytes]) -> BodyDecoder:
    """values: of every Content-Encoding header. Raises UnsupportedEncoding for any but one known encoding."""
    name = b",".join(values).strip().lower()
    if name in (b"", b"identity"):
        return Identity()
    window_bits = _WINDOW_BITS.get(name)
    if window_bits is None:
        raise UnsupportedEncoding
    return Inflater(name.decode(), window_bits)
