"""Says what the failure of an attempt at a foreign server means for the request: its result, and the error that the client gets.

What the failure means for the server (its circuit, its pause, the log) is in `server`; what an error says, in `errors`.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum

import aiohttp

from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded, Unavailable
from headrace.gateway.http.errors import ContentRefused, foreign_overflow
from headrace.gateway.upstream.foreign.errors import CLIENT_FAULTS, MAX_ERROR_BYTES, BrokenStream, ErrorKind, SentError
from headrace.gateway.upstream.foreign.events import decoder_for, unpacked
from headrace.gateway.upstream.foreign.field_errors import LIMITS, Refusal
from headrace.gateway.upstream.foreign.request import SALT

NOT_NOW = "The server behind this model does not answer now; the request can be sent again."
BROKE = "The server behind this model broke off its answer; the request can be sent again."
BUSY = "The server behind this model has too much to do."

ERROR_BODY_S = 5.0
"""Seconds a server may take for an error's body after its status."""


class AttemptResult(StrEnum):
    """How one attempt ended. The values are the label `result` of headrace_upstream_attempts_total."""

    OK = "ok"
    INVALID = "invalid"
    """The server refused the request for what it asks: 400, 413, 422."""
    OVERFLOW = "overflow"
    """As INVALID: the prompt is too long for this server's context."""
    RATE_LIMITED = "rate_limited"
    """The account's rate limit, or a server with too much to do."""
    CONNECT = "connect"
    """No connection, or it was closed before the status: nothing was answered."""
    SERVER_ERROR = "server_error"
    REFUSED = "refused"
    """About the server's configuration or ours, which another attempt does not change: its key, its model, a redirect."""
    FORBIDDEN = "forbidden"
    """The server does not take this request, and another one may: its content filter, its account's limit, a feature that it lacks. Or it
    may be the client's fault: a 403, words about a key or a model that may quote the client."""
    LOST = "lost"
    """Silence beyond a timeout, or an answer that broke off or was none."""
    ABANDONED = "abandoned"
    """The client left, or its deadline passed."""


ANSWERS = (AttemptResult.OK, AttemptResult.INVALID, AttemptResult.OVERFLOW, AttemptResult.FORBIDDEN, AttemptResult.RATE_LIMITED)
"""Results of a server that works, or may: a client's prompts alone cannot open its circuit."""


class AttemptFailed(HeadraceError):
    """One attempt of a request at a foreign server failed. The client gets `error` if no other attempt follows.

    has_begun  the client was given tokens of the attempt's answer
    refusal    the field that the server refused; None: it named none
    """

    def __init__(self, result: AttemptResult, error: HeadraceError, *, has_begun: bool = False, refusal: Refusal | None = None) -> None:
        self.result, self.error, self.has_begun, self.refusal = result, error, has_begun, refusal
        super().__init__(str(error))


def known_failure(sent: SentError, *, retry_after_s: float, refusal: Refusal | None = None) -> AttemptFailed | None:
    """The failure for an error of a known kind, in whatever form the server sent it; None: another failure.

    retry_after_s  seconds until the server takes requests
    refusal        of a field that the error names
    """
    match sent.kind:
        case ErrorKind.OVERFLOW:
            return AttemptFailed(AttemptResult.OVERFLOW, foreign_overflow())
        case ErrorKind.ACCOUNT_LIMIT:
            return AttemptFailed(AttemptResult.FORBIDDEN, foreign_overflow())
        case ErrorKind.RATE_LIMIT:
            return AttemptFailed(AttemptResult.RATE_LIMITED, Overloaded(BUSY, retry_after_s=retry_after_s))
        case ErrorKind.FILTERED:
            return AttemptFailed(AttemptResult.FORBIDDEN, ContentRefused())
        case ErrorKind.KEY | ErrorKind.MODEL:
            result = AttemptResult.REFUSED if sent.is_certain else AttemptResult.FORBIDDEN
            return AttemptFailed(result, Unavailable(NOT_NOW, retry_after_s=retry_after_s))
        case ErrorKind.INVALID:
            result = AttemptResult.INVALID if sent.status in CLIENT_FAULTS else AttemptResult.FORBIDDEN
            return AttemptFailed(result, _invalid(sent.status, refusal and refusal.field), refusal=refusal)
    return None


def _invalid(status: int | None, field: str | None) -> InvalidRequest:
    """The error of a request that the server does not take. field: that it named; None: none, or one that the client did not write"""
    limit = f"what the server behind this model accepts (it said {status or 'so in its answer'})"
    if field is None or field == SALT:
        return InvalidRequest("body", limit, None, "Leave out rare fields.")
    return InvalidRequest(LIMITS[0] if field in LIMITS else field, limit, None, "Leave it out, or change it.")


def result_of(status: int) -> AttemptResult:
    """The result for a status that is neither the client's fault nor a rate limit."""
    if status >= 500 or status in (408, 425):
        return AttemptResult.SERVER_ERROR
    return AttemptResult.FORBIDDEN if status in (403, 451) else AttemptResult.REFUSED


async def error_body(response: aiohttp.ClientResponse) -> bytes:
    """The decoded body of an error, as much as arrives within its bounds of bytes and time."""
    body, num_read = bytearray(), 0
    try:
        decoder = decoder_for(response, MAX_ERROR_BYTES)
        async with asyncio.timeout(ERROR_BODY_S):
            while piece := await response.content.read(MAX_ERROR_BYTES - num_read):
                num_read += len(piece)
                for part in (piece,) if decoder is None else unpacked(decoder, piece):
                    body += part
    except (aiohttp.ClientError, OSError, TimeoutError, BrokenStream):
        pass  # the status is known, and what came may say why
    return bytes(body)
