"""Maps errors to HTTP status and OpenAI error body, in one table for plain and streaming replies alike.

Clients read the messages of `core.errors` and of the classes below. Any other exception is a bug of the server: its type and traceback go
to the log, its text, which may quote a prompt, a path or a key, goes nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
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
"""Where bytes never became a request."""

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200


class HeadRefused(HeadraceError):
    """rule: for the request log, without any text of the client"""

    def __init__(self, message: str, *, rule: str) -> None:
        self.rule = rule
        super().__init__(message)


OPERATORS_COMMANDS = {
    "/v1/load_lora_adapter": "An operator loads an adapter by the command `headrace adapters load NAME PATH`.",
    "/v1/unload_lora_adapter": "An operator unloads an adapter by the command `headrace adapters unload NAME`.",
}
"""Instead of paths that vLLM has."""


class RouteNotFound(HeadRefused):
    def __init__(self, path: str) -> None:
        remedy = OPERATORS_COMMANDS.get(path, "GET /openapi.json lists what is served.")
        super().__init__(f"No such path: {shorten(path)}. {remedy}", rule="No such path.")


class RequestNotFound(HeadRefused):
    def __init__(self) -> None:
        rule = (
            "No request of this id that this key may read has ended. A request that used something is found as long as its usage is kept, "
            "from a second after its end; a refused one while the gateway that refused it remembers it."
        )
        super().__init__(rule, rule=rule)


class MethodNotAllowed(HeadRefused):
    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        self.allowed = allowed
        rule = f"Allowed: {', '.join(allowed)}."
        super().__init__(f"Method {shorten(method)} is not allowed here. {rule}", rule=f"The method is not allowed here. {rule}")


class Forbidden(HeadRefused):
    """DNS rebinding or a cross-site request."""


class ReaderRefused(HeadRefused):
    """The path is not marked as one for readers (`surfaces.endpoint.Endpoint`)."""

    def __init__(self) -> None:
        rule = "This API key has the role reader: it reads, and may not ask for this."
        super().__init__(f"{rule} Send a key of the role user ('headrace keys create' makes one).", rule=rule)


class UnsupportedMediaType(HeadraceError):
    pass


class UnsupportedEncoding(UnsupportedMediaType):
    """rule: for the request log, without any text of the client"""

    def __init__(self, given: str, why: str = "is not read here") -> None:
        self.rule = f"The Content-Encoding {why}."
        super().__init__(f"Content-Encoding {shorten(given)} {why}. Send gzip, deflate, zstd or identity.")


class BodyTooLarge(RequestTooLarge):
    def __init__(self, size: int, max_bytes: int) -> None:
        super().__init__("body", f"at most {max_bytes} bytes", size, "Send a shorter prompt or fewer messages.")


class ContextLengthExceeded(InvalidRequest):
    """The message and code are OpenAI's, since clients recognize the error by them. is_of_tier: no model would take the request"""

    is_of_tier = False

    def of_tier(self, tier: str) -> ContextLengthExceeded:
        limit = self.limit.replace(_MODELS_CONTEXT, f"The tier {tier}'s maximum context length (max_context_tokens)", 1)
        error = ContextLengthExceeded(self.field, limit, None, self.remedy)
        error.is_of_tier = True
        return error

    def __str__(self) -> str:
        return f"{self.limit} {self.remedy}"


_MODELS_CONTEXT = "This model's maximum context length"


def context_overflow(
    field: str, max_model_len: int, *, part: str, prompt_tokens: int, max_tokens: int | None, is_least: bool = False
) -> ContextLengthExceeded:
    """part: "messages" or "prompt"; is_least: the counts are lower bounds"""
    completion_tokens = max_tokens or 1
    least = "at least " if is_least else ""
    limit = (
        f"{_MODELS_CONTEXT} is {max_model_len} tokens. "
        f"However, you requested {least}{prompt_tokens + completion_tokens} tokens "
        f"({least}{prompt_tokens} in the {part}, {least}{completion_tokens} in the completion)."
    )
    return ContextLengthExceeded(field, limit, None, f"Please reduce the length of the {part} or completion.")


def foreign_overflow() -> ContextLengthExceeded:
    limit = f"{_MODELS_CONTEXT} is shorter than what you requested, says the server behind it."
    return ContextLengthExceeded("prompt", limit, None, "Please reduce the length of the prompt or completion.")


