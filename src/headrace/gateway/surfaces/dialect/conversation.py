"""Reads the fields of a body that make a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, field

from headrace.core.errors import InvalidRequest, RequestTooLarge
from headrace.core.tools import MAX_TOOLS, CallMode, FunctionTool, ToolChoice
from headrace.gateway.generation.parsed_request import check_num_messages
from headrace.gateway.surfaces.dialect.field_table import Inside
from headrace.gateway.surfaces.dialect.parse import REQUIRED, ROLES, convert, honoured_fields
from headrace.gateway.surfaces.dialect.reasoning import ReasoningFields, check_reasoning
from headrace.gateway.upstream.generation_request import MARKS, Conversation

MAX_TOOLS_BYTES = 128 << 10
"""A grammar that forces calls holds the schemas again, and has 256 KiB."""

MAX_CALLS = 128
"""In one message of an earlier turn."""

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
    if not isinstance(tools, list):
        return  # a wrong type is refused later
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"at most {MAX_TOOLS} functions", len(tools), "Send those that this turn may need.")
    num_bytes = len(msgspec.json.encode(tools))
    if num_bytes > MAX_TOOLS_BYTES:
        raise RequestTooLarge("tools", f"at most {MAX_TOOLS_BYTES} bytes of JSON", num_bytes, "Shorten schemas and descriptions.")


def function_tools(tools: Sequence[ToolDefinition]) -> list[FunctionTool]:
    """Raises InvalidRequest."""
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
    """Raises InvalidRequest for a required call that cannot be made."""
    if isinstance(given, ChosenTools):
        return _chosen(given, [tool.name for tool in tools], is_parallel=is_parallel)
    mode = CallMode(given) if given else CallMode.AUTO
    if mode is CallMode.REQUIRED and not tools:
        raise InvalidRequest("tool_choice", "tools beside it", given)
    return ToolChoice(mode=mode, is_parallel=is_parallel)


def _chosen(given: ChosenTools, names: Sequence[str], *, is_parallel: bool) -> ToolChoice:
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


PLAIN_MESSAGE = {"role", "content"}

MAX_PARTS = 4096
"""In all messages of a request together: a part costs more memory than its bytes."""


class TextPart(Struct, tag_field="type", tag="text"):
    text: str
    cache_control: Any = UNSET
    prompt_cache_breakpoint: Any = UNSET


class Message(Struct):
    """tool_calls, reasoning_content, reasoning: an assistant's alone. tool_call_id: of the call that a tool answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] = field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Any = UNSET
    thinking_blocks: Any = UNSET
    extra_content: Any = UNSET
    provider_specific_fields: Any = UNSET
    cache_control: Any = UNSET


_MESSAGE_MARKS = tuple(name for name in Message.__struct_fields__ if name in MARKS)
_marks_of = attrgetter(*_MESSAGE_MARKS)
_NO_MARKS = (None, *[UNSET for name in _MESSAGE_MARKS[1:]])


class ConversationFields(ReasoningFields, kw_only=True):
    messages: list[Message]
    tools: list[ToolDefinition] = field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_cache_options: Any = None
    cache_control: Any = None

    def conversation(self) -> Conversation:
        tools = function_tools(self.tools)
        return Conversation(
            messages=template_messages(self.messages),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs,
            tools=tools,
            tool_choice=tool_choice(self.tool_choice, tools, is_parallel=self.parallel_tool_calls),
            switches=self.switches(),
            separates_reasoning=self.separates_reasoning,
            reasoning_fields=self.given(),
        )


def check_conversation(kept: dict[str, object], ignored: dict[str, None]) -> None:
    kept["messages"] = checked_messages(kept.get("messages"), ignored)
    check_reasoning(kept)
    check_tools(kept.get("tools"))
    if isinstance(choice := kept.get("tool_choice"), str) and choice not in CHOICES:
        raise InvalidRequest("tool_choice", f"{', '.join(CHOICES)} or a function of tools", choice)
    if not kept.get("tools"):
        ignored |= dict.fromkeys([name for name in ("tool_choice", "parallel_tool_calls") if name in kept])


def checked_messages(messages: object, ignored: dict[str, None]) -> list[dict[str, object]]:
    """Raises InvalidRequest, which names the message's index."""
    if not isinstance(messages, list) or not messages:
        if messages is None:
            raise InvalidRequest("messages", REQUIRED)
        raise InvalidRequest("messages", "a list of at least one message", messages)
    check_num_messages("messages", len(messages))  # before each of them is read
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = sum([len(content) for content in contents if isinstance(content, list)])
    if num_parts > MAX_PARTS:
        raise InvalidRequest("messages", f"at most {MAX_PARTS} content parts in all", num_parts, "Join the texts.")
    return [_checked_message(message, f"messages[{index}]", ignored) for index, message in enumerate(messages)]


def _checked_message(message: object, prefix: str, ignored: dict[str, None]) -> dict[str, object]:
    if not isinstance(message, dict):
        raise InvalidRequest(prefix, "an object", message)
    if message.keys() == PLAIN_MESSAGE and type(message["content"]) is str and message["role"] in ROLES:
        return message
    for index, part in enumerate(content if isinstance(content := message.get("content"), list) else ()):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or kind is part:
            raise InvalidRequest(f"{prefix}.content[{index}].type", '"text"', kind, "Other modalities are not served.")
    kept = honoured_fields(message, Inside.MESSAGE, ignored, f"{prefix}.")
    _check_message(convert(kept, Message, prefix), prefix)
    return kept


def _check_message(message: Message, prefix: str) -> None:
    if len(message.tool_calls) > MAX_CALLS:
        raise InvalidRequest(f"{prefix}.tool_calls", f"at most {MAX_CALLS} calls", len(message.tool_calls))
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(f"{prefix}.content", REQUIRED)
    if message.reasoning and message.reasoning_content not in (None, message.reasoning):
        raise InvalidRequest(f"{prefix}.reasoning", "the same text as reasoning_content", message.reasoning)
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest(f"{prefix}.tool_call_id", 'role "tool" beside it', message.tool_call_id)
    for name in ("tool_calls", "reasoning_content", "reasoning"):
        if message.role != "assistant" and getattr(message, name):
            raise InvalidRequest(f"{prefix}.{name}", 'role "assistant" beside it', message.role)


def template_messages(messages: Iterable[Message]) -> list[dict[str, object]]:
    """As `headrace.text` takes them. `developer` is OpenAI's newer word for `system`, which templates know, `reasoning` another word for
    `reasoning_content`.
    """
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, object]:
    content: object = message.content
    if isinstance(content, list):
        content = msgspec.to_builtins(content)
    entry: dict[str, object] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_calls:
        entry["tool_calls"] = [{**msgspec.to_builtins(call), "type": call.type} for call in message.tool_calls]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        entry["reasoning_content"] = reasoning
    if (marks := _marks_of(message)) != _NO_MARKS:
        entry |= {name: value for name, value in zip(_MESSAGE_MARKS, marks, strict=True) if value is not UNSET and value is not None}
    return entry
