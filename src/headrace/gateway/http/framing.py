"""Defines the framing of an API: where clients put the key, how errors and pings look, and what ends a stream.

Most paths have OpenAI's framing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.gateway.http.asgi import Headers
from headrace.gateway.http.errors import ErrorBody, ErrorReply


def _openai_event(error: ErrorReply) -> bytes:
    return b"data: " + error.body + b"\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """How one API writes keys, errors and the ends of streams.

    key_header   lower-case name of the header with the key
    key_scheme   word before the key in that header; empty: none
    error_type   wire type of an error
    error_body   makes the body of an error answer
    error_event  makes the last event of a stream that an error ends
    ping         bytes that keep a quiet stream alive
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
        """Headers of an error answer: with status 401, the scheme of the key in WWW-Authenticate."""
        return [*error.headers, (b"www-authenticate", self.key_scheme)] if error.status == 401 and self.key_scheme else error.headers

    @property
    def security_scheme(self) -> dict[str, str]:
        """OpenAPI's description of where the key is."""
        if self.key_scheme:
            return {"type": "http", "scheme": self.key_scheme.decode().lower()}
        return {"type": "apiKey", "in": "header", "name": self.key_header.decode()}


OPENAI = Framing()
