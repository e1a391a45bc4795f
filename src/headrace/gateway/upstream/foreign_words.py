"""Values and words as foreign servers write them, read one by one: JSON that is not quite JSON, texts in pieces, errors, ends of an output.

Most answers are decoded by a typed decoder. What it refuses is read by `read_json_texts`: NaN and Infinity as Python prints them, control
characters in strings, halves of surrogate pairs, bytes that are not UTF-8.

None of an error's words reaches a client or the log. Servers have many words for the same few ends, in any letter case. The lists hold
words that are in use. Of a word on none of them a stem decides, such as the `error` of `engine_error`; what may be a failure is one. A word
of failure breaks the answer, since its text may be cut off. A word that is not known says nothing: the answer counts as complete where the
server shows in another way that it ended regularly (`foreign_answer`), and the client gets the word as `stop_reason`.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import zlib
from typing import NamedTuple

from headrace.core.finish import FinishReason

MAX_COUNT = 2**53

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Left out at the beginning of JSON, and of an event stream, as its standard says."""

_MAX_DIGITS = 1000
"""Longest integer that is read exactly. Python takes time quadratic in the digits, and refuses more than 4300 of them."""

_SPACE = re.compile(r"\s*")
_LONE = re.compile("[\ud800-\udfff]")
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that do not stand for a byte, as `surrogateescape` has it."""


def read_json(data: bytes) -> object:
    """The value of a JSON text. Its strings may hold lone surrogates: halves of pairs, and bytes that are not UTF-8 (`surrogateescape`).

    Raises ValueError for what is no JSON, or nested too deeply.
    """
    (value,) = read_json_texts(data, max_texts=1)
    return value


def read_json_texts(data: bytes, *, max_texts: int) -> list[object]:
    """The values of one JSON text or of several, one after the other. As `read_json`; raises ValueError for more than max_texts too."""
    text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "surrogateescape").strip()
    values: list[object] = []
    place = 0
    while place < len(text) or not values:
        if len(values) == max_texts:
            raise ValueError("too many JSON texts")
        try:
            value, place = _JSON.raw_decode(text, place)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        values.append(value)
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing too
    return values


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else -math.inf if digits.startswith("-") else math.inf


_JSON = json.JSONDecoder(strict=False, parse_int=_integer)


def number_of(value: object) -> float | None:
    """A finite number, minus infinity, or the text of either; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value) if len(value) <= 32 and value.isascii() else None
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if number < math.inf else None


def integer_of(value: object) -> int | None:
    """A whole number in any of its forms: 12, 12.0, "12". None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = number_of(value)
    return int(number) if number is not None and math.isfinite(number) and number.is_integer() else None


def count_of(value: object) -> int | None:
    """A whole number of things, in any form of `integer_of`; None for anything else."""
    number = integer_of(value)
    return number if number is not None and 0 <= number <= MAX_COUNT else None


def whole_text(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates: it can be encoded."""
    return _LONE.sub("\ufffd", text)


class SaidText:
    """Length and checksum of a text that comes in pieces: they tell whether another text begins with it, and it is not kept."""

    __slots__ = ("_checksum", "num_chars")

    def __init__(self) -> None:
        self.num_chars = self._checksum = 0

    def add(self, piece: str) -> None:
        self.num_chars += len(piece)
        self._checksum = _checksum(piece, self._checksum)

    def rest_of(self, text: str) -> str | None:
        """What `text` has behind it; None where `text` does not begin with it."""
        begin = text[: self.num_chars]
        return text[self.num_chars :] if len(begin) == self.num_chars and _checksum(begin, 0) == self._checksum else None


def _checksum(text: str, before: int) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)


class SplitText:
    """A text that comes in pieces, between which a server may have split characters.

    Half of a surrogate pair, or some of the UTF-8 bytes of a character, waits for the rest. What becomes no character is U+FFFD.
    """

    __slots__ = ("_decoder", "_half", "_is_waiting")

    def __init__(self) -> None:
        self._half = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_waiting = False

    def push(self, piece: str, *, is_last: bool = False) -> str:
        """The text that is complete with this piece."""
        if not self._is_waiting and (piece.isascii() or _LONE.search(piece) is None):
            return piece
        text = (self._half + piece).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        self._half = text[-1] if not is_last and "\ud800" <= text[-1:] <= "\udbff" else ""
        raw = _NO_BYTE.sub("\ufffd", text[: len(text) - len(self._half)]).encode("utf-8", "surrogateescape")
        text = self._decoder.decode(raw, final=is_last)
        self._is_waiting = bool(self._half or self._decoder.getstate()[0])
        return text

    def rest(self) -> str:
        """What still waits, at the end of the text."""
        return self.push("", is_last=True) if self._is_waiting else ""


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
    """Whether an `error` field says that there is one: some servers send it empty, or with words of success, beside each piece."""
    return any(map(_is_said, value.values())) if isinstance(value, dict) else _is_said(value)


