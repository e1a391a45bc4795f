"""Brings conversations into the one form that templates are given: known roles, text contents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from headrace.core.errors import InvalidRequest

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
        found: object = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
