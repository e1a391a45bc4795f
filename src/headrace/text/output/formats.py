"""The table of output formats: how each family of models marks reasoning and writes tool calls. One row per format.

A row is chosen by the name that vLLM gives its parser, or by what the model's chat template mentions. Formats whose calls no `CallSyntax`
describes (gpt-oss's channels) have no row: requests with functions are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from headrace.core.errors import ConfigError
from headrace.core.grammar import ReasoningSpan

AUTO, OFF = "auto", "none"
"""Names beside those of the rows: the row that the chat template asks for, and no row at all."""


class CallSyntax(StrEnum):
    """How calls are written between a format's markers."""

    JSON_OBJECT = "json_object"
    """{"name": "f", "arguments": {...}}; further objects may follow after the row's separator."""
    JSON_LIST = "json_list"
    """A list of such objects."""
    NAMED = "named"
    """f[ARGS]{...}, each call after a marker of its own. A list after the marker is read as JSON_LIST."""
    PYTHON = "python"
    """[f(a=1), g()]: calls as Python writes them, with literals for arguments."""
    TAGGED = "tagged"
    """Calls between tags of their own (`CallTags`), several in one section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """How a call of CallSyntax.TAGGED is spelled, as the family writes it. White space around tags is optional where calls are read.

    call_start, name_end  texts before a function's name and after it; empty: there are none
    key_start, key_end    texts around a parameter's name; empty: the arguments are one JSON object
    value_start           text before a parameter's value, behind `key_end`; empty: there is none
    value_end             text after a value. Strings stand without quotes, other values as JSON
    call_end              text after a call; empty: the section's end marker is the call's
    is_shared             one section holds all calls of an output; else each call has a section of its own
    """

    call_start: str = ""
    name_end: str = ""
    key_start: str = ""
    key_end: str = ""
    value_start: str = ""
    value_end: str = ""
    call_end: str = ""
    is_shared: bool = False

    @property
    def padding(self) -> str:
        """The line break on both sides of a value, which belongs to the format."""
        return "\n" if self.value_end.startswith("\n") else ""

    @property
    def texts(self) -> tuple[str, ...]:
        return self.call_start, self.name_end, self.key_start, self.key_end, self.value_start, self.value_end, self.call_end

    def stripped(self) -> CallTags:
        """The tags without the white space around them."""
        call_start, name_end, key_start, key_end, value_start, value_end, call_end = [text.strip() for text in self.texts]
        return CallTags(
            call_start=call_start,
            name_end=name_end,
            key_start=key_start,
            key_end=key_end,
            value_start=value_start,
            value_end=value_end,
            call_end=call_end,
            is_shared=self.is_shared,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Free text before the answer.

    start, end   the texts around it; it is recognized at the beginning of the output alone
    begins_open  the output begins inside it, whatever the prompt ends with
    hint         text of a chat template that asks for this row
    """

    name: str
    start: str
    end: str
    begins_open: bool = False
    hint: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a detokenizer must keep even where they are special tokens."""
        return self.start, self.end

    def span(self, *, is_open: bool) -> ReasoningSpan:
        """is_open: the prompt has opened it (`is_opened_by`)"""
        return ReasoningSpan(start=self.start, end=self.end, is_open=is_open or self.begins_open)

    def is_opened_by(self, prompt_end: str) -> bool:
        """Whether the reasoning has begun at the end of a prompt. A start marker further up is part of a message and opens nothing."""
        return prompt_end.rstrip().endswith(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How tool calls are written.

    start, end       texts around calls; an empty `end` is none
    is_bare          calls may stand at the beginning of the output without `start`; an empty `start` means that they only do so
    separator        text between two JSON objects of one section (empty: an object ends its section), or between two TAGGED calls
    arguments_key    name of a JSON call's arguments as the family writes it; both "arguments" and "parameters" are read
    padding          white space inside the markers and between sections, as the family writes it
    family           name that chooses among several rows, by what the template asks for; empty: the row's own name
    tags             with CallSyntax.TAGGED: the texts inside a section
    call_id_chars    exact length of a call's id where the family's template demands one
    hints, unless    the chat template asks for this row if it has any of `hints` and none of `unless`
    """

    name: str
    syntax: CallSyntax
    start: str = ""
    end: str = ""
    is_bare: bool = False
    separator: str = ""
    arguments_key: str = "arguments"
    padding: str = ""
    family: str = ""
    call_id_chars: int | None = None
    tags: CallTags | None = None
    hints: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """As `ReasoningFormat.markers`."""
        named = ARGUMENTS_MARKERS if self.syntax is CallSyntax.NAMED else ()
        inside = _TAG.findall("".join(self.tags.texts)) if self.tags is not None else ()
        return tuple(dict.fromkeys([marker for marker in (self.start, self.end, *named, *inside) if marker]))


