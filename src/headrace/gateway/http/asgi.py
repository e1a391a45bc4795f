"""Defines the types of ASGI, and the keys under which `http.connection` gives an application more, in `scope["extensions"]`.

`joined_pieces` joins the pieces of a large body into writes of a fit size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

ABORT_EXTENSION = "headrace.abort"
"""Key in scope["extensions"]: a function that drops the connection at once, unsent bytes included (`connection` provides it)."""

LOST_EXTENSION = "headrace.lost"
"""Key in scope["extensions"]: a function that says why the connection is gone, a ClientLeft or SlowReader; None while it stands."""

CONNECTION_EXTENSION = "headrace.connection"
"""Key in scope["extensions"]: a `client_transport.ClientTransport`, where the server provides one."""


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
