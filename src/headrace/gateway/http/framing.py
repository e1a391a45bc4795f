"""The framing of an API: where clients put the key, how errors and pings look, and what ends a stream.

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
    """
    key_header   lower-case name of the header with the key; key_scheme  what stands before the key in it
    error_type   wire type of an error
    error_body   of an error as a whole answer
    error_event  of an error in a stream that has begun, which it ends
    ping         keeps a quiet stream alive
    end          what a whole stream ends with, and one that broke off does not
    """

    key_header: bytes = b"authorization"
    key_scheme: bytes = b"Bearer"
    error_type: type = ErrorBody
    error_body: Callable[[ErrorReply], bytes] = lambda error: error.body
    error_event: Callable[[ErrorReply], bytes] = _openai_event
    ping: bytes = b": ping\n\n"
    end: bytes = b"data: [DONE]\n\n"

    def error_headers(self, error: ErrorReply) -> Headers:
        """A refused key names the scheme of HTTP that is asked for, where the API has one."""
        return [*error.headers, (b"www-authenticate", self.key_scheme)] if error.status == 401 and self.key_scheme else error.headers

    @property
    def security_scheme(self) -> dict[str, str]:
        """Where the key stands, as OpenAPI says it."""
        if self.key_scheme:
            return {"type": "http", "scheme": self.key_scheme.decode().lower()}
        return {"type": "apiKey", "in": "header", "name": self.key_header.decode()}


OPENAI = Framing()
