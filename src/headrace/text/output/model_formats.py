"""Chooses the output formats of one model by its template or its operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.grammar import ReasoningSpan
from headrace.text.output.format_types import ReasoningFormat, ToolFormat
from headrace.text.output.formats import AUTO, reasoning_format, tool_format
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

TAIL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ModelFormats:
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: ChatTemplate, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> ModelFormats:
        """Raises ConfigError."""
        tools = tool_format(tool_call_parser, template.sources)
        reasoning = reasoning_format(reasoning_parser, template.sources)
        markers = [marker for row in (tools, reasoning) if row is not None for marker in row.markers]
        ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
        return cls(tools, reasoning, {marker: token_id for marker, token_id in ids.items() if token_id is not None})

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
