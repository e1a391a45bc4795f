"""Renders chat templates: Jinja in an immutable sandbox, with what transformers' `apply_chat_template` gives templates.

A template is a program: the sandbox keeps it away from the process, and the caller bounds its time and memory (`gateway.text_workers`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Most templates read the first name, those of gpt-oss the second."""

END_OF_FINAL_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "
"""The rendered text is cut off here; the template may strip the space."""


def render(source: str, messages: Sequence[Mapping[str, object]], /, *, continue_final_message: bool = False, **variables: object) -> str:
    """Null fields of messages count as absent.

    continue_final_message  end the text with the last message's content, which must be a string

    Raises TemplateSyntaxError if the template is no Jinja, TemplateError if it refuses the conversation, and any error of Python in it.
    """
    template = compiled(source)
    chat = [_with_reasoning(_plain_object(_set_fields(message))) for message in messages]
    final = str(chat[-1]["content"]) if continue_final_message else ""
    if continue_final_message:
        chat[-1]["content"] = final + END_OF_FINAL_MESSAGE
    text = template.render(messages=chat, **_plain_object(variables))
    return _cut_after(text, final) if continue_final_message else text


@lru_cache(maxsize=64)
def compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _DictMaker(), "namespace": _PublicNamespace}
    return environment.from_string(source)


def _cut_after(text: str, final: str) -> str:
    tag = END_OF_FINAL_MESSAGE.strip()
    if final.strip() not in text or tag not in text:
        raise TemplateError("the final message is not in the rendered conversation, so that it cannot be continued")
    end = text.rindex(tag)
    kept = text[:end]
    return kept if text.startswith(END_OF_FINAL_MESSAGE, end) else kept.rstrip()


def _set_fields(message: Mapping[str, object]) -> dict[str, object]:
    """Templates test whether a field is defined; clients send back nulls."""
    return {name: value for name, value in message.items() if value is not None}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_object(value: Mapping[str, object]) -> dict[str, Any]:
    return {str(key): _plain(item) for key, item in value.items()}


def _plain(value: object) -> object:
    """A copy in Python's own JSON types: a template could call methods of others."""
    if isinstance(value, Mapping):
        return _plain_object(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


# -- what templates may use --------------------------------------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the model's own text for training."""

    tags: set[str] = {"generation"}  # noqa: RUF012 # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _DictMaker:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _PublicNamespace(Namespace):
    """Refuses names with a leading underscore, which would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have an attribute {name!r}")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
