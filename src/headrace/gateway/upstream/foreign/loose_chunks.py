"""Reads pieces of an answer in other forms than the usual one into the types of `chunk`.

docs/foreign.md, "What an answer may look like", has the forms.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from headrace.gateway.upstream.foreign.chunk import (
    MAX_TOKENS,
    AnswerPiece,
    ChosenToken,
    GroqFields,
    LlamaCppTimings,
    SentCall,
    SentChoice,
    SentDelta,
    SentFunction,
    SentLogprobs,
    SentToken,
    SideField,
    TokenDetails,
    UsageCounts,
    decode_chunk,
    text_in,
)
from headrace.gateway.upstream.foreign.errors import BrokenStream
from headrace.gateway.upstream.foreign.sequence import MAX_WORD_CHARS
from headrace.gateway.upstream.foreign.values import count_of, integer_of, number_of, read_json_texts, whole_text

Fields = dict[str, object]

MAX_CHUNKS = 64
"""Some servers write several into a list."""

TEXT_PARTS = ("text", "output_text", "text_delta", "refusal")
"""A part of another type is text where it has a `text`."""

REASONING_STEMS = ("reason", "think", "thought", "summary_text")

CALL_PARTS = ("tool_use", "tool_call", "function_call")

UNTYPED_TEXT = ("text", "refusal", "content", "value")

ARGUMENTS = ("arguments", "parameters", "input")

_Read = TypeVar("_Read")


class PieceReader:
    def __init__(self) -> None:
        self.left_out: Counter[SideField] = Counter()

    def read(self, data: bytes) -> list[AnswerPiece]:
        """Raises BrokenStream for malformed text, calls or choices, and for no JSON object."""
        try:
            return [decode_chunk(data)]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        try:
            values = read_json_texts(data, max_texts=MAX_CHUNKS)
            if len(values) == 1 and isinstance(values[0], list):
                values = values[0]
            if not values or len(values) > MAX_CHUNKS or not all(isinstance(value, dict | None) for value in values):
                raise BrokenStream("an event is no chunk of an answer")
            return [self._piece(value) for value in values if isinstance(value, dict)]
        except (ValueError, RecursionError):
            raise BrokenStream("an event is no JSON") from None

    def _piece(self, value: Fields) -> AnswerPiece:
        groq = value.get("x_groq")
        timings = value.get("timings")
        timings = timings if isinstance(timings, dict) else {}
        kind = value.get("object")
        choices = [self._choice(each) for each in _objects(value.get("choices"), "choice")]
        finish = _finish_word(value.get("finish_reason"))  # beside the choices, and for the only one
        if finish is not None and len(choices) <= 1:
            choices = choices or [SentChoice()]
            choices[0].finish_reason = choices[0].finish_reason or finish
        return AnswerPiece(
            choices=choices,
            usage=self._usage(value.get("usage")),
            x_groq=GroqFields(self._usage(groq.get("usage"))) if isinstance(groq, dict) else None,
            prompt_eval_count=_tokens(value.get("prompt_eval_count")),
            eval_count=_tokens(value.get("eval_count")),
            timings=LlamaCppTimings(*(_tokens(timings.get(name)) for name in LlamaCppTimings.__struct_fields__)),
            error=value.get("error"),
            object=kind if isinstance(kind, str) else None,
        )

    def _choice(self, value: Fields) -> SentChoice:
        delta = self._delta(value.get("delta"), "delta")
        return SentChoice(
            index=self._side(SideField.INDEX, value.get("index"), integer_of),
            delta=delta,
            message=self._message(value.get("message"), is_beside=delta is not None),
            text=None if delta is not None and delta.content else self._content(value.get("text") or value.get("content"))[0],
            finish_reason=_finish_word_in(value, value.get("delta"), value.get("message")),
            stop_reason=self._side(SideField.STOP_REASON, value.get("stop_reason"), _stop_reason),
            logprobs=self._side(SideField.LOGPROBS, value.get("logprobs") or None, _logprobs),
            usage=self._usage(value.get("usage")),
            error=value.get("error"),
        )

    def _message(self, value: object, *, is_beside: bool) -> SentDelta | None:
        """is_beside: the choice has a delta too"""
        try:
            return self._delta(value, "message")
        except BrokenStream:
            if not is_beside:
                raise
        self.left_out[SideField.CONTENT_PART] += 1
        return None

    def _delta(self, value: object, name: str) -> SentDelta | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise BrokenStream(f"a {name} is no object")
        text, thought = self._content(value.get("content"))
        names = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
        reasoning = next((sent for name in names if (sent := self._side(SideField.REASONING, value.get(name) or None, text_in))), None)
        calls = [self._call(each) for each in _objects(value.get("tool_calls"), "call") or _call_parts(value.get("content"))]
        function = _function(value.get("function_call"))
        refusal = value.get("refusal") or None  # some servers have false where there is none
        return SentDelta(
            content=text,
            refusal=self._side(SideField.REFUSAL, refusal, text_in),
            reasoning_content=reasoning or thought,
            tool_calls=calls,
            function_call=function,
            reasoning_details=value.get("reasoning_details"),
            thinking_blocks=value.get("thinking_blocks"),
            extra_content=value.get("extra_content"),
            provider_specific_fields=value.get("provider_specific_fields"),
        )

    def _side(self, field: SideField, value: object, read: Callable[[object], _Read]) -> _Read | None:
        if value is None:
            return None
        usable = read(value)
        if usable is None:
            self.left_out[field] += 1
        return usable

    def _content(self, value: object) -> tuple[str | None, str | None]:
        """(text, reasoning). Raises BrokenStream."""
        if value is None or value is False:
            return None, None
        if isinstance(value, str):
            return value, None
        text, reasoning = "", ""
        for part in _parts(value):
            kind = part.get("type")
            if _is_reasoning(part):
                thought = self._side(SideField.REASONING, part, text_in)
                reasoning += thought or ""
            elif kind in CALL_PARTS:
                continue  # `_delta` reads it
            elif isinstance(kind, str) and kind not in TEXT_PARTS and not isinstance(part.get("text"), str):
                if part is value:
                    raise BrokenStream("a content is no text")  # this object may be the answer itself
                self.left_out[SideField.CONTENT_PART] += 1
            else:
                text += _needed_text(part)
        return text or None, reasoning or None

    def _call(self, value: Fields) -> SentCall:
        function = value.get("function") or {}
        if isinstance(function, dict):  # some servers send its fields beside `function`
            beside = {name: value.get(name) for name in ("name", *ARGUMENTS)}
            function = beside | {name: each for name, each in function.items() if each is not None}
        sent = _function(function) or SentFunction()
        return SentCall(
            name=sent.name,
            arguments=sent.arguments,
            index=self._side(SideField.INDEX, value.get("index"), integer_of),
            id=self._side(SideField.CALL_ID, value.get("id"), lambda sent: whole_text(sent) if isinstance(sent, str) else None),
            extra_content=value.get("extra_content"),
            provider_specific_fields=value.get("provider_specific_fields"),
        )

    def _usage(self, value: object) -> UsageCounts | None:
        if not value:
            return None
        if not isinstance(value, dict):
            self.left_out[SideField.USAGE] += 1
            return None
        counts = self._counts(value, _COUNTS)
        sent = {name: value[name] for name in _DETAILS if value.get(name) is not None}
        details: dict[str, Any] = {name: TokenDetails(**self._counts(each, TokenDetails.__struct_fields__)) for name, each in sent.items()}
        return UsageCounts(**counts, **details)

    def _counts(self, value: object, names: tuple[str, ...]) -> dict[str, Any]:
        fields = self._side(SideField.USAGE, value, lambda each: each if isinstance(each, dict) else None) or {}
        return {name: self._side(SideField.USAGE, fields.get(name), _tokens) for name in names}


_DETAILS = tuple(name for name in UsageCounts.__struct_fields__ if name.endswith("_details"))
_COUNTS = tuple(name for name in UsageCounts.__struct_fields__ if name not in _DETAILS)


def _tokens(value: object) -> int | None:
    number = count_of(value)
    return number if number is not None and number <= MAX_TOKENS else None


def _objects(value: object, name: str) -> list[Fields]:
    """Also of a single object without the list, and of PHP's object with numbers as keys. Raises BrokenStream."""
    if not value:
        return []
    listed = value
    if isinstance(value, dict):
        listed = list(value.values()) if all(key.isdecimal() for key in value) else [value]
    if not isinstance(listed, list):
        raise BrokenStream(f"the {name}s are no list")
    given = [each for each in listed if each is not None]
    objects = [each for each in given if isinstance(each, dict)]
    if len(objects) < len(given):
        raise BrokenStream(f"a {name} is no object")
    return objects


