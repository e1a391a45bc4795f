"""Writes the grammar of tool calls that the model must make, so that their arguments validate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.tools import CallMode, FunctionTool, ToolChoice
from headrace.text.output.forced_tags import SEPARATORS, TERMINALS, MarkerTexts, TaggedArguments, lark_text
from headrace.text.output.format_types import ARGUMENTS_MARKER, CallSyntax, ToolFormat

_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_grammar(
    tool_format: ToolFormat,
    tools: Sequence[FunctionTool],
    choice: ToolChoice,
    *,
    document: Mapping[str, object] | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> Grammar | None:
    """REQUIRED   the output is calls alone; one call where a function is named
    AUTO       text, with calls after a marker: a strict function's arguments match its schema, another's are any JSON object
    document   with AUTO: JSON Schema of an output without calls, in place of free text

    Raises InvalidRequest.
    """
    is_free = choice.is_parallel and document is None and not choice.allowed and not any(tool.is_strict for tool in tools)
    if choice.mode is CallMode.NONE or (choice.mode is CallMode.AUTO and is_free):
        return None
    if tool_format.syntax is CallSyntax.PYTHON:
        raise InvalidRequest(
            "tool_choice",
            '"none", or "auto" without strict, response_format, allowed_tools and parallel_tool_calls = false: '
            f"{tool_format.name} calls cannot be forced",
            choice.name or str(choice.mode),
            "Arguments in Python's spelling have no JSON grammar.",
        )
    if document is not None and tool_format.is_bare:
        rule = f'tool_choice "none" beside it: calls of the format {tool_format.name} begin as a document does'
        raise InvalidRequest("grammar", rule, None, "Send functions and schema in two requests.")
    callable_tools = [(number, tool) for number, tool in enumerate(tools) if choice.allows(tool.name)]
    if not callable_tools:
        raise InvalidRequest("tool_choice", "a function among tools", choice.name or str(choice.mode))
    is_auto, parallel = choice.mode is CallMode.AUTO, choice.is_parallel and not choice.name
    rules = _Rules(tool_format, token_ids or {})
    rules.add_calls(
        [(tool.name, _schema(number, tool, is_auto=is_auto), f"tools[{number}].function.parameters") for number, tool in callable_tools]
    )
    if not is_auto:
        return Grammar(GrammarKind.LARK, rules.calls_alone(parallel))
    return Grammar(GrammarKind.LARK, rules.free_then_calls(parallel) if document is None else rules.calls_or(document, parallel))


def _schema(number: int, tool: FunctionTool, *, is_auto: bool) -> Mapping[str, object]:
    schema = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"tools[{number}].function.parameters.type", '"object"', schema["type"])
    return {**({} if is_auto and not tool.is_strict else schema), "type": "object", **SEPARATORS}


@dataclass(frozen=True, slots=True)
class _Rules:
    tool_format: ToolFormat
    token_ids: Mapping[str, int]
    lines: list[str] = field(default_factory=list)

    def add_calls(self, calls: Sequence[tuple[str, Mapping[str, object], str]]) -> None:
        """calls: (name, schema, field of that schema)"""
        tags = self.tool_format.tags
        self.lines.append("body: " + " | ".join([f"call{number}" for number in range(len(calls))]))
        if tags is not None and tags.key_start:
            self.lines.extend(TERMINALS)
        for number, (name, schema, path) in enumerate(calls):
            arguments = f"%json {json.dumps(schema)}"
            if self.tool_format.syntax is CallSyntax.NAMED:
                before, after = self._spelled(name + ARGUMENTS_MARKER), ""
            elif tags is None:
                before, after = _text(f'{{"name": {json.dumps(name)}, "{self.tool_format.arguments_key}": '), _text("}")
            else:
                before, after = self._spelled(tags.call_start + name + tags.name_end), self._spelled(tags.call_end)
                if tags.key_start:
                    tagged = TaggedArguments(self.tool_format.name, tags, MarkerTexts(self.token_ids), f"argument{number}", schema, path)
                    arguments = tagged.body()
                    self.lines.extend(tagged.lines)
            self.lines.append(f"call{number}: {before} {arguments} {after}")

    def calls_alone(self, parallel: bool) -> str:
        return self._source(f"start: {self._calls(parallel)}", parallel)

    def calls_or(self, document: Mapping[str, object], parallel: bool) -> str:
        self.lines.append(f"document: %json {json.dumps({**document, **SEPARATORS})}")
        return self._source(f"start: {self._calls(parallel)} | document", parallel)

    def _calls(self, parallel: bool) -> str:
        start = self._spelled(self.tool_format.start) if not self.tool_format.is_bare else ""
        one = f"{start} section".strip()
        between = self.tool_format.separator or self.tool_format.padding
        again = f" ({_text(between)} {one})*" if parallel and self._has_sections else ""
        return f"{one}{again}"

    def free_then_calls(self, parallel: bool) -> str:
        """In a bare format the first brace begins a call."""
        marker = self.tool_format.start
        heads = [f"FREE <[{self.token_ids[marker]}]>"] if marker in self.token_ids else []
        if marker:
            heads.append("spelled")
            self.lines.append(f"spelled[lazy]: FREE {lark_text(marker)}")
        self.lines.append("FREE: /\\s*([^{\\s](?s:.*))?/" if self.tool_format.is_bare else "FREE: /(?s:.*)/")
        self.lines.append("head: " + " | ".join(heads))
        alone = " | section" if self.tool_format.is_bare else ""
        if parallel and self._has_sections:
            return self._source("start: (head section)* FREE", parallel)
        return self._source(f"start: head section | FREE{alone}", parallel)

    @property
    def _has_sections(self) -> bool:
        if self.tool_format.tags is not None:
            return not self.tool_format.tags.is_shared
        return self.tool_format.syntax is not CallSyntax.JSON_LIST and not self.tool_format.separator

    def _source(self, start: str, parallel: bool) -> str:
        tool_format = self.tool_format
        calls = "body"
        if parallel and not self._has_sections:
            calls += f" ({_text(tool_format.separator or (', ' if tool_format.tags is None else ''))} body)*"
        if tool_format.syntax is CallSyntax.JSON_LIST:
            calls = f"{_text('[')} {calls} {_text(']')}"
        padding = _text(tool_format.padding)
        section = f"section: {padding} {calls} {padding} {self._spelled(tool_format.end)}"
        return "\n".join([start, section, *self.lines])

    def _spelled(self, text: str) -> str:
        return MarkerTexts(self.token_ids).spelled(text)


def _text(text: str) -> str:
    return lark_text(text) if text else ""
