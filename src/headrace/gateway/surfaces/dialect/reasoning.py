"""Brings the fields by which clients control reasoning into one form: those of OpenAI, vLLM, SGLang, Ollama, OpenRouter, llama.cpp and
LiteLLM.

What a field asks of the prompt becomes a `TemplateSwitch`: only the chat template knows the model's own word for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidRequest
from headrace.gateway.surfaces.dialect.schemas import SamplingFields
from headrace.text.template_switch import TemplateSwitch

_SWITCHES = ("enable_thinking", "thinking")
"""Qwen's, SmolLM's, ...; DeepSeek's, Granite's."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Degree = Literal["low", "medium", "high"]
OnOff = Literal["enabled", "disabled"]
Format = Literal["none", "auto", "deepseek"]
"""none leaves reasoning in the text."""

WORDS = {
    "reasoning_effort": get_args(Effort),
    "think": get_args(Degree),
    "reasoning_format": get_args(Format),
    "reasoning.effort": get_args(Effort),
    "thinking.type": get_args(OnOff),
}


class ReasoningOptions(Struct, omit_defaults=True):
    """OpenRouter's field `reasoning`."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool = False


class ThinkingOptions(Struct):
    """Anthropic's field `thinking`, as LiteLLM passes it on."""

    type: OnOff


class ReasoningFields(SamplingFields, kw_only=True):
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    think: bool | Degree | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    reasoning_format: Format = "auto"

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning and not (self.reasoning is not None and self.reasoning.exclude)

    @property
    def separates_reasoning(self) -> bool:
        return self.separate_reasoning and self.reasoning_format != "none"

    def switches(self) -> list[TemplateSwitch]:
        options = self.reasoning or ReasoningOptions()
        asked: dict[str, bool | str | None] = {
            "reasoning_effort": self.reasoning_effort,
            "enable_thinking": self.enable_thinking,
            "think": self.think,
            "reasoning.effort": options.effort,
            "reasoning.enabled": options.enabled,
            "thinking": None if self.thinking is None else self.thinking.type == "enabled",
        }
        return [_switch(name, value) for name, value in asked.items() if value is not None]

    def given(self) -> dict[str, Any]:
        values = _values_of(self)
        if values == _DEFAULTS:
            return {}
        given = zip(FIELDS, values, _DEFAULTS, strict=True)
        return {name: msgspec.to_builtins(value) for name, value, default in given if value != default}


FIELDS = tuple(name for name in ReasoningFields.__struct_fields__ if name not in SamplingFields.__struct_fields__)
_FIELD_SET = frozenset(FIELDS)
_values_of = attrgetter(*FIELDS)
_DEFAULTS = _values_of(ReasoningFields())


def check_reasoning(body: Mapping[str, object]) -> None:
    if _FIELD_SET.isdisjoint(body):
        return
    for field, words in WORDS.items():
        name, _, part = field.partition(".")
        value = body.get(name)
        if part:
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, str) and value not in words:
            before = "true, false, " if name == "think" else ""
            raise InvalidRequest(field, f"{before}{', '.join(words[:-1])} or {words[-1]}", value)


def _switch(field: str, given: bool | str) -> TemplateSwitch:
    """The word none switches reasoning off for templates without degrees of effort."""
    if isinstance(given, bool) or given == "none":
        is_on = given is True
        return TemplateSwitch(field=field, values=dict.fromkeys(_SWITCHES, is_on), given=given, is_off=not is_on)
    return TemplateSwitch(field=field, values={"reasoning_effort": given}, given=given)


_DETAIL_TEXTS = ("text", "summary", "data")


def joined_details(pieces: object) -> object:
    if not isinstance(pieces, list) or not all(isinstance(piece, dict) for piece in pieces):
        return pieces
    return [_joined(run) for _, run in groupby(pieces, key=lambda piece: (piece.get("type"), piece.get("index")))]


def _joined(run: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    texts: dict[str, list[str]] = {name: [] for name in _DETAIL_TEXTS}
    for piece in run:
        for name, value in piece.items():
            if name in texts and isinstance(value, str):
                texts[name].append(value)
            elif value is not None or name not in made:
                made[name] = value
    return made | {name: "".join(pieces) for name, pieces in texts.items() if pieces}