class ContentRefused(InvalidRequest):
    """The server's own message is not shown."""

    def __init__(self) -> None:
        super().__init__("messages", "content that the server behind this model takes", None, "Its content filter refused this prompt.")


class RateLimitExceeded(Overloaded):
    """limit: the option that sets it; key_OPTION for a limit of the key itself"""

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        self.limit = limit
        super().__init__(message, retry_after_s=retry_after_s)


class QuotaExhausted(RateLimitExceeded):
    """Tokens or money, for the day or the month."""


class TemporaryRefusal(HeadraceError):
    """retry_after_s: None if it cannot pass by itself"""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class UnknownStream(TemporaryRefusal):
    """Unknown, too old, or still being sent by another gateway."""


class StreamConflict(TemporaryRefusal):
    """With `retry_after_s` if another request continues it now."""


class UnknownSession(HeadraceError):
    """Unknown, deleted, or expired."""


class SessionConflict(HeadraceError):
    retry_after_s = 1.0


class IdempotencyConflict(TemporaryRefusal):
    """The first request still runs (with `retry_after_s`), or its answer was not kept (without)."""


class IdempotencyMismatch(HeadraceError):
    """Used for another request."""


class ReadTimeout(HeadraceError):
    pass


class ClientLeft(HeadraceError):
    """The status, 499 as nginx has it, is for the log."""


class SlowReader(HeadraceError):
    """The bound on unsent bytes was reached."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    status: int
    type: str
    code: str


# Most specific class first: the first row whose class matches wins.
TABLE: tuple[tuple[type[BaseException], ErrorRow], ...] = (
    (ModelNotFound, ErrorRow(404, "invalid_request_error", "model_not_found")),
    (RequestTooLarge, ErrorRow(413, "invalid_request_error", "request_too_large")),
    (ContextLengthExceeded, ErrorRow(400, "invalid_request_error", "context_length_exceeded")),
    (ContentRefused, ErrorRow(400, "invalid_request_error", "content_filter")),
    (InvalidRequest, ErrorRow(400, "invalid_request_error", "invalid_value")),
    (Unauthorized, ErrorRow(401, "authentication_error", "invalid_api_key")),
    (UnusableKey, ErrorRow(403, "permission_error", "unusable_key")),
    (Forbidden, ErrorRow(403, "permission_error", "forbidden")),
    (ReaderRefused, ErrorRow(403, "permission_error", "reader_key")),
    (RouteNotFound, ErrorRow(404, "invalid_request_error", "not_found")),
    (RequestNotFound, ErrorRow(404, "invalid_request_error", "request_not_found")),
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
    """body: JSON of `ErrorBody`; `http.asgi.Framing` may convert it for another API"""

    status: int
    error: ErrorObject
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.error))


def error_reply(error: BaseException) -> ErrorReply:
    row = row_of(error)
    message = printable(str(error)[:MAX_MESSAGE_CHARS])[:MAX_MESSAGE_CHARS] if row is not INTERNAL else INTERNAL_MESSAGE
    param = printable(error.field)[:MAX_PARAM_CHARS] if isinstance(error, InvalidRequest) else None
    return ErrorReply(row.status, ErrorObject(message, row.type, param, row.code), tuple(_headers(error)))


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of its causes.

    Tracebacks keep frames alive in reference cycles. Without them a refused request's memory, perhaps megabytes, is freed at once instead
    of at the next garbage collection.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]


def naming(error: HeadraceError, fallbacks: Sequence[str]) -> HeadraceError:
    """The error with the names of the models that could not answer either."""
    if not fallbacks:
        return error
    named, more = copy(error), f"Its {'fallback' if len(fallbacks) == 1 else 'fallbacks'} {', '.join(fallbacks)} did not answer either."
    named.args = (f"{error} {more}",)
    if isinstance(named, InvalidRequest):
        named.remedy = f"{named.remedy} {more}".strip()
    return named


def row_of(error: BaseException) -> ErrorRow:
    return next((row for kind, row in TABLE if isinstance(error, kind)), INTERNAL)


def printable(text: str) -> str:
    """Lone surrogates and control characters are written as escapes, fit for JSON and for one log line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    if isinstance(error, Overloaded | Unavailable | TemporaryRefusal | SessionConflict) and error.retry_after_s is not None:
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", ", ".join(error.allowed).encode())]
    if isinstance(error, UnsupportedEncoding):
        return [(b"accept-encoding", b"gzip, deflate, zstd")]
    if isinstance(error, ReadTimeout):
        return [(b"connection", b"close")]
    return []
