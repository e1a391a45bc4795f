"""Defines one row of `formats`: how a family of models marks reasoning, and how it writes tool calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.grammar import ReasoningSpan

ARGUMENTS_MARKER, CALL_ID_MARKER = "[ARGS]", "[CALL_ID]"
"""Before the arguments, and before an id that the model gives."""
ARGUMENTS_MARKERS = (ARGUMENTS_MARKER, CALL_ID_MARKER)

_TAG = re.compile(r"<[^<>=\s]+>")


class CallSyntax(StrEnum):
    JSON_OBJECT = "json_object"
    """{"name": "f", "arguments": {...}}."""
    JSON_LIST = "json_list"
    """A list of such objects."""
    NAMED = "named"
    """f[ARGS]{...}, each call after a marker of its own."""
    PYTHON = "python"
    """[f(a=1), g()]"""
    TAGGED = "tagged"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """key_start, key_end    around a parameter's name; empty: the arguments are one JSON object
    value_end             strings have no quotes, other values are JSON
    call_end              empty: the section's end marker ends the call
    is_shared             one section holds all calls of an output
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
        return "\n" if self.value_end.startswith("\n") else ""

    @property
    def texts(self) -> tuple[str, ...]:
        return self.call_start, self.name_end, self.key_start, self.key_end, self.value_start, self.value_end, self.call_end

    def stripped(self) -> CallTags:
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
    """begins_open  the output begins inside it, whatever the prompt ends with"""

    name: str
    start: str
    end: str
    begins_open: bool = False
    hint: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers are kept by the detokenizer even if they are special tokens."""
        return self.start, self.end

    def span(self, *, is_open: bool) -> ReasoningSpan:
        return ReasoningSpan(start=self.start, end=self.end, is_open=is_open or self.begins_open)

    def is_opened_by(self, prompt_end: str) -> bool:
        """A start marker further up opens nothing."""
        return prompt_end.rstrip().endswith(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """is_bare          calls may begin the output without `start`; with an empty `start` they can only be there
    separator        between two JSON objects, or two TAGGED calls; empty: an object ends its section
    arguments_key    as the family writes it; both keys are read
    call_id_chars    exact length of a call's id where the family's template demands one
    hints, unless    the row is chosen if the chat template contains any of `hints` and none of `unless`
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
        named = ARGUMENTS_MARKERS if self.syntax is CallSyntax.NAMED else ()
        inside = _TAG.findall("".join(self.tags.texts)) if self.tags is not None else ()
        return tuple(dict.fromkeys([marker for marker in (self.start, self.end, *named, *inside) if marker]))
