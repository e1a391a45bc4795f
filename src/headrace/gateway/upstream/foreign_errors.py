"""Sorts the errors of foreign servers by what they mean. None of their text reaches a client or the log.

Servers say the same few things with any status, in an event or in a body of status 200, by a code or in a sentence. `_TABLE` has them: a
code that names the kind is believed first, then words, then the status. A sentence may quote what the client wrote. So a kind that rests on
words alone (`SentError.is_certain`) has no effect on other clients' requests: no pause of the server, no failure for its circuit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from headrace.gateway.upstream.foreign_json import integer_of, read_json
from headrace.gateway.upstream.foreign_rate_limits import duration_s, stated_wait_s

MAX_ERROR_BYTES = 64 << 10
"""Most bytes read of an error's body."""

MAX_WORDS_CHARS = 4096
"""Most characters of an error's texts that are looked at."""

CLIENT_FAULTS = (400, 413, 422)
"""Statuses of a request that its server refuses for what it asks."""

_CERTAIN = (401, 402, 404, 429, 503, 529)
"""Statuses with which words are believed: they are about the server, whatever the client wrote."""


class ErrorKind(Enum):
    OVERFLOW = auto()
    """The prompt is too long for the server's context."""
    ACCOUNT_LIMIT = auto()
    """The request alone is more than the account's limit per minute: no wait makes it fit."""
    RATE_LIMIT = auto()
    """The account's limit is reached, or the server has too much to do: it takes the request later."""
    FILTERED = auto()
    """The server's content filter refuses the prompt."""
    KEY = auto()
    """The server refuses the operator's key, or the account behind it."""
    MODEL = auto()
    """The server does not have the operator's model."""
    INVALID = auto()
    """The server does not take what the client asks."""


@dataclass(frozen=True, slots=True)
class SentError:
    """An error as a server sent it.

    kind        None: not known
    status      the HTTP status of the answer, or the one that an error event names; None: none
    is_certain  the kind rests on a code or a status, not on words alone
    wait_s      seconds after which the server wants to be asked again, as the error says
    """

    kind: ErrorKind | None = None
    status: int | None = None
    is_certain: bool = False
    wait_s: float | None = None


class BrokenStream(Exception):
    """The server's bytes are not a complete answer. The message says what was wrong and never quotes them.

    sent  the error that the server sent instead; None: it sent none
    """

    def __init__(self, message: str, *, sent: SentError | None = None) -> None:
        super().__init__(message)
        self.sent = sent


_STATUS_TO_KIND = {429: ErrorKind.RATE_LIMIT, 529: ErrorKind.RATE_LIMIT, 401: ErrorKind.KEY, 402: ErrorKind.KEY}
"""What a status says where neither codes nor words say more. 529 is Anthropic's for overload."""

Words = tuple[tuple[str, ...], tuple[str, ...]]
"""Said by a text that has one of the first words and one of the second."""

ANY = ("",)

_LENGTHS = (
    *("context length", "context window", "context size", "context limit", "context_length", "maximum context", "model length"),
    *("prompt length", "input length", "sequence length", "session_len", "max_model_len", "max_seq_len", "max length", "token limit"),
    *("token count", "input token", "prompt token", "number of tokens", "number of input", "`inputs`", "length of the messages"),
    *("length of all messages", "tokens in request", "tokens to keep"),
)
_TOO_MUCH = (
    *("exceed", "too long", "too large", "too many", "longer than", "greater than", "larger than", "more than", "less than", "over the"),
    *("overflow", "maximum", "at most", "must be <=", "reduce", "not enough", "should be [", "does not fit", "is only"),
)

