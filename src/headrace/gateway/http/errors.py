"""One table from errors to HTTP status and OpenAI error body, for plain and streaming replies alike.

A client may read the messages of `core.errors`, which are written for clients, and those of the classes below. Any other exception is a bug
of the server and is answered with a fixed sentence. Its type and traceback go to the log; its text, which may quote a prompt, a path or a
key, goes nowhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from headrace.core.errors import (
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestTooLarge,
    SequenceFailed,
    Unauthorized,
    Unavailable,
    UnusableKey,
    shorten,
)

BAD_HTTP = "bad_http"
"""Error code where bytes never became a request (`gateway.http.connection`)."""

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200


class HeadRefused(HeadraceError):
    """The request line or a header is refused.

    rule  why, without what the client sent: the reason in the request log
    """

    def __init__(self, message: str, *, rule: str) -> None:
        self.rule = rule
        super().__init__(message)


class RouteNotFound(HeadRefused):
    def __init__(self, path: str) -> None:
        super().__init__(f"No such path: {shorten(path)}. GET /openapi.json lists what is served.", rule="No such path.")


class MethodNotAllowed(HeadRefused):
    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        self.allowed = allowed
        rule = f"Allowed: {', '.join(allowed)}."
        super().__init__(f"Method {shorten(method)} is not allowed here. {rule}", rule=f"The method is not allowed here. {rule}")


class Forbidden(HeadRefused):
    """A Host or Origin that this listener does not answer to (DNS rebinding, cross-site requests)."""


class UnsupportedMediaType(HeadraceError):
    """Not JSON in UTF-8."""


class UnsupportedEncoding(UnsupportedMediaType):
    """A Content-Encoding that `http.content_encoding` does not undo.

    rule  why, without what the client sent: the reason in the request log
    """

    def __init__(self, given: str, why: str = "is not read here") -> None:
        self.rule = f"The Content-Encoding {why}."
        super().__init__(f"Content-Encoding {shorten(given)} {why}. Send gzip, deflate, zstd or identity.")


class BodyTooLarge(RequestTooLarge):
    """The body has more bytes than the cap. Its rest is discarded for a moment (`gateway.http.connection`)."""

    def __init__(self, size: int, max_bytes: int) -> None:
        super().__init__("body", f"at most {max_bytes} bytes", size, "Send a shorter prompt or fewer messages.")


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together do not fit the context. The message is OpenAI's: fallbacks of clients hang on its words and code.

    limit, remedy  the message's sentences: `context_overflow` and `foreign_overflow` make them
    """

    def of_tier(self, tier: str) -> ContextLengthExceeded:
        """This error, where the tier's limit is the smaller one."""
        limit = self.limit.replace(_MODELS_CONTEXT, f"The tier {tier}'s maximum context length (max_context_tokens)", 1)
        return ContextLengthExceeded(self.field, limit, None, self.remedy)

    def __str__(self) -> str:
        return f"{self.limit} {self.remedy}"


_MODELS_CONTEXT = "This model's maximum context length"


def context_overflow(
    field: str, max_model_len: int, *, part: str, prompt_tokens: int, max_tokens: int | None, is_least: bool = False
) -> ContextLengthExceeded:
    """The error of a request that does not fit.

    part        what the client calls its prompt: "messages" or "prompt"
    max_tokens  None: as many as the context leaves, at least 1
    is_least    the counts are lower bounds, because nothing was tokenized
    """
    completion_tokens = max_tokens or 1
    least = "at least " if is_least else ""
    limit = (
        f"{_MODELS_CONTEXT} is {max_model_len} tokens. "
        f"However, you requested {least}{prompt_tokens + completion_tokens} tokens "
        f"({least}{prompt_tokens} in the {part}, {least}{completion_tokens} in the completion)."
    )
    return ContextLengthExceeded(field, limit, None, f"Please reduce the length of the {part} or completion.")


def foreign_overflow() -> ContextLengthExceeded:
    """The error of a request that does not fit a foreign server's model. The server's own message is not shown."""
    limit = f"{_MODELS_CONTEXT} is shorter than what you requested, says the server behind it."
    return ContextLengthExceeded("prompt", limit, None, "Please reduce the length of the prompt or completion.")


class RateLimitExceeded(Overloaded):
    """A limit of the caller has no room now. Retried after `retry_after_s`, the request has it if the caller sends no other one.

    limit  label of the limit: the option that sets it, key_OPTION for one of the key's own
    """

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        self.limit = limit
        super().__init__(message, retry_after_s=retry_after_s)


class QuotaExhausted(RateLimitExceeded):
    """The tokens or the money of a day or a month do not suffice."""


class NotNow(HeadraceError):
    """Something that may pass by itself. retry_after_s: None where it cannot"""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class UnknownStream(NotNow):
    """A Last-Event-ID that names no stream of this tenant: it never did, it is too old, or the stream has not ended yet elsewhere."""


class StreamConflict(NotNow):
    """A stream that another request continues, for which `retry_after_s` is set, or that cannot be continued by this one."""


