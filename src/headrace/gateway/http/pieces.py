"""The size of the writes of a large body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

PIECE_BYTES = 64 << 10
"""Bytes handed to the transport in one write: it reports a full buffer only between two writes."""


def joined_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of about PIECE_BYTES: small pieces are joined, large ones stay."""
    found: list[bytes] = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(found)
            found, size = [], 0
    if found:
        yield b"".join(found)