_TABLE: tuple[tuple[ErrorKind, tuple[str, ...], tuple[Words, ...]], ...] = (
    (
        ErrorKind.ACCOUNT_LIMIT,
        (),
        ((("request too large",), ("per min", "per day")), (("required for long context",), ANY)),
    ),
    (
        ErrorKind.RATE_LIMIT,
        ("ratelimit", "throttl", "quota", "toomanyrequests", "resourceexhausted", "overload", "serverbusy", "capacity"),
        (
            (("rate limit", "rate_limit", "ratelimit", "rate-limit", "too many requests", "throttl", "quota", "overloaded"), ANY),
            (("at capacity", "over capacity", "no capacity", "capacity exceeded", "insufficient capacity", "high demand"), ANY),
            (("tokens per min", "requests per min", "resource exhausted", "resource has been exhausted", "request limit"), ANY),
            (("server is busy", "too busy", "concurrency", "no slot", "slot unavailable", "queue is full", "queue full"), ANY),
            (("too many",), ("please wait", "concurrent")),
        ),
    ),
    (
        ErrorKind.OVERFLOW,
        ("contextlength", "contextsize", "contextwindow", "contextoverflow", "requesttoolarge", "prompttokensexceeded", "inputtoolong"),
        ((_LENGTHS, _TOO_MUCH), (("prompt", "input", "messages", "conversation", "text"), ("too long", "too large to process"))),
    ),
    (
        ErrorKind.FILTERED,
        ("contentfilter", "contentpolicy", "responsibleai", "datainspection", "sensitivecontent", "moderation", "promptblocked"),
        (
            (("content filter", "content_filter", "content polic", "content management polic", "content exists risk", "high risk"), ANY),
            (("usage guidelines", "usage polic", "inappropriate content", "sensitive content", "prohibited content", "safety check"), ANY),
            (("flagged", "moderation", "violat"), ("input", "prompt", "content", "polic", "message", "moderation")),
        ),
    ),
    (
        ErrorKind.KEY,
        (
            *("apikey", "authentication", "unauthenticated", "unauthorized", "permission", "accessdenied", "expiredtoken", "invalidtoken"),
            *("unrecognizedclient", "billing", "insufficientbalance", "arrearage", "overdue", "credit"),
        ),
        (
            (
                ("api key", "api-key", "bearer token", "access token", "auth token", "credentials"),
                (
                    *("invalid", "incorrect", "not valid", "missing", "expired", "not found", "wrong", "disabled", "revoked", "required"),
                    *("provide", "malformed", "leaked", "blocked", "denied", "no api key"),
                ),
            ),
            (("invalid_api_key", "api_key_invalid", "unauthorized", "unauthenticated", "permission denied", "not authorized"), ANY),
            (("authentication", "authorization"), ("fail", "error", "required", "invalid", "missing")),
            (("insufficient balance", "insufficient credit", "insufficient funds", "credit balance", "payment required"), ANY),
            (("account",), ("not active", "deactivated", "suspended", "overdue", "arrears")),
            (("location is not supported", "have access", "have permission"), ANY),
        ),
    ),
    (
        ErrorKind.MODEL,
        ("modelnot", "invalidmodel", "unknownmodel", "nosuchmodel", "modeldecommissioned", "notfounderror", "deploymentnotfound"),
        (
            (("model not found", "model not exist", "no such model", "unknown model", "invalid model", "no models loaded"), ANY),
            (("the model", "model '", "model `", 'model "', "models/"), ("does not exist", "not found", "decommissioned", "no longer")),
        ),
    ),
    (
        ErrorKind.INVALID,
        ("invalidrequest", "badrequest", "validation", "invalidargument", "invalidparam", "unsupported", "unknownparam", "unprocessable"),
        (
            (("unsupported param", "unknown param", "unknown field", "unrecognized", "extra inputs are not permitted", "jinja"), ANY),
            (("does not support", "not supported", "that support", "param requires", "roles must alternate", "failed to parse"), ANY),
            (("chat template", "json_schema", "json schema", "raise_exception", "validation error"), ANY),
        ),
    ),
)
"""Kind, parts of its codes (without what is no letter), and its words, in lower case. What stands first is looked for first: "too many
tokens" is a rate limit where it says to wait, and a server that refuses a key may call that an invalid argument."""


def sent_error(body: bytes, status: int | None = None) -> SentError:
    """The error in a body, which need not be JSON. status: of the answer, None inside an event stream"""
    try:
        return error_in(read_json(body[:MAX_ERROR_BYTES]), status)
    except ValueError:
        return error_in(body[:MAX_WORDS_CHARS].decode("utf-8", "replace"), status)


