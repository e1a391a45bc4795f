"""Separates generated text, as it arrives, into content, reasoning and tool calls.

Nothing raises, and all deltas joined are the parse of the whole text.

Models of every family sometimes write JSON between their markers: a section that begins with a brace is read as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.tools import FunctionTool
from headrace.text.output.call_arguments import NamedCalls
from headrace.text.output.format_types import CallSyntax, ReasoningFormat, ToolFormat
from headrace.text.output.json_calls import JsonCalls
from headrace.text.output.python_calls import PythonCalls
from headrace.text.output.reading import MAX_CALLS, CallLog, CallPiece, CallReader, ParsedDelta, Reading, first_non_space, num_held
from headrace.text.output.reasoning import ReasoningSplitter
from headrace.text.output.tagged_calls import TaggedCalls
from headrace.text.output.value_types import FunctionTypes


class CallParser:
    def __init__(self, row: ToolFormat, functions: Sequence[FunctionTool]) -> None:
        self._row = row
        self._function_types = FunctionTypes(functions)
        self._log = CallLog(frozenset([function.name for function in functions]))
        self._is_bare = row.is_bare
        self._reader: CallReader | None = None
        self._is_in_section = row.is_bare
        self._held = ""
        self._is_after_calls = False

    @property
    def is_passed(self) -> bool:
        return not self._is_in_section and not self._held and (not self._row.start or self._log.num_calls >= MAX_CALLS)

    @property
    def is_call_open(self) -> bool:
        return self._log.is_open

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        content: list[str] = []
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            if not self._is_in_section:
                at = self._search(text, at, content)
            elif self._reader is None:
                at = self._begin_section(text, at, content)
            else:
                at = self._read(self._reader, text, at, content)
        return "".join(content), self._log.take_pieces()

    def finish(self) -> str:
        """Returns the text held back. Call it once, at the end."""
        held = self._log.take_held()
        is_end = self._log.num_calls > 0 and self._row.end.startswith(held.strip())
        if self._log.is_open or is_end:
            held = ""  # a cut call's next argument; white space, or an end marker that was cut off
        return self._held + held

    def _search(self, text: str, at: int, content: list[str]) -> int:
        if self._is_after_calls:
            at = first_non_space(text, at)
            self._is_after_calls = at == len(text)
        start = self._row.start
        if not start or self._log.num_calls >= MAX_CALLS:
            content.append(text[at:])
            return len(text)
        begin = text.find(start, at)
        if begin >= 0:
            content.append(text[at:begin])
            self._log.hold(start)
            self._is_in_section, self._is_bare = True, False
            return begin + len(start)
        shown = len(text) - num_held(text, start, at)
        content.append(text[at:shown])
        self._held = text[shown:]
        return len(text)

    def _begin_section(self, text: str, at: int, content: list[str]) -> int:
        end = min(len(text), at + self._log.room)
        first = first_non_space(text, at, end)
        self._log.hold(text[at:first])
        if first < end:
            self._reader = self._new_reader(text[first])
        elif self._log.room <= 0:
            self._end_section(Reading.FAILED, content)
        return first

    def _read(self, reader: CallReader, text: str, at: int, content: list[str]) -> int:
        at = reader.feed(text, at)
        if reader.reading is not Reading.GOES_ON:
            self._end_section(reader.reading, content)
        return at

    def _end_section(self, reading: Reading, content: list[str]) -> None:
        content.append(self._log.take_held())
        self._log.is_open = False
        self._reader, self._is_in_section = None, False
        self._is_after_calls = reading is Reading.DONE

    def _new_reader(self, char: str) -> CallReader:
        row = self._row
        match row.syntax:
            case CallSyntax.PYTHON if char != "{":
                return PythonCalls(row, self._log, is_bare=self._is_bare)
            case CallSyntax.NAMED if char not in "{[":
                return NamedCalls(self._log)
            case CallSyntax.TAGGED if char not in "{[":
                return TaggedCalls(row, self._log, self._function_types)
            case _:
                return JsonCalls(row, self._log, is_bare=self._is_bare)


class OutputParser:
    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        functions: Sequence[FunctionTool] = (),
        is_reasoning_open: bool = False,
    ) -> None:
        """is_reasoning_open: the prompt ends inside the reasoning"""
        self._calls = CallParser(tools, functions) if tools is not None else None
        self.reasoning = ReasoningSplitter(reasoning, is_open=is_reasoning_open or reasoning.begins_open) if reasoning is not None else None

    @property
    def is_passed(self) -> bool:
        return (self.reasoning is None or self.reasoning.is_passed) and (self._calls is None or self._calls.is_passed)

    @property
    def is_call_open(self) -> bool:
        return self._calls is not None and self._calls.is_call_open

    def push(self, text: str) -> ParsedDelta:
        reasoning, content = self.reasoning.push(text) if self.reasoning is not None else ("", text)
        if self._calls is None or not content:
            return ParsedDelta(content, reasoning)
        content, pieces = self._calls.push(content)
        return ParsedDelta(content, reasoning, pieces)

    def finish(self) -> ParsedDelta:
        reasoning, content = self.reasoning.finish() if self.reasoning is not None else ("", "")
        if self._calls is None:
            return ParsedDelta(content, reasoning)
        more, pieces = self._calls.push(content)
        return ParsedDelta(more + self._calls.finish(), reasoning, pieces)