def _parts(value: object) -> list[Fields]:
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise BrokenStream("a content is no text")
    return _objects([{"text": each} if isinstance(each, str) else each for each in listed], "part of a content")


def _call_parts(content: object) -> list[Fields]:
    parts = [] if content is None or isinstance(content, str | bool) else _parts(content)
    return [part for part in parts if part.get("type") in CALL_PARTS]


def _is_reasoning(part: Fields) -> bool:
    kind = part.get("type")
    if isinstance(kind, str):
        return part.get("thought") is True or any(stem in kind.lower() for stem in REASONING_STEMS)
    return part.get("thought") is True or (part.get("text") is None and any(part.get(name) for name in ("thinking", "reasoning")))


def _needed_text(part: Fields) -> str:
    """Raises BrokenStream."""
    kind = part.get("type")
    if kind == "refusal":
        part = {"refusal": part.get("refusal")}
    given = [part[name] for name in UNTYPED_TEXT if part.get(name) is not None]
    text = text_in(given[0]) if given else None
    if text is None and (given or (kind not in TEXT_PARTS and any(part.values()))):
        raise BrokenStream("a content is no text")
    return text or ""


def _function(value: object) -> SentFunction | None:
    if not value:
        return None
    if not isinstance(value, dict):
        raise BrokenStream("a function is no object")
    name = value.get("name")
    if not isinstance(name, str | None):
        raise BrokenStream("a function's name is no text")
    return SentFunction(None if name is None else whole_text(name), _arguments(value))


