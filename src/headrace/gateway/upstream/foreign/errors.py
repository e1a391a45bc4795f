"""Sorts the errors of foreign servers by what they mean. None of their text reaches a client or the log.

A sentence may quote what the client wrote. So a kind that rests on words alone (`SentError.is_certain`) has no effect on other clients'
requests. And where an error names a field of the client's request, words about the server, its key or its filter are not believed at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from headrace.gateway.upstream.foreign.facts import duration_s, stated_wait_s
from headrace.gateway.upstream.foreign.field_errors import place_in
from headrace.gateway.upstream.foreign.values import integer_of, read_json

MAX_ERROR_BYTES = 64 << 10

MAX_WORDS_CHARS = 4096

CLIENT_FAULTS = (400, 413, 422)

_CERTAIN = (401, 402, 404, 429, 503, 529)
"""Statuses with which words are believed: they are about the server, whatever the client wrote."""


class ErrorKind(Enum):
    OVERFLOW = auto()
    ACCOUNT_LIMIT = auto()
    """The request alone is more than the account's limit per minute: no wait makes it fit."""
    RATE_LIMIT = auto()
    FILTERED = auto()
    KEY = auto()
    MODEL = auto()
    INVALID = auto()


@dataclass(frozen=True, slots=True)
class SentError:
    """is_certain: the kind rests on a code or a status, not on words alone"""

    kind: ErrorKind | None = None
    status: int | None = None
    is_certain: bool = False
    wait_s: float | None = None


class BrokenStream(Exception):
    """The server's bytes are not a complete answer. The message says what was wrong and never quotes them."""

    def __init__(self, message: str, *, sent: SentError | None = None) -> None:
        super().__init__(message)
        self.sent = sent


_STATUS_TO_KIND = {429: ErrorKind.RATE_LIMIT, 529: ErrorKind.RATE_LIMIT, 401: ErrorKind.KEY, 402: ErrorKind.KEY}
"""529 is Anthropic's for overload."""

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
            (("flagged", "moderation"), ("input", "prompt", "content", "polic", "message", "moderation")),
            (("violat",), ("polic", "guideline", "terms", "safety")),
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
            (("authentication fail", "authentication error", "authentication required", "authentication is required"), ANY),
            (("authorization fail", "authorization error", "authorization required", "authorization header"), ANY),
            (("invalid auth", "missing auth"), ("authentication", "authorization")),
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


_OF_REQUEST = (ErrorKind.OVERFLOW, ErrorKind.ACCOUNT_LIMIT)

_FIELD_CODES = (
    *("functionparam", "unsupportedparam", "unsupportedvalue", "unknownparam", "missingrequired", "invalidvalue", "invalidtype"),
    *("extraforbidden", "schema", "abovemax", "belowmin"),
)

_OURS = ("model", "header", "headers", "path", "query", "authorization", "api", "api_key", "apikey", "key", "x")
"""First words of places that the gateway writes."""

_QUOTED_NAME = re.compile(r"""((?<!: )"|['`])[\w.$-]+\1""")
"""After a colon it may be JSON of another server."""


def sent_error(body: bytes, status: int | None = None) -> SentError:
    try:
        return error_in(read_json(body[:MAX_ERROR_BYTES]), status)
    except ValueError:
        return error_in(body[:MAX_WORDS_CHARS].decode("utf-8", "replace"), status)


def error_in(value: object, status: int | None = None) -> SentError:
    facts = _Facts()
    facts.read(value)
    stated = [code for fact in facts.codes if (code := integer_of(fact)) is not None and 400 <= code <= 599]
    status = stated[0] if status is None and stated else status
    codes = " ".join(_plain(fact) for fact in facts.codes if isinstance(fact, str))
    words = " ".join(facts.texts)[:MAX_WORDS_CHARS].lower()
    kind, is_certain = _kind(codes, words, status, _is_about_field(codes, facts.places))
    return SentError(kind, status, is_certain, next(filter(None, facts.waits), stated_wait_s(words)))


def broken_by(error: SentError) -> BrokenStream:
    return BrokenStream("it ended with an error", sent=error)


def _kind(codes: str, words: str, status: int | None, is_about_field: bool) -> tuple[ErrorKind | None, bool]:
    *named, invalid = _TABLE
    is_about_field = is_about_field and status not in _CERTAIN
    without_names = _QUOTED_NAME.sub(r"\1\1", words) if status in CLIENT_FAULTS else words
    believed = [row for row in named if row[0] in _OF_REQUEST or not is_about_field]
    said = next((kind for kind, _, patterns in believed if _says(words if kind in _OF_REQUEST else without_names, patterns)), None)
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
    return (kind if is_about_field or any(part in codes for part in parts) or _says(words, patterns) else None), False


def _is_about_field(codes: str, places: list[list[str]]) -> bool:
    if places:
        return any(place[0].lower() not in _OURS for place in places)
    return any(part in codes for part in _FIELD_CODES)


def _says(text: str, patterns: tuple[Words, ...]) -> bool:
    return any(any(word in text for word in first) and any(word in text for word in second) for first, second in patterns)


def _plain(code: str) -> str:
    return "".join(filter(str.isalpha, code[:64])).lower()


_CODES = ("code", "type", "status", "status_code", "error_type", "error_code", "reason")
_TEXTS = ("message", "msg", "detail", "error", "error_description", "status_msg", "raw", "title")
_WAITS = {"retry_after_ms": 0.001, "retry_after": 1.0, "retry_after_seconds": 1.0, "retryDelay": 1.0}
_INSIDE = ("error", "errors", "detail", "details", "metadata", "innererror", "base_resp", "fieldViolations")
_MAX_DEPTH, _MAX_LISTED = 8, 8


class _Facts:
    """A validation error quotes the client's request in other fields, which are not read."""

    def __init__(self) -> None:
        self.codes: list[object] = []
        self.texts: list[str] = []
        self.waits: list[float | None] = []
        self.places: list[list[str]] = []

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
        if place := place_in(fields):
            self.places.append(place)
        for name in _INSIDE:
            if isinstance(inner := fields.get(name), dict | list):
                self.read(inner, depth + 1)


SUCCESS = ("", "0", "200", "success", "ok", "none", "null", "no error", "no_error")


def says_something(value: object) -> bool:
    """Some servers send `error` empty, or with a word of success."""
    return any(map(_is_said, value.values())) if isinstance(value, dict) else _is_said(value)


def _is_said(value: object) -> bool:
    return value.strip().lower() not in SUCCESS if isinstance(value, str) else bool(value) and value != 200
