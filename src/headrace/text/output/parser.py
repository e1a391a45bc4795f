"""Separates generated text, as it arrives, into content, reasoning and tool calls.

The split into pieces changes nothing: all deltas joined are the parse of the whole text. Nothing raises. Only three things are left out:
the markers that were recognized, the white space after them, and whatever a call's JSON holds beside name and arguments. Text that looks
like a call and is none is content. Memory is bounded (`reading.MAX_HELD_CHARS`), and time is linear in the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.tools import FunctionTool
from headrace.text.output.calls import CallParser
from headrace.text.output.delta import ParsedDelta
from headrace.text.output.format_types import ReasoningFormat, ToolFormat
from headrace.text.output.reasoning import ReasoningSplitter


class OutputParser:
    """Parses one output. reasoning: where its reasoning is; None without a reasoning format"""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        functions: Sequence[FunctionTool] = (),
        is_reasoning_open: bool = False,
    ) -> None:
        """
        functions          functions that the request offers (`CallParser`)
        is_reasoning_open  the prompt ends inside the reasoning
        """
        self._calls = CallParser(tools, functions) if tools is not None else None
        self.reasoning = ReasoningSplitter(reasoning, is_open=is_reasoning_open or reasoning.begins_open) if reasoning is not None else None

    @property
    def is_passed(self) -> bool:
        """Whether all further text is content, and need not be pushed."""
        return (self.reasoning is None or self.reasoning.is_passed) and (self._calls is None or self._calls.is_passed)

    @property
    def is_call_open(self) -> bool:
        """Whether the last call's arguments are incomplete: an output that ends now was cut inside them."""
        return self._calls is not None and self._calls.is_call_open

    def push(self, text: str) -> ParsedDelta:
        reasoning, content = self.reasoning.push(text) if self.reasoning is not None else ("", text)
        if self._calls is None or not content:
            return ParsedDelta(content, reasoning)
        content, pieces = self._calls.push(content)
        return ParsedDelta(content, reasoning, pieces)

    def finish(self) -> ParsedDelta:
        """The parsed rest of the text held back. Call it once, at the end."""
        reasoning, content = self.reasoning.finish() if self.reasoning is not None else ("", "")
        if self._calls is None:
            return ParsedDelta(content, reasoning)
        more, pieces = self._calls.push(content)
        return ParsedDelta(more + self._calls.finish(), reasoning, pieces)
