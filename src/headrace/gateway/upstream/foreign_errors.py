"""Reads the errors of foreign servers. None of their text reaches a client or the log."""

from __future__ import annotations

from headrace.gateway.upstream.foreign_json import integer_of, read_json

MAX_ERROR_BYTES = 64 << 10
"""Most bytes read of an error's body. Only its code is used."""

CONTEXT_OVERFLOW = ("maximum context length", "maximum model length", "longer than the model's context length")
"""Words in the messages of vLLM and SGLang, which have no code of their own for it, that say that a prompt is too long."""

LLAMA_CPP_OVERFLOW = "exceed_context_size_error"
"""The type of llama.cpp's error for a prompt that is too long."""


class BrokenStream(Exception):
    """The server's bytes are not a complete answer. The message says what was wrong and never quotes them.

    code         the HTTP status that an error event names: vLLM and SGLang refuse some requests only so, behind a status of 200
    is_overflow  an error event says that the prompt is too long
    """

    def __init__(self, message: str, *, code: int | None = None, is_overflow: bool = False) -> None:
        super().__init__(message)
        self.code, self.is_overflow = code, is_overflow


SUCCESS = ("", "0", "200", "success", "ok", "none", "null", "no error", "no_error")
"""Texts of an error's fields, and of an `error` that is a text, that say that there is none."""


def says_something(value: object) -> bool:
    """Whether an `error` field reports an error. Some servers send it empty, or with a word of success, in every piece."""
    return any(map(_is_said, value.values())) if isinstance(value, dict) else _is_said(value)


def _is_said(value: object) -> bool:
    return value.strip().lower() not in SUCCESS if isinstance(value, str) else bool(value) and value != 200


def sent_error(body: bytes) -> BrokenStream:
    """The error in a body, with its code if it has a known form. The server's message is only compared, never shown."""
    try:
        return broken_by(read_json(body))
    except ValueError:
        return broken_by(None)


def broken_by(value: object) -> BrokenStream:
    """The error in a JSON value, with its code if it has a known form."""
    error = _error_fields(value)
    code, words = error.get("code"), error.get("message")
    is_known = code == "context_length_exceeded" or error.get("type") == LLAMA_CPP_OVERFLOW
    is_overflow = is_known or (isinstance(words, str) and any(known in words for known in CONTEXT_OVERFLOW))
    return BrokenStream("it ended with an error", code=integer_of(code), is_overflow=is_overflow)


def _error_fields(value: object) -> dict[str, object]:
    """The fields of an error in OpenAI's form, with a text in place of its object, in vLLM's older form without `error`, or in a list."""
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return {}
    error = value.get("error")
    if isinstance(error, dict):
        return error
    return {**value, "message": error} if isinstance(error, str) else value
