"""Reads the fields of a body that make a conversation: messages, functions, the control of reasoning, and the prompt that they ask for."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, field

from headrace.core.errors import InvalidRequest
from headrace.gateway.generation.parsed_request import check_num_messages
from headrace.gateway.surfaces.dialect.field_table import Inside
from headrace.gateway.surfaces.dialect.parse import REQUIRED, ROLES, convert, honoured_fields
from headrace.gateway.surfaces.dialect.reasoning import ReasoningFields, check_reasoning
from headrace.gateway.surfaces.dialect.tools import (
    CHOICES,
    MAX_CALLS,
    ChosenTools,
    EarlierCall,
    ToolDefinition,
    check_tools,
    function_tools,
    tool_choice,
)
from headrace.gateway.upstream.generation_request import MARKS, Conversation

PLAIN_MESSAGE = {"role", "content"}
"""The fields of nearly every message, which need no look-up in the field table."""

MAX_PARTS = 4096
"""Content parts of all messages of a request together: a part costs more memory than its bytes."""


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
        """The conversation. Raises InvalidRequest for functions that cannot be offered, and for a required call that cannot be made."""
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
    """Check the honoured fields of a body that `ConversationFields` describes. Raises InvalidRequest."""
    kept["messages"] = checked_messages(kept.get("messages"), ignored)
    check_reasoning(kept)
    check_tools(kept.get("tools"))
    if isinstance(choice := kept.get("tool_choice"), str) and choice not in CHOICES:
        raise InvalidRequest("tool_choice", f"{', '.join(CHOICES)} or a function of tools", choice)
    if not kept.get("tools"):
        ignored |= dict.fromkeys([name for name in ("tool_choice", "parallel_tool_calls") if name in kept])


def checked_messages(messages: object, ignored: dict[str, None]) -> list[dict[str, object]]:
    """Messages with their honoured fields, each of the right type. Raises InvalidRequest, which names the message's index."""
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
    """Check one message. Raises InvalidRequest."""
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
    """Messages as `headrace.text` takes them. `developer` is OpenAI's newer word for `system`, which templates know; `reasoning` is
    another word for `reasoning_content`. What only foreign servers read stands beside these fields."""
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