def _arguments(function: Fields) -> str | None:
    """Some servers send the object itself. PHP writes an empty object as an empty list."""
    value = next((function[name] for name in ARGUMENTS if function.get(name) is not None), None)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        return json.dumps(value or {}, ensure_ascii=False)
    raise BrokenStream("a call's arguments are no object")


def _finish_word_in(*places: object) -> str | None:
    words = [_finish_word(place.get("finish_reason")) for place in places if isinstance(place, dict)]
    return next((word for word in words if word is not None), None)


def _finish_word(value: object) -> str | None:
    """SGLang writes an object in one of its interfaces; any other value becomes its text."""
    if isinstance(value, dict):
        value = value.get("type")
    if value is None or value is False or isinstance(value, str):
        return whole_text(value) if value else None
    return json.dumps(value)[:MAX_WORD_CHARS]


def _stop_reason(value: object) -> int | str | None:
    if isinstance(value, str):
        return whole_text(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _logprobs(value: object) -> SentLogprobs | None:
    """All entries, or None if one is malformed, since entries must match the text in order."""
    if not isinstance(value, dict):
        return None
    content = value.get("content")
    if content is None:
        return SentLogprobs()
    if not isinstance(content, list):
        return None
    entries = [_chosen(each) for each in content]
    tokens = [each for each in entries if each is not None]
    return SentLogprobs(tokens) if len(tokens) == len(entries) else None


def _chosen(value: object) -> ChosenToken | None:
    token = _token(value)
    if token is None or not isinstance(value, dict):
        return None
    top = value.get("top_logprobs")
    tops = [each for each in map(_token, top) if each is not None] if isinstance(top, list) else []
    return ChosenToken(token.token, token.logprob, token.bytes, tops)


def _token(value: object) -> SentToken | None:
    """The log-probability may be minus infinity."""
    if not isinstance(value, dict):
        return None
    token, logprob, raw = value.get("token"), number_of(value.get("logprob")), value.get("bytes")
    if not isinstance(token, str) or logprob is None:
        return None
    is_bytes = isinstance(raw, list) and all(type(each) is int and 0 <= each <= 255 for each in raw)
    return SentToken(whole_text(token), logprob, raw if is_bytes else None)
