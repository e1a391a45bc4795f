"""A decoded body -> a request that cannot be wrong. Types by msgspec, fields by `dialect.fields`, rules by `core.sampling`.

What several surfaces share. Nothing here depends on the model: `upstream.tokens` adds the model's own defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from headrace.core.counted import counted
from headrace.core.errors import InvalidRequest
from headrace.core.request import PriorityClass
from headrace.core.sampling import FROM_MODEL, check_bound
from headrace.gateway.http.config import Limits
from headrace.gateway.surfaces.dialect.field_rule import Inside, Surface
from headrace.gateway.surfaces.dialect.fields import check_inert, honoured_fields, unknown_field
from headrace.gateway.surfaces.dialect.reasoning import checked_reasoning
from headrace.gateway.surfaces.dialect.schemas import Message, SamplingFields
from headrace.gateway.surfaces.dialect.tools import checked_calls, checked_choice, checked_tools

T = TypeVar("T", bound=msgspec.Struct)

MAX_CACHE_SALT_CHARS = 256
REQUIRED = "a value (it is required)"
ROLES = ("system", "developer", "user", "assistant", "tool")
PLAIN_MESSAGE, PLAIN_PART = {"role", "content"}, {"type", "text"}
"""The fields of nearly every message and part, which need no look-up in the field table."""

MAX_PARTS = 4096
"""Content parts of all messages of a request together: a part costs more memory than its bytes."""

AS_GIVEN: tuple[str, ...] = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "prompt_logprobs",
)
AS_GIVEN += ("include_stop_str_in_output", "skip_special_tokens")

_as_given_of, _from_model_of = attrgetter(*AS_GIVEN), attrgetter(*FROM_MODEL)

_PATH = re.compile(r"(?P<what>.*?)(?: - at (?P<is_key>`key` in )?`\$\.?(?P<path>.*)`)?\Z", re.DOTALL)
_EXPECTED = re.compile(r"Expected (?P<kinds>`[^`]*`)(?:, got .*)?\Z", re.DOTALL)
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_ANY_KEY = "[...]"
"""How msgspec writes the place of a map's value, without its key."""
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)


PRIORITIES: Mapping[int | str, PriorityClass] = {member.name.lower(): member for member in PriorityClass} | {
    int(member): member for member in PriorityClass if member
}
"""Values of a body's `priority`. 0, vLLM's default, is none of them: it asks for nothing."""


class FieldsAsWritten:
    """Renames the field of an InvalidRequest that is raised inside to the name that this client used for it."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        """names: `prompt`, `max_tokens`, `logprobs` or `grammar`, as rules below this floor name them -> the client's name"""
        self._names = names

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        name = self._names.get(error.field) if isinstance(error, InvalidRequest) else None
        if name is None or not isinstance(error, InvalidRequest):
            return
        limit, remedy = error.limit, error.remedy
        if error.field not in ("prompt", "grammar"):  # rules use these as plain words, too
            limit, remedy = limit.replace(error.field, name), remedy.replace(error.field, name)
        raise type(error)(name, limit, error.given, remedy) from error


def given_params(request: SamplingFields) -> dict[str, Any]:
    """The sampling parameters that both surfaces name alike, by the names of `SamplingParams`. Those of FROM_MODEL that the client left out
    are left out.
    """
    given: dict[str, Any] = dict(zip(AS_GIVEN, _as_given_of(request), strict=True))
    given |= {name: value for name, value in zip(FROM_MODEL, _from_model_of(request), strict=True) if value is not None}
    given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    given["stop_token_ids"] = tuple(request.stop_token_ids)
    return given


def lowered_priority(given: int | str | None, own: PriorityClass) -> PriorityClass:
    """The priority class of a request: its key's, or a lower one that the body names. Raises InvalidRequest for a higher one."""
    if given is None:
        return own
    wanted = PRIORITIES.get(given)
    if wanted is None:
        raise InvalidRequest("priority", "premium, standard or batch (or 1, 2 for the last two; 0 asks for nothing)", given)
    if wanted < own:
        raise InvalidRequest("priority", f"not above this key's class ({own.name.lower()})", given, "A request may only lower it.")
    return wanted


