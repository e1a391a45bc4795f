"""The error tree. One place to see everything that can be raised across a seam.

    HeadraceError
    |- InvalidRequest      the caller's fault: field, limit, value, remedy             -> 400
    |  |- ModelNotFound    names what is served                                        -> 404
    |  `- RequestTooLarge  body or prompt over a cap                                   -> 413
    |- Unauthorized        no valid key                                                -> 401
    |- Overloaded          a bounded queue is full; says when to retry                 -> 429
    |- Unavailable         no replica can take it now; retryable                       -> 503
    |- DeadlineExceeded    the request's own deadline passed before it began           -> 504
    |- EngineFatal         the device or the engine's own state is lost: the process ends and is restarted
    |- SequenceFailed      the engine failed this sequence alone                       -> 500
    |- ConfigError         configuration: path in the file, value, remedy              (start-up)
    `- CheckpointError     weights: file and reason                                    (start-up)

HTTP status codes live in one table of the gateway; the numbers above are that table's content for orientation.
Messages are safe to show to clients: no paths outside the operator's own, no addresses, no tracebacks.
"""

from __future__ import annotations

MAX_FIELD_CHARS = 160


class HeadraceError(Exception):
    """Root of everything raised on purpose."""


class InvalidRequest(HeadraceError):
    """A field of a request breaks a rule.

    field   dotted name as the client wrote it, e.g. "top_p" or "messages[3].content", shortened to MAX_FIELD_CHARS
    limit   the rule in words and numbers, e.g. "0 < top_p <= 1"
    value   what was given, shortened; None hides it. `given` is the same, whole
    remedy  what to do instead
    """

    def __init__(self, field: str, limit: str, value: object = None, remedy: str = "") -> None:
        if len(field) > MAX_FIELD_CHARS:  # it may hold keys of the client's
            field = field[: MAX_FIELD_CHARS - 3] + "..."
        self.field, self.limit, self.given, self.value, self.remedy = field, limit, value, shorten(value), remedy
        shown = f", got {self.value}" if value is not None else ""
        super().__init__(f"{field}: expected {limit}{shown}." + (f" {remedy}" if remedy else ""))


class ModelNotFound(InvalidRequest):
    def __init__(self, name: str, served: list[str]) -> None:
        self.served = served
        super().__init__("model", f"one of: {', '.join(served) or 'no model is served'}", name, "GET /v1/models lists what is served.")


class RequestTooLarge(InvalidRequest):
    """A cap of size, not of form: body bytes, prompt tokens, KV blocks."""


class Unauthorized(HeadraceError):
    """No key, or not one of ours. Never says which."""


class Overloaded(HeadraceError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Unavailable(HeadraceError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineExceeded(HeadraceError):
    """The deadline passed before the first token."""


class SequenceFailed(HeadraceError):
    """The engine could not continue this sequence; its neighbours go on."""


class EngineFatal(HeadraceError):
    """Going on could give wrong answers: the engine process ends with an exit code of its own and is started anew."""


class ConfigError(HeadraceError):
    def __init__(self, where: str, reason: str, remedy: str = "") -> None:
        self.where, self.reason, self.remedy = where, reason, remedy
        super().__init__(f"{where}: {reason}." + (f" {remedy}" if remedy else ""))


class CheckpointError(HeadraceError):
    def __init__(self, file: str, reason: str, remedy: str = "") -> None:
        self.file, self.reason, self.remedy = file, reason, remedy
        super().__init__(f"{file}: {reason}." + (f" {remedy}" if remedy else ""))


def shorten(value: object, limit: int = 80) -> str:
    """repr of a client's value, bounded and printable, so that it can stand in a message or a log line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool):
        return "true" if value else "false"  # as the client wrote it
    text = ascii(value[: limit + 1] if isinstance(value, str | bytes | list | tuple) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
