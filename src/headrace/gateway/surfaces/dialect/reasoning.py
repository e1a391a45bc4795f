"""The fields by which clients control reasoning, of OpenAI, vLLM, SGLang, Ollama, OpenRouter, llama.cpp and LiteLLM, brought into one form.

What a field asks of the prompt becomes a `TemplateSwitch`: only the chat template knows the model's own word for it. What it asks of the
answer is whether reasoning is shown, and whether it is separated from the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidRequest
from headrace.gateway.surfaces.dialect.field_table import Inside
from headrace.gateway.surfaces.dialect.parse import honoured_fields
from headrace.gateway.surfaces.dialect.schemas import SamplingFields
from headrace.text.template_switch import TemplateSwitch

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
THINK_WORDS = ("low", "medium", "high")
THINKING_TYPES = ("enabled", "disabled")
FORMATS = ("none", "auto", "deepseek")
"""llama.cpp's `reasoning_format`: none leaves reasoning in the text."""

_SWITCHES = ("enable_thinking", "thinking")
"""Variables that templates read for reasoning on or off: Qwen's, SmolLM's, ...; DeepSeek's, Granite's."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ReasoningOptions(Struct, omit_defaults=True):
    """OpenRouter's."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool = False


class ThinkingOptions(Struct):
    """Anthropic's, as LiteLLM passes it on."""

    type: Literal["enabled", "disabled"]


class ReasoningFields(SamplingFields, kw_only=True):
    """Fields of a chat that control reasoning, beside those that it has in common with completions."""

    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    reasoning_format: Literal["none", "auto", "deepseek"] = "auto"

    @property
    def shows_reasoning(self) -> bool:
        """The answer has the reasoning that was separated from the text."""
        return self.include_reasoning and not (self.reasoning is not None and self.reasoning.exclude)

    @property
    def separates_reasoning(self) -> bool:
        return self.separate_reasoning and self.reasoning_format != "none"

    def switches(self) -> list[TemplateSwitch]:
        made: list[TemplateSwitch] = []
        if self.reasoning_effort is not None:
            made.append(_effort("reasoning_effort", self.reasoning_effort))
        if self.enable_thinking is not None:
            made.append(_on_or_off("enable_thinking", self.enable_thinking))
        if self.think is not None:
            made.append(_on_or_off("think", self.think) if isinstance(self.think, bool) else _effort("think", self.think))
        if self.reasoning is not None and self.reasoning.effort is not None:
            made.append(_effort("reasoning.effort", self.reasoning.effort))
        if self.reasoning is not None and self.reasoning.enabled is not None:
            made.append(_on_or_off("reasoning.enabled", self.reasoning.enabled))
        if self.thinking is not None:
            made.append(_on_or_off("thinking", self.thinking.type == "enabled"))
        return made

    def given(self) -> dict[str, Any]:
        """The fields that the client gave, for a server that reads them itself."""
        values = _values_of(self)
        if values == _DEFAULTS:
            return {}
        given = zip(FIELDS, values, _DEFAULTS, strict=True)
        return {name: msgspec.to_builtins(value) for name, value, default in given if value != default}


FIELDS = tuple(name for name in ReasoningFields.__struct_fields__ if name not in SamplingFields.__struct_fields__)
_FIELD_SET = frozenset(FIELDS)
_values_of = attrgetter(*FIELDS)
_DEFAULTS = _values_of(ReasoningFields())


def checked_reasoning(body: Mapping[str, object], ignored: dict[str, None]) -> dict[str, object]:
    """The reasoning fields of a body, with the honoured fields of the objects among them. Raises InvalidRequest for a word not known."""
    if _FIELD_SET.isdisjoint(body):
        return {}
    made = {name: body[name] for name in FIELDS if name in body}
    _check_word("reasoning_effort", made.get("reasoning_effort"), EFFORTS)
    _check_word("think", made.get("think"), THINK_WORDS, "true, false, ")
    _check_word("reasoning_format", made.get("reasoning_format"), FORMATS)
    for name, place in (("reasoning", Inside.REASONING), ("thinking", Inside.THINKING)):
        if isinstance(options := made.get(name), dict):
            made[name] = options = honoured_fields(options, place, ignored, f"{name}.")
            _check_word("reasoning.effort", options.get("effort") if name == "reasoning" else None, EFFORTS)
            _check_word("thinking.type", options.get("type") if name == "thinking" else None, THINKING_TYPES)
    return made


def _check_word(field: str, value: object, words: tuple[str, ...], before: str = "") -> None:
    if isinstance(value, str) and value not in words:
        raise InvalidRequest(field, f"{before}{', '.join(words[:-1])} or {words[-1]}", value)


def _on_or_off(field: str, is_on: bool) -> TemplateSwitch:
    return TemplateSwitch(field=field, values=dict.fromkeys(_SWITCHES, is_on), given=is_on, is_off=not is_on)


def _effort(field: str, effort: str) -> TemplateSwitch:
    """A template without degrees that can be switched off is switched off by "none"."""
    if effort == "none":
        return TemplateSwitch(field=field, values=dict.fromkeys(_SWITCHES, False), given=effort, is_off=True)
    return TemplateSwitch(field=field, values={"reasoning_effort": effort}, given=effort)