def surface_fields(body: Mapping[str, object], surface: Surface, limits: Limits, ignored: dict[str, None]) -> dict[str, object]:
    """The honoured fields of a body and of the objects in it. See `fields.honoured_fields`."""
    kept = honoured_fields(body, surface, ignored)
    if surface is Surface.CHAT:
        kept["messages"] = checked_messages(kept.get("messages"), limits, ignored)
        kept |= checked_reasoning(kept, ignored)
        if "metadata" in kept:
            check_inert("metadata", kept["metadata"])
            if kept["metadata"].keys() != {"session_id"}:  # type: ignore[attr-defined]  # it is checked to be an object
                ignored["metadata"] = None
        for name, checked in (("tools", checked_tools), ("tool_choice", checked_choice)):
            if name in kept:
                kept[name] = checked(kept[name], ignored)
        if not kept.get("tools"):
            ignored |= dict.fromkeys([name for name in ("tool_choice", "parallel_tool_calls") if name in kept])
    for place in (Inside.STREAM_OPTIONS, Inside.STRUCTURED_OUTPUTS, Inside.RESPONSE_FORMAT, Inside.CACHE):
        if place in kept and isinstance(inside := kept[place], dict):
            kept[place.value] = honoured_fields(inside, place, ignored, f"{place}.")
    response_format = kept.get("response_format")
    if isinstance(response_format, dict) and isinstance(inside := response_format.get("json_schema"), dict):
        response_format["json_schema"] = honoured_fields(inside, Inside.JSON_SCHEMA, ignored, f"{Inside.JSON_SCHEMA}.")
    return kept


def checked_messages(messages: object, limits: Limits, ignored: dict[str, None]) -> list[dict[str, object]]:
    """Messages with their honoured fields, each of the right type. Raises InvalidRequest, which names the message's index."""
    if not isinstance(messages, list) or not messages:
        if messages is None:
            raise InvalidRequest("messages", REQUIRED)
        raise InvalidRequest("messages", "a list of at least one message", messages)
    if len(messages) > limits.max_messages:
        raise InvalidRequest("messages", f"at most {limits.max_messages} messages", len(messages), "Drop the oldest ones.")
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = sum([len(content) for content in contents if isinstance(content, list)])
    if num_parts > MAX_PARTS:
        raise InvalidRequest("messages", f"at most {MAX_PARTS} content parts in all", num_parts, "Join the texts.")
    return [_checked_message(message, f"messages[{index}]", ignored) for index, message in enumerate(messages)]


def _checked_message(message: object, prefix: str, ignored: dict[str, None]) -> dict[str, object]:
    if not isinstance(message, dict):
        raise InvalidRequest(prefix, "an object", message)
    is_plain = message.keys() == PLAIN_MESSAGE
    if is_plain and type(message["content"]) is str and message["role"] in ROLES:
        return message
    kept = message if is_plain else honoured_fields(message, Inside.MESSAGE, ignored, f"{prefix}.")
    if isinstance(content := kept.get("content"), list):
        parts = [_checked_part(part, f"{prefix}.content[{index}]", ignored) for index, part in enumerate(content)]
        kept = {**kept, "content": parts}
    if "tool_calls" in kept:
        kept = {**kept, "tool_calls": checked_calls(kept["tool_calls"], f"{prefix}.tool_calls", ignored)}
    _check_message(convert(kept, Message, prefix), prefix)
    return kept


def _check_message(message: Message, prefix: str) -> None:
    """The rules between a message's fields. Raises InvalidRequest."""
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(f"{prefix}.content", REQUIRED)
    if message.reasoning and message.reasoning_content not in (None, message.reasoning):
        raise InvalidRequest(f"{prefix}.reasoning", "the same text as reasoning_content", message.reasoning)
    if message.role == "assistant":
        if message.tool_call_id is not None:
            raise InvalidRequest(f"{prefix}.tool_call_id", 'role "tool" beside it', message.tool_call_id)
        return
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest(f"{prefix}.tool_call_id", 'role "tool" beside it', message.tool_call_id)
    for name in ("tool_calls", "reasoning_content", "reasoning"):
        if getattr(message, name):
            raise InvalidRequest(f"{prefix}.{name}", 'role "assistant" beside it', message.role)


def _checked_part(part: object, path: str, ignored: dict[str, None]) -> object:
    """A content part. Raises InvalidRequest, which names an image where msgspec's union error would not."""
    kind = part.get("type") if isinstance(part, dict) else part
    if kind != "text" or not isinstance(part, dict):
        raise InvalidRequest(f"{path}.type", '"text"', kind, "Other modalities are not served.")
    return part if part.keys() == PLAIN_PART else honoured_fields(part, Inside.PART, ignored, f"{path}.")


