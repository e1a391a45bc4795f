"""Reads the functions in a chat's body: the wire types of `tools`, `tool_choice` and of calls in messages, and their checks.

They become values of `core.tools`. `text.output` knows the form of a call in the model's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct

from headrace.core.errors import InvalidRequest, RequestTooLarge
from headrace.core.tools import MAX_TOOLS, CallMode, FunctionTool, ToolChoice

MAX_TOOLS_BYTES = 128 << 10
"""Bytes of `tools` as JSON. A grammar that forces calls holds the schemas again, and has 256 KiB."""

MAX_CALLS = 128
"""Calls in one message of an earlier turn."""

CHOICES = ("none", "auto", "required")
FUNCTION, ALLOWED = "function", "allowed_tools"


class FunctionDefinition(Struct, omit_defaults=True):
    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False
    cache_control: Any = None


class ToolDefinition(Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"
    cache_control: Any = None


class FunctionName(Struct):
    name: str


class NamedTool(Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ChosenTools(Struct):
    """`tool_choice` as an object: one function, or some of them. The field of its type's name is required."""

    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    type: Literal["function", "allowed_tools"] = "function"


class CalledFunction(Struct):
    """arguments: a JSON object as text"""

    name: str
    arguments: str = ""
    provider_specific_fields: Any = UNSET


class EarlierCall(Struct, omit_defaults=True):
    """A call that the model made in an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    extra_content: Any = UNSET
    provider_specific_fields: Any = UNSET
    cache_control: Any = UNSET


def check_tools(tools: object) -> None:
    """Raises InvalidRequest or RequestTooLarge for a list of functions that is too large."""
    if not isinstance(tools, list):
        return  # a wrong type is refused later
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"at most {MAX_TOOLS} functions", len(tools), "Send those that this turn may need.")
    num_bytes = len(msgspec.json.encode(tools))
    if num_bytes > MAX_TOOLS_BYTES:
        raise RequestTooLarge("tools", f"at most {MAX_TOOLS_BYTES} bytes of JSON", num_bytes, "Shorten schemas and descriptions.")


def function_tools(tools: Sequence[ToolDefinition]) -> list[FunctionTool]:
    """The functions as values. Raises InvalidRequest for parameters that are no object, and for a name that is invalid or given
    twice."""
    made: dict[str, FunctionTool] = {}
    for number, tool in enumerate(tools):
        path, given = f"tools[{number}].{FUNCTION}", tool.function
        if given.parameters and (kind := given.parameters.get("type", "object")) != "object":
            raise InvalidRequest(f"{path}.parameters.type", '"object"', kind, "Arguments are an object.")
        function = FunctionTool(
            name=given.name,
            description=given.description,
            parameters=given.parameters,
            is_strict=given.strict,
            cache_control=tool.cache_control,
            function_cache_control=given.cache_control,
        )
        made.setdefault(function.checked(field=path).name, function)
        if made[function.name] is not function:
            raise InvalidRequest(f"{path}.name", "a name that no other function has", given.name)
    return list(made.values())


def tool_choice(given: str | ChosenTools | None, tools: Sequence[FunctionTool], *, is_parallel: bool) -> ToolChoice:
    """The tool choice as a value. Raises InvalidRequest for a required call that cannot be made."""
    if isinstance(given, ChosenTools):
        return _chosen(given, [tool.name for tool in tools], is_parallel=is_parallel)
    mode = CallMode(given) if given else CallMode.AUTO
    if mode is CallMode.REQUIRED and not tools:
        raise InvalidRequest("tool_choice", "tools beside it", given)
    return ToolChoice(mode=mode, is_parallel=is_parallel)


def _chosen(given: ChosenTools, names: Sequence[str], *, is_parallel: bool) -> ToolChoice:
    """`tool_choice` in object form. names: names of the request's functions. Raises InvalidRequest."""
    function, allowed = given.function, given.allowed_tools
    if (function is None) is (given.type == FUNCTION) or (allowed is None) is (given.type == ALLOWED):
        raise InvalidRequest(f"tool_choice.{given.type}", f"an object, and nothing else beside the type {given.type}", None)
    if function is not None:
        _check_offered(f"tool_choice.{FUNCTION}.name", function.name, names)
        return ToolChoice(mode=CallMode.REQUIRED, name=function.name, is_parallel=False)
    assert allowed is not None
    if not allowed.tools:
        raise InvalidRequest(f"tool_choice.{ALLOWED}.tools", "at least one function of tools", [])
    for number, tool in enumerate(allowed.tools):
        _check_offered(f"tool_choice.{ALLOWED}.tools[{number}].{FUNCTION}.name", tool.function.name, names)
    chosen = frozenset([tool.function.name for tool in allowed.tools])
    return ToolChoice(mode=CallMode(allowed.mode), allowed=chosen, is_parallel=is_parallel)


def _check_offered(path: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise InvalidRequest(path, "a function of tools", name)
