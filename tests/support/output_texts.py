"""Makes texts that models write: examples of every format, and random ones made of the parts that the parsers look for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.core.tools import FunctionTool
from headrace.text.output.formats import REASONING_FORMATS, TOOL_FORMATS
from headrace.text.output.parser import OutputParser

PARAMETERS = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "l": {"$ref": "#/$defs/list"},
    },
    "$defs": {"list": {"type": "array"}},
}
FUNCTIONS = [FunctionTool(name=name, parameters=PARAMETERS) for name in ("f", "g", "find")]

PARTS = (
    *(marker for row in TOOL_FORMATS.values() for marker in row.markers),
    *(tag for row in TOOL_FORMATS.values() if row.tags is not None for tag in row.tags.texts),
    *("<function=f>", "<parameter=s>", '<invoke name="f">', "<arg_key>n</arg_key>", "f\n"),
    *(marker for row in REASONING_FORMATS.values() for marker in (row.start, row.end)),
    *"{}[]()\"\\',:;=<> \n",
    *("name", '"name"', '"arguments"', '"parameters"', "f", "g", '"f"', "1", "-2.5e3", "true", "None", "a=", "e\u0301\U0001f600"),
    *('{"name": "f", "arguments": {', '{"name": "g"', "[f(a=1", 'f{"a": 1}', "\\ud83d", "data: [DONE]\n\n"),
    *(
        '"{',
        '}"',
        '\\"a\\": ',
        '"{\\"a\\": 1}"',
        "\\n",
        "\\u00",
        '"function": {',
        '"name": "f", ',
        '"arguments": ',
        "{'name': 'f', ",
        "null",
    ),
)


@dataclass
class Parsed:
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def parsed(parser: OutputParser, pieces: Iterable[str]) -> Parsed:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for delta in [*map(parser.push, pieces), parser.finish()]:
        texts.append(delta.text)
        reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.number == len(calls)
                calls.append((call.name, []))
            assert call.number == len(calls) - 1
            calls[call.number][1].append(call.arguments)
    return Parsed("".join(texts), "".join(reasoning), [(name, "".join(arguments)) for name, arguments in calls])


@dataclass(frozen=True)
class Case:
    tools: str | None
    reasoning: str | None
    text: str
    is_open: bool = False

    def parser(self) -> OutputParser:
        tools = None if self.tools is None else TOOL_FORMATS[self.tools]
        reasoning = None if self.reasoning is None else REASONING_FORMATS[self.reasoning]
        return OutputParser(tools, reasoning, functions=FUNCTIONS, is_reasoning_open=self.is_open)

    def whole(self) -> Parsed:
        return parsed(self.parser(), [self.text])

    def split(self, draw_length: Callable[[], int]) -> Parsed:
        def pieces() -> Iterable[str]:
            at = 0
            while at < len(self.text):
                after = at + draw_length()
                yield self.text[at:after]
                at = after

        return parsed(self.parser(), pieces())


def random_case(rng: random.Random, max_parts: int = 30) -> Case:
    def some(count: int) -> str:
        return "".join(rng.choices(PARTS, k=rng.randrange(1, count)))

    tools = rng.choice([*TOOL_FORMATS, None])
    text = some(max_parts)
    if tools is not None and TOOL_FORMATS[tools].start and rng.random() < 0.6:
        text = text[: rng.randrange(len(text) + 1)] + TOOL_FORMATS[tools].start + some(max_parts)
    return Case(tools, rng.choice([*REASONING_FORMATS, None]), text, is_open=rng.random() < 0.3)


def check_case(case: Case, rng: random.Random, num_splits: int = 3) -> None:
    """Every split gives the whole parse, and a text without reasoning and calls is the content."""
    whole = case.whole()
    assert case.split(lambda: 1) == whole, case
    for _ in range(num_splits):
        assert case.split(lambda: rng.randrange(1, 8)) == whole, case
    if case.reasoning is None and not whole.calls:
        assert whole.text == case.text, case