ARGUMENTS_MARKER, CALL_ID_MARKER = "[ARGS]", "[CALL_ID]"
"""In CallSyntax.NAMED: between name and arguments, and before an id that the model gives the call."""
ARGUMENTS_MARKERS = (ARGUMENTS_MARKER, CALL_ID_MARKER)

_TAG = re.compile(r"<[^<>=\s]+>")
"""What may be a token of its own within `CallTags`."""


def _deepseek(name: str) -> str:
    """DeepSeek's markers have a full-width bar and the lower block that SentencePiece writes for a space."""
    return f"<\uff5ctool\u2581{name.replace(' ', chr(0x2581))}\uff5c>"


REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        row.name: row
        for row in (
            ReasoningFormat(name="qwen3", start="<think>", end="</think>", hint="</think>"),
            ReasoningFormat(name="deepseek_r1", start="<think>", end="</think>", begins_open=True),
            ReasoningFormat(name="mistral", start="[THINK]", end="[/THINK]", hint="[THINK]"),
            ReasoningFormat(name="seed_oss", start="<seed:think>", end="</seed:think>", hint="</seed:think>"),
            ReasoningFormat(name="reasoning", start="<reasoning>", end="</reasoning>", hint="<reasoning>"),
        )
    }
)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        row.name: row
        for row in (
            ToolFormat(
                name="hermes",
                syntax=CallSyntax.JSON_OBJECT,
                start="<tool_call>",
                end="</tool_call>",
                padding="\n",
                hints=("<tool_call>",),
                unless=("<function=", "<arg_key>"),
            ),
            ToolFormat(
                name="llama3_json",
                syntax=CallSyntax.JSON_OBJECT,
                start="<|python_tag|>",
                is_bare=True,
                separator="; ",
                arguments_key="parameters",
                hints=("<|python_tag|>", '{"name": function name, "parameters":'),
                unless=("<|python_start|>",),
            ),
            ToolFormat(
                name="mistral",
                syntax=CallSyntax.JSON_LIST,
                start="[TOOL_CALLS]",
                call_id_chars=9,
                hints=("[TOOL_CALLS]",),
                unless=(ARGUMENTS_MARKER,),
            ),
            ToolFormat(
                name="mistral_named",
                syntax=CallSyntax.NAMED,
                start="[TOOL_CALLS]",
                family="mistral",
                call_id_chars=9,
                hints=(ARGUMENTS_MARKER,),
            ),
            ToolFormat(name="pythonic", syntax=CallSyntax.PYTHON, is_bare=True, hints=("[func_name1(",), unless=("<|python_start|>",)),
            ToolFormat(
                name="llama4_pythonic",
                syntax=CallSyntax.PYTHON,
                start="<|python_start|>",
                end="<|python_end|>",
                is_bare=True,
                hints=("<|python_start|>",),
            ),
            ToolFormat(name="granite", syntax=CallSyntax.JSON_LIST, start="<|tool_call|>", hints=("<|tool_call|>",)),
            ToolFormat(
                name="jamba",
                syntax=CallSyntax.JSON_LIST,
                start="<tool_calls>",
                end="</tool_calls>",
                hints=("<tool_calls>",),
                unless=('<tool_calls>\\n{"name"',),
            ),
            ToolFormat(
                name="qwen3_coder",
                syntax=CallSyntax.TAGGED,
                start="<tool_call>",
                end="</tool_call>",
                separator="\n",
                padding="\n",
                tags=CallTags(
                    call_start="<function=",
                    name_end=">\n",
                    key_start="<parameter=",
                    key_end=">\n",
                    value_end="\n</parameter>\n",
                    call_end="</function>",
                ),
                hints=("<function=",),
            ),
            ToolFormat(
                name="glm45",
                syntax=CallSyntax.TAGGED,
                start="<tool_call>",
                end="</tool_call>",
                separator="\n",
                tags=CallTags(
                    name_end="\n",
                    key_start="<arg_key>",
                    key_end="</arg_key>\n",
                    value_start="<arg_value>",
                    value_end="</arg_value>\n",
                ),
                hints=("<arg_key>",),
            ),
            ToolFormat(
                name="minimax_m2",
                syntax=CallSyntax.TAGGED,
                start="<minimax:tool_call>",
                end="</minimax:tool_call>",
                separator="\n",
                padding="\n",
                tags=CallTags(
                    call_start='<invoke name="',
                    name_end='">\n',
                    key_start='<parameter name="',
                    key_end='">',
                    value_end="</parameter>\n",
                    call_end="</invoke>",
                    is_shared=True,
                ),
                hints=("<minimax:tool_call>",),
            ),
            ToolFormat(
                name="deepseek_v31",
                syntax=CallSyntax.TAGGED,
                start=_deepseek("calls begin"),
                end=_deepseek("calls end"),
                tags=CallTags(
                    call_start=_deepseek("call begin"), name_end=_deepseek("sep"), call_end=_deepseek("call end"), is_shared=True
                ),
                hints=(_deepseek("calls begin"),),
                unless=("```json",),
            ),
            ToolFormat(
                name="deepseek_v3",
                syntax=CallSyntax.TAGGED,
                start=_deepseek("calls begin"),
                end=_deepseek("calls end"),
                separator="\n",
                tags=CallTags(
                    call_start=f"{_deepseek('call begin')}function{_deepseek('sep')}",
                    name_end="\n```json\n",
                    call_end=f"\n```{_deepseek('call end')}",
                    is_shared=True,
                ),
                hints=(_deepseek("calls begin"),),
            ),
            ToolFormat(
                name="minimax",
                syntax=CallSyntax.JSON_OBJECT,
                start="<tool_calls>",
                end="</tool_calls>",
                separator="\n",
                padding="\n",
                hints=('<tool_calls>\\n{"name"',),
            ),
            ToolFormat(name="phi4_mini_json", syntax=CallSyntax.JSON_LIST, start="functools", hints=("functools[",)),
        )
    }
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {"llama4_json": "llama3_json", "qwen": "hermes", "qwen3_xml": "qwen3_coder", "glm47": "glm45"}
    | {"deepseek_v3": "qwen3", "deepseek_v31": "qwen3", "glm45": "qwen3", "minimax_m2": "deepseek_r1"}
)
"""Other names of rows; where a table has a row of the name itself, that one is meant."""


