"""Defines the types of ASGI, the extension of `http.connection`, and how an API frames keys, errors and streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.http.errors import ErrorBody, ErrorReply

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

CONNECTION_EXTENSION = "headrace.connection"
"""A `client_transport.ClientTransport`."""


PIECE_BYTES = 64 << 10
"""The transport reports a full buffer only between two writes."""


def joined_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    joined: list[bytes] = []
    size = 0
    for piece in pieces:
        joined.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(joined)
            joined, size = [], 0
    if joined:
        yield b"".join(joined)


def _openai_event(error: ErrorReply) -> bytes:
    return b"data: " + error.body + b"\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """How one API writes keys, errors and the ends of streams; most paths have OpenAI's way.

    key_scheme   word before the key; empty: none
    error_event  last event of a broken stream
    end          last bytes of a whole stream; a broken stream does not have them
    """

    key_header: bytes = b"authorization"
    key_scheme: bytes = b"Bearer"
    error_type: type = ErrorBody
    error_body: Callable[[ErrorReply], bytes] = lambda error: error.body
    error_event: Callable[[ErrorReply], bytes] = _openai_event
    ping: bytes = b": ping\n\n"
    end: bytes = b"data: [DONE]\n\n"

    def error_headers(self, error: ErrorReply) -> Headers:
        return [*error.headers, (b"www-authenticate", self.key_scheme)] if error.status == 401 and self.key_scheme else error.headers

    @property
    def security_scheme(self) -> dict[str, str]:
        if self.key_scheme:
            return {"type": "http", "scheme": self.key_scheme.decode().lower()}
        return {"type": "apiKey", "in": "header", "name": self.key_header.decode()}


OPENAI = Framing()