class UnknownSession(HeadraceError):
    """A session that this tenant does not have: it never did, it was deleted, or its time is over."""


class SessionConflict(HeadraceError):
    """Another request of the session is being answered, or was answered meanwhile."""

    retry_after_s = 1.0


class IdempotencyConflict(NotNow):
    """The first request with this Idempotency-Key is still running, for which `retry_after_s` is set, or its answer was not kept."""


class IdempotencyMismatch(HeadraceError):
    """An Idempotency-Key that another request has used."""


class ReadTimeout(HeadraceError):
    """The client did not send its body in time."""


class ClientLeft(HeadraceError):
    """The client closed the connection. The answer is not read; the status, nginx's 499, is for the log."""


class SlowReader(HeadraceError):
    """The client reads slower than its answer is made, and the bound on unsent bytes was reached."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What a client gets for one class of errors: the HTTP status, and `type` and `code` of the error body."""

    status: int
    type: str
    code: str


# Most specific class first: the first row whose class matches wins.
TABLE: tuple[tuple[type[BaseException], ErrorRow], ...] = (
    (ModelNotFound, ErrorRow(404, "invalid_request_error", "model_not_found")),
    (RequestTooLarge, ErrorRow(413, "invalid_request_error", "request_too_large")),
    (ContextLengthExceeded, ErrorRow(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequest, ErrorRow(400, "invalid_request_error", "invalid_value")),
    (Unauthorized, ErrorRow(401, "authentication_error", "invalid_api_key")),
    (UnusableKey, ErrorRow(403, "permission_error", "unusable_key")),
    (Forbidden, ErrorRow(403, "permission_error", "forbidden")),
    (RouteNotFound, ErrorRow(404, "invalid_request_error", "not_found")),
    (UnknownStream, ErrorRow(404, "invalid_request_error", "stream_not_found")),
    (StreamConflict, ErrorRow(409, "invalid_request_error", "stream_conflict")),
    (UnknownSession, ErrorRow(404, "invalid_request_error", "session_not_found")),
    (SessionConflict, ErrorRow(409, "invalid_request_error", "session_conflict")),
    (IdempotencyConflict, ErrorRow(409, "invalid_request_error", "idempotency_conflict")),
    (IdempotencyMismatch, ErrorRow(422, "invalid_request_error", "idempotency_key_reused")),
    (MethodNotAllowed, ErrorRow(405, "invalid_request_error", "method_not_allowed")),
    (UnsupportedMediaType, ErrorRow(415, "invalid_request_error", "unsupported_media_type")),
    (ReadTimeout, ErrorRow(408, "invalid_request_error", "read_timeout")),
    (QuotaExhausted, ErrorRow(429, "rate_limit_error", "insufficient_quota")),
    (RateLimitExceeded, ErrorRow(429, "rate_limit_error", "rate_limit_exceeded")),
    (Overloaded, ErrorRow(429, "rate_limit_error", "overloaded")),
    (Unavailable, ErrorRow(503, "service_unavailable_error", "unavailable")),
    (DeadlineExceeded, ErrorRow(504, "timeout_error", "deadline_exceeded")),
    (SequenceFailed, ErrorRow(500, "server_error", "sequence_failed")),
    (ClientLeft, ErrorRow(499, "client_error", "client_left")),
    (SlowReader, ErrorRow(499, "client_error", "slow_reader")),
)
INTERNAL = ErrorRow(500, "server_error", "internal_error")
INTERNAL_MESSAGE = "The server failed on this request. It has been logged under its x-request-id."


class ErrorObject(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorObject


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as an answer, which `http.framing` writes in the form of its API. body: the JSON of ErrorBody, OpenAI's"""

    status: int
    error: ErrorObject
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.error))


def error_reply(error: BaseException) -> ErrorReply:
    """The answer to an error, by the table. Never raises. An error that the table lacks is answered with INTERNAL_MESSAGE."""
    row = row_of(error)
    message = printable(str(error)[:MAX_MESSAGE_CHARS])[:MAX_MESSAGE_CHARS] if row is not INTERNAL else INTERNAL_MESSAGE
    param = printable(error.field)[:MAX_PARAM_CHARS] if isinstance(error, InvalidRequest) else None
    return ErrorReply(row.status, ErrorObject(message, row.type, param, row.code), tuple(_headers(error)))


def row_of(error: BaseException) -> ErrorRow:
    return next((row for kind, row in TABLE if isinstance(error, kind)), INTERNAL)


def printable(text: str) -> str:
    """`text` with every lone surrogate and control character written as an escape, fit for JSON and for one log line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    if isinstance(error, Overloaded | Unavailable | NotNow | SessionConflict) and error.retry_after_s is not None:
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", ", ".join(error.allowed).encode())]
    if isinstance(error, UnsupportedEncoding):
        return [(b"accept-encoding", b"gzip, deflate, zstd")]
    if isinstance(error, ReadTimeout):
        return [(b"connection", b"close")]
    return []
