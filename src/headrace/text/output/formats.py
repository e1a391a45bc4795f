"""Lists the output formats (how each family of models marks reasoning and writes tool calls), and chooses those of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.core.grammar import ReasoningSpan
from headrace.text.output.format_types import ARGUMENTS_MARKER, CallSyntax, CallTags, ReasoningFormat, ToolFormat
from headrace.text.turns import turn_start_ids

if TYPE_CHECKING:
    from headrace.text.template import ChatTemplate
    from headrace.text.tokenizer import Tokenizer

AUTO, OFF = "auto", "none"


def _deepseek(name: str) -> str:
    """A marker of DeepSeek's: a full-width bar, and SentencePiece's lower block for a space."""
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


def reasoning_format(name: str, templates: Iterable[str], *, where: str = "reasoning_parser") -> ReasoningFormat | None:
    """Raises ConfigError at `where`."""
    if name == AUTO:
        text = "\0".join(templates)
        return next((row for row in REASONING_FORMATS.values() if row.hint and row.hint in text), None)
    return None if name == OFF else REASONING_FORMATS[_known(name, REASONING_FORMATS, where)]


def tool_format(name: str, templates: Iterable[str], *, where: str = "tool_call_parser") -> ToolFormat | None:
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
    row = name if name in rows else ALIASES.get(name, name)
    if row not in rows:
        known = [AUTO, OFF, *rows, *(alias for alias, target in ALIASES.items() if target in rows and alias not in rows)]
        raise ConfigError(where, f"{name[:80]!r} is not a known parser", f"Known: {', '.join(known)}.")
    return row


TAIL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """turn_starts: ids of the tokens with which the template begins a turn"""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)
    turn_starts: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: ChatTemplate, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> ModelFormats:
        """Raises ConfigError."""
        tools = tool_format(tool_call_parser, template.sources)
        reasoning = reasoning_format(reasoning_parser, template.sources)
        markers = [marker for row in (tools, reasoning) if row is not None for marker in row.markers]
        ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
        known = {marker: token_id for marker, token_id in ids.items() if token_id is not None}
        return cls(tools, reasoning, known, turn_start_ids(tokenizer, template.sources))

    def marker_ids(self, *rows: ToolFormat | ReasoningFormat | None) -> frozenset[int]:
        return frozenset([self.token_ids[marker] for row in rows if row is not None for marker in row.markers if marker in self.token_ids])

    def is_reasoning_open(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], begun: str = "") -> bool:
        """begun: part of the answer in the prompt"""
        if self.reasoning is None:
            return False
        if begun:
            return begun.rfind(self.reasoning.start) > begun.rfind(self.reasoning.end)
        return self.reasoning.is_opened_by(_tail(tokenizer, prompt_ids))

    def reasoning_span(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], begun: str = "") -> ReasoningSpan | None:
        """None if the prompt has the end of the reasoning already."""
        if self.reasoning is None:
            return None
        is_open = self.is_reasoning_open(tokenizer, prompt_ids, begun)
        if not is_open and (begun.strip() or _tail(tokenizer, prompt_ids).rstrip().endswith(self.reasoning.end)):
            return None
        return self.reasoning.span(is_open=is_open)


def _tail(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    return tokenizer.join(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False).decode("utf-8", "replace")