def _is_said(value: object) -> bool:
    return value.strip().lower() not in SUCCESS if isinstance(value, str) else bool(value) and value != 200


def sent_error(body: bytes) -> BrokenStream:
    """What an error's JSON says, as far as it is in a known form. Its message is compared and not shown."""
    try:
        return broken_by(read_json(body))
    except ValueError:
        return broken_by(None)


def broken_by(value: object) -> BrokenStream:
    """What the value of an error's JSON says, as far as it is in a known form."""
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


MAX_WORD_CHARS = 64
"""Most characters that are shown of a word that is not known."""


def _plain(word: str) -> str:
    """The word without what is neither a letter nor a digit: `max_tokens`, `MAX_TOKENS` and `maxTokens` are one word."""
    return "".join(filter(str.isalnum, word)).lower().removeprefix("finishreason")


def _stems(words: str) -> re.Pattern[str]:
    return re.compile("|".join(words.split()))


def _words(*lines: str) -> frozenset[str]:
    return frozenset([_plain(word) for line in lines for word in line.split()])


RUNNING = _words("null none unspecified not_finished in_progress running generating pending processing streaming") | {""}
"""Words that some servers send before the end."""

STOPPED = _words(
    "stop stopped eos eos_token end_of_sequence end_of_turn end_of_text end_turn eot eom end ended",
    "stop_sequence stop_sequences stop_string stop_str stop_word stop_words stop_token stop_tokens stop_criteria_met",
    "stop_string_found eos_found normal natural complete completed done finish finished final success succeeded ok no_error",
)
CALLED = _words("tool_calls tool_call tool_use tool_uses function_call function_calls")
"""With these words a server says that its calls are complete, also where a stop string or a stop token ended the output."""

LENGTH = _words(
    "length max_length length_limit output_limit truncated token_limit token_limit_reached",
    "max_token max_tokens max_tokens_reached max_new_tokens max_output_tokens max_completion_tokens",
    "model_length max_model_length context_length max_context_length context_length_exceeded",
    "context_window_exceeded model_context_window_exceeded",
)
FILTERED = _words(
    "content_filter content_filtered content_filter_stop filter filtered blocked blocklist moderation sensitive refusal",
    "safety image_safety recitation prohibited_content spii guardrail guardrails guardrail_intervened error_toxic",
)
FAILED = _words(
    "error errors internal_error server_error network_error connection_error error_limit fail failed failure exception incomplete",
    "abort aborted cancel canceled cancelled user_cancel user_canceled user_cancelled interrupted disconnect disconnected",
    "timeout timed_out time_limit deadline deadline_exceeded overloaded insufficient_system_resource insufficient_system_resources",
    "malformed_function_call malformed_tool_call oom expired",
)
FAILED_STEMS = _stems(
    "error fail abort cancel malform timeout timed disconnect unavailable overload reject terminat unfinish unload interrupt incomplete"
    " exception invalid badrequest unexpected kill preempt crash outofmemory denied quota ratelimit throttl userstop"
)
FILTERED_STEMS = _stems("contentfilter safety block prohibit recitation refus moderat guardrail toxic violat")
LENGTH_STEMS = _stems("length maxtoken maxoutput maxnew maxpredicted maxcompletion maxtime limit truncat exceed")


class Ending(NamedTuple):
    """stop_reason, is_filtered: as in `OutputEvent`;  is_known: the word says that the output is complete;  is_called: so are its calls"""

    finish: FinishReason
    stop_reason: int | str | None = None
    is_known: bool = True
    is_called: bool = False
    is_filtered: bool = False


def ending(word: str, stop_reason: int | str | None) -> Ending | None:
    """The end that a finish reason names; None where it names none. stop_reason: what the server has beside it

    Raises BrokenStream for a word of failure.
    """
    plain = _plain(word)
    if plain in RUNNING:
        return None
    if plain in STOPPED:
        return Ending(FinishReason.STOP, stop_reason)
    if plain in CALLED:
        return Ending(FinishReason.STOP, stop_reason, is_called=True)
    is_listed = plain in LENGTH or plain in FILTERED
    if plain in FAILED or (not is_listed and FAILED_STEMS.search(plain)):
        raise BrokenStream("a sequence ended for a reason that is no end of an answer")
    if plain in FILTERED or (not is_listed and FILTERED_STEMS.search(plain)):
        return Ending(FinishReason.STOP, is_filtered=True)
    if is_listed or LENGTH_STEMS.search(plain):
        return Ending(FinishReason.LENGTH)
    return Ending(FinishReason.STOP, word.strip()[:MAX_WORD_CHARS], is_known=False)
