"""The Content-Encoding of a body, undone piece by piece: what comes out of a bomb is counted slice by slice, never made as a whole."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from headrace.core.errors import InvalidRequest
from headrace.gateway.http.errors import UnsupportedEncoding

SLICE_BYTES = 64 << 10
"""Inflated at once: a tenth of a millisecond of the event loop."""

_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""zlib's number for each: 16 more is gzip's frame. deflate is zlib's frame (RFC 9110), never bare."""


class BodyDecoder(Protocol):
    """One body's bytes, put in as they come."""

    def parts(self, chunk: bytes) -> Iterator[bytes]:
        """What a chunk stands for, in slices that are made when they are asked for. Raises InvalidRequest for damaged bytes."""
        ...

    def end(self) -> None:
        """The body is over. Raises InvalidRequest when it is not whole."""
        ...


class Identity:
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
        while chunk or is_full:  # a full slice: the stream may hold more that its input does not show
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
