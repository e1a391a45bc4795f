"""Undoes the Content-Encoding of a body slice by slice, so that the output of a compression bomb is counted before it is made.

A body may have several codings, named in the order in which they were applied (RFC 9110, 8.4). The output of every decoder is bounded by
the cap of the whole body. The body of one coding may be several streams, one after the other, where its format allows that: members of gzip
(RFC 1952), frames of zstd (RFC 8878). Zeros behind the last member of gzip are padding, as in gunzip.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from headrace.core.errors import InvalidRequest
from headrace.gateway.http.errors import BodyTooLarge, UnsupportedEncoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SLICE_BYTES = 64 << 10
"""A tenth of a millisecond."""

INPUT_BYTES = 16 << 10
"""Taken at once: a stream that ends copies the rest of them."""

MAX_CODINGS = 3

MAX_STREAMS = 4096
"""Each costs ten microseconds, whatever it holds, and eight bytes are enough for one."""

MAX_WINDOW_LOG = 23
"""The 8 MiB that RFC 9659 has every decoder take."""


class Stream(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Coding:
    """begin: makes a decompressor, by the stream's first two bytes; None: no stream of this format begins with them"""

    begin: Callable[[bytes], Stream | None]
    has_several: bool = True
    has_padding: bool = False


def _begin_gzip(first: bytes) -> Stream | None:
    return zlib.decompressobj(31) if first == b"\x1f\x8b" else None


def _begin_deflate(first: bytes) -> Stream:
    """With zlib's header (RFC 9110) or without, as many clients send it. No encoder's raw stream begins like a zlib header."""
    is_framed = first[0] & 0x0F == 8 and int.from_bytes(first) % 31 == 0
    return zlib.decompressobj(15 if is_framed else -15)


def _begin_zstd(first: bytes) -> Stream | None:
    """Memory for the window grows with the output, not with the announced size."""
    is_frame = first == b"\x28\xb5" or (first[0] & 0xF0 == 0x50 and first[1:] == b"\x2a")
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}) if is_frame else None


CODINGS = {
    "gzip": Coding(_begin_gzip, has_padding=True),
    "x-gzip": Coding(_begin_gzip, has_padding=True),
    "deflate": Coding(_begin_deflate, has_several=False),
    "zstd": Coding(_begin_zstd),
}


class StreamDecoder:
    """Undoes one coding of a body, slice by slice."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name, self._coding, self._max_bytes = name, CODINGS[name], max_bytes
        self._stream: Stream | None = None
        self._first = b""  # less than a stream's first two bytes
        self._is_padding = False
        self._num_ended = self._num_bytes = 0

    def parts(self, chunk: bytes) -> Iterator[bytes]:
        for first in range(0, len(chunk) or 1, INPUT_BYTES):
            yield from self._slices(chunk[first : first + INPUT_BYTES])

    def _slices(self, chunk: bytes) -> Iterator[bytes]:
        is_full = True
        while is_full:
            part = b""
            if self._stream is None:
                chunk = self._begin(chunk)
            if self._stream is not None:
                part, chunk = self._decode(self._stream, chunk)
            self._num_bytes += len(part)
            if self._num_bytes > self._max_bytes:
                raise BodyTooLarge(self._num_bytes, self._max_bytes)
            # After a full slice the stream may hold more output, though its input is used up.
            is_full = bool(chunk) or (self._stream is not None and len(part) == SLICE_BYTES)
            yield part

    def end(self) -> None:
        if self._num_ended and self._first:
            raise self._followed()
        if self._stream is not None or not self._num_ended:
            raise InvalidRequest("body", f"a whole {self._name} stream", remedy="The body ends before the stream does.")

    def _begin(self, chunk: bytes) -> bytes:
        first = self._first + chunk
        if self._is_padding or (self._num_ended and self._coding.has_padding and first[:1] == b"\0"):
            self._is_padding = True
            if first.strip(b"\0"):
                raise self._followed()
            return b""
        if len(first) < 2:
            self._first = first
            return b""
        self._first = b""
        if self._num_ended and not self._coding.has_several:
            raise self._followed()
        if self._num_ended == MAX_STREAMS:
            raise InvalidRequest("body", f"at most {MAX_STREAMS} {self._name} streams", remedy="Compress it as one.")
        self._stream = self._coding.begin(first[:2])
        if self._stream is None:
            raise self._followed() if self._num_ended else self._damaged()
        return first

    def _decode(self, stream: Stream, chunk: bytes) -> tuple[bytes, bytes]:
        try:
            part = stream.decompress(chunk, SLICE_BYTES)
        except (zlib.error, zstd.ZstdError) as error:
            if "too much memory" in str(error):  # zstd's words, and nothing else tells
                window = f"zstd frames with a window of at most {1 << MAX_WINDOW_LOG >> 20} MiB (RFC 9659)"
                raise InvalidRequest("body", window, remedy="Compress it at level 19 or below, without --long.") from None
            raise self._damaged() from None
        if stream.eof:
            self._stream, self._num_ended = None, self._num_ended + 1
            return part, stream.unused_data
        return part, getattr(stream, "unconsumed_tail", b"")  # zlib gives back what it did not use; zstd keeps it

    def _damaged(self) -> InvalidRequest:
        return InvalidRequest("body", f"valid {self._name}", remedy="Its bytes are damaged.")

    def _followed(self) -> InvalidRequest:
        what = f"{self._name} streams alone" if self._coding.has_several else f"one {self._name} stream"
        return InvalidRequest("body", what, remedy="Other bytes follow its end.")


class BodyDecoder:
    def __init__(self, decoders: Sequence[StreamDecoder]) -> None:
        """In the order of decoding, which is the reverse of the header's."""
        self._decoders = decoders

    def parts(self, chunk: bytes) -> Iterator[bytes]:
        """A slice is decoded when the iterator reaches it. Raises InvalidRequest, and BodyTooLarge in place of a slice that exceeds the
        cap.
        """
        parts: Iterator[bytes] = iter((chunk,))
        for decoder in self._decoders:
            parts = chain.from_iterable(map(decoder.parts, parts))
        return parts

    def end(self) -> None:
        for decoder in self._decoders:
            decoder.end()


def decoder_of(values: Sequence[bytes], max_bytes: int) -> BodyDecoder:
    """values: of all Content-Encoding headers; max_bytes: decoded. Raises UnsupportedEncoding."""
    words = [word.strip(" \t") for word in b",".join(values).decode("latin-1").lower().split(",")]
    names = [word for word in words if word not in ("", "identity")]
    if unknown := next((name for name in names if name not in CODINGS), None):
        raise UnsupportedEncoding(unknown)
    if len(names) > MAX_CODINGS:
        raise UnsupportedEncoding(", ".join(names), f"has more than {MAX_CODINGS} codings")
    return BodyDecoder([StreamDecoder(name, max_bytes) for name in reversed(names)])
