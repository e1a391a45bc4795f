"""The form of a row in `dialect.field_table`: one field of one or several JSON objects, and what becomes of it.

    honoured   does what it says, or the request is refused
    inert      has no effect on an answer by nature; accepted, checked for size, otherwise unused
    refused    belongs to an API that clients know, and is not served (yet): accepted only with a value that means "off" or "as usual"

Every field that was accepted and changed nothing is named in the answer's `x-headrace-ignored`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum


class Treatment(StrEnum):
    HONOURED = "honoured"
    INERT = "inert"
    REFUSED = "refused unless default"


class Surface(StrEnum):
    """An endpoint's body that has rows in the field table."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class Inside(StrEnum):
    """An object in a body, by its name in documentation and in `x-headrace-ignored`."""

    MESSAGE = "messages[]"
    PART = "messages[].content[]"
    CALL = "messages[].tool_calls[]"
    CALLED_FUNCTION = "messages[].tool_calls[].function"
    STREAM_OPTIONS = "stream_options"
    TOOL = "tools[]"
    FUNCTION = "tools[].function"
    TOOL_CHOICE = "tool_choice"
    CHOSEN_FUNCTION = "tool_choice.function"
    ALLOWED_TOOLS = "tool_choice.allowed_tools"
    ALLOWED_TOOL = "tool_choice.allowed_tools.tools[]"
    REASONING = "reasoning"
    THINKING = "thinking"
    RESPONSE_FORMAT = "response_format"
    JSON_SCHEMA = "response_format.json_schema"
    STRUCTURED_OUTPUTS = "structured_outputs"
    CACHE = "cache"


Place = Surface | Inside


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One row.

    note    the rule of an honoured or inert field, or why a refused one is refused and what to do instead
    off     values that ask for nothing, accepted like null. A refused field accepts no other values
    is_any  an inert field whose value may be anything
    """

    name: str
    places: tuple[Place, ...]
    treatment: Treatment
    note: str
    off: tuple[object, ...] = ()
    is_any: bool = False

    def is_off(self, value: object) -> bool:
        return bool(self.off) and any(_is_same(value, off) for off in self.off)

    @property
    def off_words(self) -> str:
        """The values that mean off, in words."""
        shown = ["absent", "null", *map(json.dumps, self.off)]
        return ", ".join(shown[:-1]) + " or " + shown[-1]


def _is_same(value: object, off: object) -> bool:
    """JSON's equality: 1 and 1.0 are one number, true is none."""
    return value == off and isinstance(value, bool) == isinstance(off, bool)