def reasoning_format(name: str, templates: Iterable[str], *, where: str = "reasoning_parser") -> ReasoningFormat | None:
    """The row called `name`; for AUTO the one that the model's chat templates ask for, if any does. None for OFF.

    Raises ConfigError at `where` for an unknown name, listing those that exist.
    """
    if name == AUTO:
        text = "\0".join(templates)
        return next((row for row in REASONING_FORMATS.values() if row.hint and row.hint in text), None)
    return None if name == OFF else REASONING_FORMATS[_known(name, REASONING_FORMATS, where)]


def tool_format(name: str, templates: Iterable[str], *, where: str = "tool_call_parser") -> ToolFormat | None:
    """As `reasoning_format`, for tool calls."""
    if name == OFF:
        return None
    text = "\0".join(templates)
    asked_for = [row for row in TOOL_FORMATS.values() if _is_asked_for(row, text)]
    if name == AUTO:
        return asked_for[0] if asked_for else None
    name = _known(name, TOOL_FORMATS, where)
    return next((row for row in asked_for if row.family == name), TOOL_FORMATS[name])


def _is_asked_for(row: ToolFormat, template: str) -> bool:
    return any(hint in template for hint in row.hints) and not any(marker in template for marker in row.unless)


def _known(name: str, rows: Mapping[str, ReasoningFormat] | Mapping[str, ToolFormat], where: str) -> str:
    """The row's own name. Raises ConfigError for one that there is not."""
    found = name if name in rows else ALIASES.get(name, name)
    if found not in rows:
        known = [AUTO, OFF, *rows, *(alias for alias, target in ALIASES.items() if target in rows and alias not in rows)]
        raise ConfigError(where, f"{name[:80]!r} is not a known parser", f"Known: {', '.join(known)}.")
    return found