def error_in(value: object, status: int | None = None) -> SentError:
    """The error in a JSON value: OpenAI's object, a text in its place, vLLM's older form without `error`, Google's list, and others."""
    facts = _Facts()
    facts.read(value)
    stated = [code for fact in facts.codes if (code := integer_of(fact)) is not None and 400 <= code <= 599]
    status = stated[0] if status is None and stated else status
    codes = " ".join(_plain(fact) for fact in facts.codes if isinstance(fact, str))
    words = " ".join(facts.texts)[:MAX_WORDS_CHARS].lower()
    kind, is_certain = _kind(codes, words, status)
    return SentError(kind, status, is_certain, next(filter(None, facts.waits), stated_wait_s(words)))


def broken_by(error: SentError) -> BrokenStream:
    return BrokenStream("it ended with an error", sent=error)


def _kind(codes: str, words: str, status: int | None) -> tuple[ErrorKind | None, bool]:
    """The kind, and whether it is certain."""
    *named, invalid = _TABLE
    said = next((kind for kind, _, patterns in named if _says(words, patterns)), None)
    if said is ErrorKind.ACCOUNT_LIMIT:  # its code is that of a rate limit
        return said, False
    coded = next((kind for kind, parts, _ in named if any(part in codes for part in parts)), None)
    if coded is not None or said is not None:
        return coded or said, coded is not None or status in _CERTAIN
    if status in CLIENT_FAULTS:
        return ErrorKind.INVALID, True
    if status in _STATUS_TO_KIND:
        return _STATUS_TO_KIND[status], True
    kind, parts, patterns = invalid
    return (kind if any(part in codes for part in parts) or _says(words, patterns) else None), False


def _says(text: str, patterns: tuple[Words, ...]) -> bool:
    return any(any(word in text for word in first) and any(word in text for word in second) for first, second in patterns)


def _plain(code: str) -> str:
    return "".join(filter(str.isalpha, code[:64])).lower()


_CODES = ("code", "type", "status", "status_code", "error_type", "error_code", "reason")
_TEXTS = ("message", "msg", "detail", "error", "error_description", "status_msg", "raw", "title")
_WAITS = {"retry_after_ms": 0.001, "retry_after": 1.0, "retry_after_seconds": 1.0, "retryDelay": 1.0}
_INSIDE = ("error", "errors", "detail", "details", "metadata", "innererror", "base_resp")
_MAX_DEPTH, _MAX_LISTED = 6, 8


class _Facts:
    """What the known fields of an error hold, the outer ones first. A validation error quotes the client's request in other fields, which
    are not read.

    waits  seconds
    """

    def __init__(self) -> None:
        self.codes: list[object] = []
        self.texts: list[str] = []
        self.waits: list[float | None] = []

    def read(self, value: object, depth: int = 0) -> None:
        if isinstance(value, str):
            self.texts.append(value)
        elif depth < _MAX_DEPTH:
            if isinstance(value, list):
                for each in value[:_MAX_LISTED]:
                    self.read(each, depth + 1)
            elif isinstance(value, dict):
                self._read_fields(value, depth)

    def _read_fields(self, fields: dict[str, object], depth: int) -> None:
        self.codes += [fields[name] for name in _CODES if name in fields]
        self.waits += [duration_s(fields[name], unit_s) for name, unit_s in _WAITS.items() if name in fields]
        self.texts += [text for name in _TEXTS if isinstance(text := fields.get(name), str)]
        for name in _INSIDE:
            if isinstance(inner := fields.get(name), dict | list):
                self.read(inner, depth + 1)


SUCCESS = ("", "0", "200", "success", "ok", "none", "null", "no error", "no_error")
"""Texts of an error's fields, and of an `error` that is a text, that say that there is none."""


def says_something(value: object) -> bool:
    """Whether an `error` field reports an error. Some servers send it empty, or with a word of success, in every piece."""
    return any(map(_is_said, value.values())) if isinstance(value, dict) else _is_said(value)


def _is_said(value: object) -> bool:
    return value.strip().lower() not in SUCCESS if isinstance(value, str) else bool(value) and value != 200