def template_messages(messages: Iterable[Message]) -> list[dict[str, object]]:
    """Messages as `headrace.text` takes them. `developer` is OpenAI's newer word for `system`, which templates know; `reasoning` is
    another word for `reasoning_content`."""
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, object]:
    content: object = message.content
    if isinstance(content, list):
        content = [{"type": "text", "text": part.text} for part in content]
    entry: dict[str, object] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_calls:
        entry["tool_calls"] = [{**msgspec.to_builtins(call), "type": call.type} for call in message.tool_calls]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        entry["reasoning_content"] = reasoning
    return entry


def convert(data: object, kind: type[T], prefix: str = "") -> T:
    """msgspec's strict conversion with our errors."""
    try:
        return msgspec.convert(data, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _translated(str(error), data, kind, prefix) from None
    except OverflowError:
        raise InvalidRequest(prefix or "body", "numbers of reasonable size") from None


def check_shared(request: SamplingFields, limits: Limits, num_prompts: int = 1) -> None:
    if request.stream_options is not None:
        if not request.stream:
            raise InvalidRequest("stream_options", "stream = true beside it")
        if request.stream_options.continuous_usage_stats and not request.stream_options.include_usage:
            raise InvalidRequest("stream_options.continuous_usage_stats", "include_usage = true beside it", True)
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "stream = false beside it", request.prompt_logprobs)
    check_bound("n", request.n)
    if num_prompts * request.n > limits.max_sequences:
        rule = f"at most {counted(limits.max_sequences, 'sequence')} (prompts times n)"
        raise InvalidRequest("n", rule, num_prompts * request.n, "Send several requests.")
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequest("cache_salt", f"at most {MAX_CACHE_SALT_CHARS} characters", len(request.cache_salt))


def _translated(message: str, data: object, kind: type[msgspec.Struct], prefix: str) -> InvalidRequest:
    """msgspec's sentence as field, limit and value."""
    match = _PATH.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    field = ".".join(part for part in (prefix, path) if part)
    if match and match["is_key"]:  # logit_bias is the only map whose keys are no strings
        return InvalidRequest(field, "token ids as keys", _odd_key(_value_at(data, path)))
    if missing := _MISSING.match(what):
        return InvalidRequest(".".join(part for part in (field, missing["name"]) if part), REQUIRED)
    if unknown := _UNKNOWN.match(what):
        return unknown_field(unknown["name"], kind.__struct_fields__, f"{field}." if field else "")
    if path.endswith(_ANY_KEY):  # a map of numbers, logit_bias: say which one is none
        values = _value_at(data, path.removesuffix(_ANY_KEY))
        odd = [key for key, value in values.items() if type(value) not in (int, float)] if isinstance(values, dict) else []
        field, path = (f"{field.removesuffix(_ANY_KEY)}.{odd[0]}", f"{path.removesuffix(_ANY_KEY)}.{odd[0]}") if odd else (field, path)
    return InvalidRequest(field or "body", _limit(what), _value_at(data, path))


def _odd_key(values: object) -> object:
    """The first key of a map that is no integer."""
    return next((key for key in values if not re.fullmatch(r"-?[0-9]+", str(key))), None) if isinstance(values, dict) else None


def _limit(what: str) -> str:
    """msgspec's "Expected `int | str`, got `bool`" as a rule in words; its other sentences without the quotes."""
    if what.startswith("Invalid enum value"):
        return "one of " + ", ".join(ROLES)
    expected = _EXPECTED.match(what)
    if expected is None:
        return what.replace("`", "'")[:1].lower() + what.replace("`", "'")[1:]
    kinds = [_KINDS.get(kind.strip(), kind.strip()) for kind in expected["kinds"].strip("`").split("|")]
    return " or ".join(kinds)


def _value_at(data: object, path: str) -> object:
    """The client's value at a path of names and indices; None, which is not shown, where the path does not lead to one value."""
    for name, index in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", path):
        if name and isinstance(data, dict):
            data = data.get(name)
        elif index.isdigit() and isinstance(data, list) and int(index) < len(data):
            data = data[int(index)]
        else:
            return None
    return data
