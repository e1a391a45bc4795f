"""Tools as values: functions with the schema of their arguments, and how far a request binds the model to call them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.errors import InvalidRequest

MAX_TOOLS = 128
"""OpenAI's limit."""

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""OpenAI's rule. Every format can write such a name without escaping it."""


class CallMode(StrEnum):
    NONE = "none"
    """The model is not shown the functions, and its text is not searched for calls."""
    AUTO = "auto"
    """Functions with `is_strict` are held to their schemas once the model begins a call."""
    REQUIRED = "required"
    """The output is at least one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """parameters  JSON Schema of the arguments, an object; None: the function takes none
    is_strict   the arguments of every call match the schema, also where the model decides whether to call
    cache_control, function_cache_control  marks of the tool and of the function in it, for foreign servers that cache by marks
    """

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    is_strict: bool = False
    cache_control: object = None
    function_cache_control: object = None

    def shown(self) -> dict[str, object]:
        """In OpenAI's format, for the chat template. Without `is_strict`, which does not concern the model."""
        return {"type": "function", "function": self._described()}

    def requested(self) -> dict[str, object]:
        function = self._described() | ({"strict": True} if self.is_strict else {}) | _mark(self.function_cache_control)
        return {"type": "function", "function": function} | _mark(self.cache_control)

    def _described(self) -> dict[str, object]:
        described: dict[str, object] = {"name": self.name}
        if self.description:
            described["description"] = self.description
        if self.parameters is not None:
            described["parameters"] = dict(self.parameters)
        return described

    def checked(self, *, field: str = "tools") -> FunctionTool:
        """Raises InvalidRequest naming `field` for a name that some format cannot write."""
        if FUNCTION_NAME.fullmatch(self.name) is None:
            raise InvalidRequest(f"{field}.name", "1..64 letters, digits, _ and -", self.name)
        return self


def _mark(value: object) -> dict[str, object]:
    return {} if value is None else {"cache_control": value}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """
    name         with REQUIRED: the one function that is called; empty: any of them
    allowed      empty: all that the model is shown
    is_parallel  one output may hold several calls
    """

    mode: CallMode = CallMode.AUTO
    name: str = ""
    allowed: frozenset[str] = frozenset()
    is_parallel: bool = True

    def allows(self, name: str) -> bool:
        return name == self.name if self.name else not self.allowed or name in self.allowed
