"""Brings conversations into the one form that templates are given: known roles, text contents, control tokens of users marked.

A control token inside a user's string is put between two private-use characters that occur nowhere in the request, so the marks cannot
be forged. Source: `mark_control_tokens` in transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from headrace.core.errors import InvalidRequest
from headrace.text.tokenizer import any_of, check_text

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Templates paste the role between control characters, so it is never free text."""

Message = Mapping[str, object]
_Call = dict[str, object]


def normal_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Raises InvalidRequest naming the message and field."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages", "a non-empty list of messages", messages)
    return [_normal_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def begun_answer(messages: Sequence[Message], *, continue_final_message: bool) -> str:
    content = messages[-1].get("content") if continue_final_message and messages else None
    return content if isinstance(content, str) else ""


def with_written_arguments(messages: Sequence[Message]) -> list[dict[str, object]]:
    made = [dict(message) for message in messages]
    for message in made:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_with_written_arguments(call) for call in cast(list[_Call], calls)]
    return made


def _with_written_arguments(call: _Call) -> _Call:
    function = cast(Mapping[str, object], call["function"])
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": written}}


def _normal_message(message: object, path: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(path, "an object with role and content", message)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role", f"one of {', '.join(ROLES)}", role)
    normal = dict(message)
    calls = message.get("tool_calls")
    if calls is None:
        normal.pop("tool_calls", None)
    else:
        normal["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    normal["content"] = _content(message.get("content"), f"{path}.content", may_be_empty=bool(calls))
    return normal


def _content(content: object, path: str, *, may_be_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, list | tuple):
        raise InvalidRequest(path, "a string or a list of text parts", content)
    return "\n".join(_part_text(part, f"{path}[{number}]") for number, part in enumerate(content))


def _part_text(part: object, path: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(path, 'an object with type "text"', part)
    if part.get("type") != "text":
        raise InvalidRequest(f"{path}.type", '"text"', part.get("type"), "This model reads text only.")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text", "a string", text)
    return text


def _tool_calls(calls: object, path: str) -> list[dict[str, object]]:
    """A string that holds no JSON object stays a string: the model has to see it again beside the tool's complaint."""
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(path, "a list of tool calls", calls)
    return [_tool_call(call, f"{path}[{number}]") for number, call in enumerate(calls)]


def _tool_call(call: object, path: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(path, "an object with a function that has a name", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object(arguments)
    elif not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{path}.function.arguments", "a JSON object written as a string", arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _object(arguments: str) -> object:
    try:
        value: object = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


MAX_DEPTH = 64
"""Deeper nesting would exhaust Python's stack."""
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD


@dataclass(frozen=True, slots=True)
class Marks:
    start: str
    end: str

    @classmethod
    def absent_from(cls, strings: Iterable[str]) -> Marks:
        seen = {char for text in strings for char in text if char >= chr(_FIRST_MARK)}
        free = (chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in seen)
        start, end = next(free, ""), next(free, "")
        if not end:
            raise InvalidRequest("messages", "fewer different private-use characters", len(seen))
        return cls(start, end)

    def mark(self, value: object, pattern: re.Pattern[str]) -> object:
        if isinstance(value, str):
            return pattern.sub(f"{self.start}\\1{self.end}", value)
        if isinstance(value, Mapping):
            return {self.mark(key, pattern): self.mark(item, pattern) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, pattern) for item in value]
        return value

    def split(self, rendered: str, tokens: tuple[str, ...]) -> list[tuple[str, bool]]:
        """(piece, is_plain) parts of a rendered text, with marks removed.

        Lone marks are dropped but still cut the text: no control token joins across them.
        """
        pair = re.compile(f"{self.start}{any_of(tokens).pattern}{self.end}|[{self.start}{self.end}]")
        parts: list[str | None] = pair.split(rendered)
        return [(part, number % 2 == 1) for number, part in enumerate(parts) if part]


def strings_in(value: object, path: str, depth: int = 0) -> Iterator[str]:
    """Strings of keys included. Raises InvalidRequest for a lone surrogate, nesting beyond MAX_DEPTH, or a value that is not JSON."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(path[:200], f"at most {MAX_DEPTH} levels of nesting")
    if isinstance(value, str):
        check_text(value, path)
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidRequest(path, "an object with string keys", key)
            yield from strings_in(key, path, depth + 1)
            yield from strings_in(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from strings_in(item, f"{path}[{number}]", depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise InvalidRequest(path, "JSON values only", type(value).__name__)


def marked_objects(marks: Marks, items: Sequence[Mapping[str, object]], patterns: Sequence[re.Pattern[str]]) -> list[dict[str, object]]:
    return [cast("dict[str, object]", marks.mark(item, pattern)) for item, pattern in zip(items, patterns, strict=True)]
