"""Tests the parser of outputs on every format: examples, random texts in every split, limits, linear work, bounded memory."""

from __future__ import annotations

import json
import math
import random
import time
import tracemalloc
from collections.abc import Callable
from itertools import combinations

import output_texts
import pytest
from counted_lines import growth
from figures import Figure
from output_texts import Case, Parsed

from headrace.text.output import call_arguments, json_calls, literals, parser, python_calls, reading
from headrace.text.output import reasoning as splitting
from headrace.text.output.format_types import CallSyntax, ToolFormat
from headrace.text.output.formats import TOOL_FORMATS

pytestmark = pytest.mark.pure

F = '{"name": "f", "arguments": {"a": 1}}'
SURROGATE = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
PYTHON = "[f(a = 'it\\'s\\n\\u00e9', b=[True, None, {\"k\": -1.5e3,},],)]"
SCHEMA = '{"type": "object", "properties": {"a": {}}}'
DEFINED = f'{{"name": "f", "parameters": {SCHEMA}'
RECITED = [
    f'{DEFINED}, "description": "d"}}',
    f'{{"type": "function", "function": {DEFINED}}}, "description": "d"}}',
    f'{{"parameters": {SCHEMA}, "name": "f", "description": "d"}}',
    '{"name": "f", "parameters": {"properties": {}}, "description": "d"}',
    "{'name': 'f', 'parameters': {'type': 'object'}, 'description': 'd'}",
]
"""Definitions of the function "f" as a model may repeat them from its prompt."""
BROKEN = '{"name": "f", "arguments": {"a": {'


DS_START, DS_END = TOOL_FORMATS["deepseek_v3"].start, TOOL_FORMATS["deepseek_v3"].end
DS_CALL, DS_SEP, DS_CALL_END = (f"<\uff5ctool\u2581{words}\uff5c>" for words in ("call\u2581begin", "sep", "call\u2581end"))


EXAMPLES: list[tuple[str, str, Parsed]] = [
    ("hermes", "Just text < and </ and {.", Parsed("Just text < and </ and {.")),
    ("hermes", f"Hi \n<tool_call>\n{F}\n</tool_call>\n", Parsed("Hi \n", calls=[("f", '{"a": 1}')])),
    ("hermes", f"<tool_call>{F}</tool_call>\n<tool_call>{F}</tool_call> ok", Parsed("ok", calls=[("f", '{"a": 1}')] * 2)),
    ("hermes", "<think>\nwhy\n</think>\n\nso", Parsed("so", "why\n")),
    ("hermes", " <think>why", Parsed("", "why")),
    ("hermes", "so <think>is a tag</think>", Parsed("so <think>is a tag</think>")),
    ("hermes", '<tool_call>{"arguments": {"b": "}"}, "id": [1, {}], "name": "g"}</tool_call>', Parsed(calls=[("g", '{"b": "}"}')])),
    ("hermes", '<tool_call>{"name": "any\\u0041"}</tool_call>', Parsed(calls=[("anyA", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a" :1.0,"a":2}}</tool_call>', Parsed(calls=[("f", '{"a" :1.0,"a":2}')])),
    ("hermes", f"<tool_call>{F}", Parsed(calls=[("f", '{"a": 1}')])),
    ("hermes", "<tool_call>" + BROKEN, Parsed(calls=[("f", '{"a": {')])),
    ("hermes", f"<tool_call>{BROKEN}</tool_call> x", Parsed("</tool_call> x", calls=[("f", '{"a": {')])),
    ("hermes", f"<tool_call>no<tool_call>{F}</tool_call>", Parsed("<tool_call>no", calls=[("f", '{"a": 1}')])),
    (
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        Parsed('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}', Parsed('<tool_call>{"name": "", "arguments": {}}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}', Parsed(calls=[("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "Oslo"}', Parsed('<tool_call>{"name": "f", "arguments": "Oslo"}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{a: 1}"}', Parsed('<tool_call>{"name": "f", "arguments": "{a: 1}"}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{"a": 1}"}', Parsed('<tool_call>{"name": "f", "arguments": "{"a": 1}"}')),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "\"{}\""}', Parsed(r'<tool_call>{"name": "f", "arguments": "\"{}\""}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": [{}]}', Parsed('<tool_call>{"name": "f", "arguments": [{}]}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": nul}', Parsed('<tool_call>{"name": "f", "arguments": nul}')),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": [1"}', Parsed(calls=[("f", '{"a": [1')])),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \u2', Parsed(calls=[("f", '{"a": ')])),
    ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}\n, 2"}', Parsed(', 2"}', calls=[("f", '{"a": 1}')])),
    ("hermes", r'<tool_call>{"arguments": "{\"a\": 1}", "name": "f"}', Parsed(calls=[("f", '{"a": 1}')])),
    ("hermes", r"""<tool_call>{'name': 'f', 'arguments': {'a': True, "b": "it's"}}""", Parsed(calls=[("f", '{"a": true, "b": "it\'s"}')])),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {1, 2}}", Parsed("<tool_call>{'name': 'f', 'arguments': {1, 2}}")),
    ("hermes", """<tool_call>{"name": "f", "arguments": {'a': None}}""", Parsed(calls=[("f", '{"a": null}')])),
    ("hermes", """<tool_call>{"name": "f", "arguments": "{'a': [False]}"}""", Parsed(calls=[("f", '{"a": [false]}')])),
    ("hermes", """<tool_call>{"name": "f", "arguments": {'a': f()}}""", Parsed("""<tool_call>{"name": "f", "arguments": {'a': f()}}""")),
    ("hermes", f"<tool_call>[{F}, {F}]</tool_call>", Parsed(calls=[("f", '{"a": 1}')] * 2)),
    (
        "hermes",
        r'<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}, "id": 7}</tool_call>',
        Parsed(calls=[("f", '{"a": 1}')]),
    ),
    ("hermes", '<tool_call>{"function": {"strict": true}, "name": "f", "arguments": {}}', Parsed(calls=[("f", "{}")])),
    ("hermes", '<tool_call>{"function": {"strict": true}}', Parsed('<tool_call>{"function": {"strict": true}}')),
    ("hermes", '<tool_call>{"tool_name": "f", "parameters": {}}', Parsed(calls=[("f", "{}")])),
    ("hermes", '<tool_call>{"tool_name": "x", "parameters": {}}', Parsed('<tool_call>{"tool_name": "x", "parameters": {}}')),
    ("hermes", '<tool_call>{"name": " functions.f", "arguments": {}}', Parsed(calls=[("f", "{}")])),
    ("hermes", '<tool_call>{"name": "functions.x", "arguments": {}}', Parsed(calls=[("functions.x", "{}")])),
    ("hermes", f"Look: <tool_call>{F}\n</tool_ca", Parsed("Look: ", calls=[("f", '{"a": 1}')])),
    ("hermes", f"<tool_call>{F[:-1]}\n</tool_call>\nDone", Parsed("Done", calls=[("f", '{"a": 1}')])),
    ("hermes", f"<tool_call>{F}</tool_call> a <", Parsed("a <", calls=[("f", '{"a": 1}')])),
    ("hermes", f"<tool_call>{F} and</tool_call>", Parsed(" and</tool_call>", calls=[("f", '{"a": 1}')])),
    ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}\n', Parsed(calls=[("f", '{"a": 1}')])),
    ("llama3_json", f"{F}; {F} tail", Parsed("tail", calls=[("f", '{"a": 1}')] * 2)),
    ("llama3_json", ' {"name": "Bob", "parameters": {}}', Parsed(' {"name": "Bob", "parameters": {}}')),
    ("llama3_json", '{"name": "f"}', Parsed('{"name": "f"}')),
    ("llama3_json", f"See: {F}", Parsed(f"See: {F}")),
    ("llama3_json", '{"type": "function", "function": "f", "parameters": {}}', Parsed(calls=[("f", "{}")])),
    ("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', Parsed(calls=[("f", '{"a": 1}')])),
    (
        "llama3_json",
        '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}',
        Parsed('{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}'),
    ),
    *(("llama3_json", text, Parsed(text)) for text in RECITED),
    ("llama3_json", f"{DEFINED}}}; {F}", Parsed(calls=[("f", SCHEMA), ("f", '{"a": 1}')])),
    ("llama3_json", '{"name": "f", "parameters": {"type": "new", "a": 1}', Parsed(calls=[("f", '{"type": "new", "a": 1}')])),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}, "description": "x"}', Parsed(calls=[("f", '{"a": 1}')])),
    ("hermes", f"<tool_call>{RECITED[0]}</tool_call>", Parsed(calls=[("f", SCHEMA)])),
    ("llama3_json", '{"name": "f", "parameters": "{city}"}', Parsed('{"name": "f", "parameters": "{city}"}')),
    ("llama3_json", f"[{F}]", Parsed(calls=[("f", '{"a": 1}')])),
    ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', Parsed(calls=[("other", "{}")])),
    ("mistral", f"Hm.[TOOL_CALLS] [{F}, {F}]", Parsed("Hm.", calls=[("f", '{"a": 1}')] * 2)),
    ("mistral", "[TOOL_CALLS] []", Parsed("[TOOL_CALLS] []")),
    ("mistral", f"[TOOL_CALLS] {F}", Parsed(calls=[("f", '{"a": 1}')])),
    ("mistral_named", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]x[CALL_ID]123abc[ARGS]{}', Parsed(calls=[("f", '{"a": 1}'), ("x", "{}")])),
    ("mistral_named", '[TOOL_CALLS]f{"a": 1}', Parsed(calls=[("f", '{"a": 1}')])),
    ("mistral_named", f"[TOOL_CALLS] [{F}]", Parsed(calls=[("f", '{"a": 1}')])),
    ("mistral_named", "[TOOL_CALLS]two words{}", Parsed("[TOOL_CALLS]two words{}")),
    ("pythonic", "[f(a=1), g()]", Parsed(calls=[("f", '{"a": 1}'), ("g", "{}")])),
    ("pythonic", PYTHON, Parsed(calls=[("f", '{"a": "it\'s\\n\u00e9", "b": [true, null, {"k": -1.5e3}]}')])),
    ("pythonic", "[1, 2]", Parsed("[1, 2]")),
    ("pythonic", "[print(a=1)]", Parsed("[print(a=1)]")),
    ("pythonic", "[f(a=__import__('os'))]", Parsed("[f(a=__import__('os'))]")),
    ("pythonic", "[f(a=1, a=2)]", Parsed(", a=2)]", calls=[("f", '{"a": 1')])),
    ("pythonic", "Say [f(a=1)]", Parsed("Say [f(a=1)]")),
    ("pythonic", "[functions.f(a=1)]", Parsed(calls=[("f", '{"a": 1}')])),
    ("pythonic", '{"type": "function", "name": "f", "parameters": {"a": 1}}', Parsed(calls=[("f", '{"a": 1}')])),
    ("llama4_pythonic", f"<|python_start|>{F}<|python_end|>", Parsed(calls=[("f", '{"a": 1}')])),
    ("llama4_pythonic", "ok <|python_start|>[x(y='z')]<|python_end|>", Parsed("ok ", calls=[("x", '{"y": "z"}')])),
    ("granite", f"<|tool_call|>[{F}]", Parsed(calls=[("f", '{"a": 1}')])),
    ("jamba", f"<tool_calls>[{F}]</tool_calls>", Parsed(calls=[("f", '{"a": 1}')])),
    ("phi4_mini_json", f"functools[{F}]", Parsed(calls=[("f", '{"a": 1}')])),
    ("minimax", f"Hm <tool_calls>\n{F}\n{F}\n</tool_calls>", Parsed("Hm ", calls=[("f", '{"a": 1}')] * 2)),
    (
        "qwen3_coder",
        'Ok\n<tool_call>\n<function=f>\n<parameter=s>\na "b"\n\n</param> \u00e9\n</parameter>\n<parameter=n>\n5\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        Parsed("Ok\n", calls=[("f", '{"s": "a \\"b\\"\\n\\n</param> \u00e9", "n": 5}'), ("g", "{}")]),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=s>12</parameter><parameter=o>12</parameter><parameter=l>[True, {'a': None}]</parameter>"
        "<parameter=x>1.50</parameter><parameter=n>five</parameter><parameter=y>NaN</parameter></function></tool_call>",
        Parsed(calls=[("f", '{"s": "12", "o": "12", "l": [true, {"a": null}], "x": 1.50, "n": "five", "y": "NaN"}')]),
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nhal", Parsed(calls=[("f", '{"s": "hal')])),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=l>\n[1, 2",
        Parsed(calls=[("f", '{"n": 5')]),
    ),
    ("pythonic", "[f(a=1, b=[2", Parsed(calls=[("f", '{"a": 1')])),
    ("qwen3_coder", "<tool_call> see <function=f>", Parsed("<tool_call> see <function=f>")),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a\n</arg_value>\n<arg_key>o</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
        Parsed(calls=[("f", '{"s": "a\\n", "o": null}')]),
    ),
    ("qwen3_coder", f"<tool_call>\n{F}\n</tool_call>", Parsed(calls=[("f", '{"a": 1}')])),
    ("glm45", "<tool_call>find</tool_call><tool_call>it is", Parsed("<tool_call>it is", calls=[("find", "{}")])),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="l">["x"]</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        Parsed(calls=[("f", '{"l": ["x"]}'), ("g", "{}")]),
    ),
    (
        "deepseek_v3",
        f'Hm{DS_START}{DS_CALL}function{DS_SEP}f\n```json\n{{"a": "`}}"}}\n```{DS_CALL_END}\n'
        f"{DS_CALL}function{DS_SEP}g\n```json\n{{}}\n```{DS_CALL_END}{DS_END}",
        Parsed("Hm", calls=[("f", '{"a": "`}"}'), ("g", "{}")]),
    ),
    (
        "deepseek_v31",
        f'{DS_START}{DS_CALL}f{DS_SEP}{{"a": 1}}{DS_CALL_END}{DS_CALL}g{DS_SEP}{{}}{DS_CALL_END}{DS_END}',
        Parsed(calls=[("f", '{"a": 1}'), ("g", "{}")]),
    ),
    ("deepseek_v31", f'{DS_START}{DS_CALL}f{DS_SEP}{{"a": 1}}{DS_CALL_END}', Parsed(calls=[("f", '{"a": 1}')])),
    ("deepseek_v31", f"{DS_START}{DS_CALL}f{DS_SEP}{DS_CALL_END}{DS_END}", Parsed(calls=[("f", "{}")])),
    ("deepseek_v31", f"{DS_START}{DS_CALL}f{DS_SEP} and", Parsed(f"{DS_START}{DS_CALL}f{DS_SEP} and")),
]


@pytest.mark.parametrize(("tools", "text", "expected"), EXAMPLES, ids=[f"{row}-{number}" for number, (row, _, _) in enumerate(EXAMPLES)])
def test_examples(tools: str, text: str, expected: Parsed) -> None:
    assert Case(tools, "qwen3", text).whole() == expected


def test_every_format_has_examples_with_a_call() -> None:
    assert {row for row, _, expected in EXAMPLES if expected.calls} == set(TOOL_FORMATS)


@pytest.mark.parametrize(
    ("reasoning", "is_open", "text", "expected"),
    [
        ("qwen3", True, "\nwhy</think>so", Parsed("so", "why")),
        ("deepseek_r1", False, "why</think>\n\nso", Parsed("so", "why")),
        ("deepseek_r1", False, "only why", Parsed("", "only why")),
        ("mistral", False, "[THINK]why[/THINK]so [THINK]", Parsed("so [THINK]", "why")),
        ("reasoning", False, "<reasoning>a</think></reasoning>b", Parsed("b", "a</think>")),
        ("seed_oss", False, "<seed:think>a<b</seed:think>", Parsed("", "a<b")),
        (None, False, "<think>why</think>", Parsed("<think>why</think>")),
    ],
)
def test_reasoning(reasoning: str | None, is_open: bool, text: str, expected: Parsed) -> None:
    assert Case(None, reasoning, text, is_open).whole() == expected


def test_reasoning_begins_near_the_beginning() -> None:
    limit = splitting.MAX_LEADING_SPACE
    for spaces, expected in ((limit, Parsed("b", "a")), (limit + 1, Parsed(" " * (limit + 1) + "<think>a</think>b"))):
        case = Case(None, "qwen3", " " * spaces + "<think>a</think>b")
        assert case.whole() == expected
        assert case.split(lambda: 1) == expected


def test_a_call_in_the_reasoning_is_none() -> None:
    text = f"<think><tool_call>{F}</tool_call></think><tool_call>{F}</tool_call>"

    assert Case("hermes", "qwen3", text).whole() == Parsed("", f"<tool_call>{F}</tool_call>", [("f", '{"a": 1}')])


SHORT_CHARS = 60
"""Every split of an example into three is tried: of those up to this length in the fast tests, of the longer ones in the slow tests."""


@pytest.mark.parametrize(
    ("tools", "text", "expected"),
    [pytest.param(*example, marks=[pytest.mark.slow] * (len(example[1]) > SHORT_CHARS)) for example in EXAMPLES],
    ids=[f"{row}-{number}" for number, (row, _, _) in enumerate(EXAMPLES)],
)
def test_each_split_into_three_gives_the_whole(tools: str, text: str, expected: Parsed) -> None:
    case = Case(tools, "qwen3", text)
    for first, second in combinations(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert output_texts.parsed(case.parser(), pieces) == expected, pieces


def test_long_examples_are_the_same_cut_anywhere() -> None:
    """All examples of a format joined, 200 characters and more: every cut in two, and all single characters."""
    for row in TOOL_FORMATS:
        text = "<think>hm\n</think>" + "".join([text for name, text, _ in EXAMPLES if name == row])[:400]
        case = Case(row, "qwen3", text)
        whole = case.whole()
        assert case.split(lambda: 1) == whole
        assert all(output_texts.parsed(case.parser(), [text[:cut], text[cut:]]) == whole for cut in range(len(text)))


@pytest.mark.parametrize("seed", range(4))
def test_random_texts_are_the_same_in_every_split(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        output_texts.check_case(output_texts.random_case(rng), rng)


@pytest.mark.parametrize("seed", range(2))
def test_random_texts_at_every_limit_are_the_same_in_every_split(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_HELD_CHARS", 24)
    monkeypatch.setattr(splitting, "MAX_LEADING_SPACE", 2)
    monkeypatch.setattr(json_calls, "MAX_KEY_CHARS", 12)
    monkeypatch.setattr(call_arguments, "MAX_HEADER_CHARS", 9)
    monkeypatch.setattr(python_calls, "MAX_NAME_CHARS", 4)
    monkeypatch.setattr(python_calls, "MAX_ARGUMENTS", 2)
    monkeypatch.setattr(literals, "MAX_LITERAL_DEPTH", 2)
    for module in (reading, parser):
        monkeypatch.setattr(module, "MAX_CALLS", 2)
    rng = random.Random(seed)
    for _ in range(200):
        output_texts.check_case(output_texts.random_case(rng), rng)


ARGUMENTS = '{"a": "long"}'


@pytest.mark.parametrize("written", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["plain", "in a string"])
def test_arguments_stream_as_they_come(written: str) -> None:
    """The call begins with the first character after the brace, which shows an object. From then on each character is a piece."""
    parser = Case("hermes", None, "").parser()
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    pieces = [call for char in text for call in parser.push(char).tool_calls]

    assert [(piece.name, piece.arguments) for piece in pieces] == [("f", ""), (None, '{"'), *[(None, char) for char in ARGUMENTS[2:]]]


def test_arguments_stream_without_a_marker_once_they_are_no_definition() -> None:
    parser = Case("llama3_json", None, "").parser()
    text = '{"name": "f", "parameters": {"type": "new", "a": 1}}'
    pieces = [call.arguments for char in text for call in parser.push(char).tool_calls]

    assert pieces == ['{"type": "n', *'ew", "a": 1}']


def call_of(row: ToolFormat, name: str, arguments: str) -> str:
    """A call as models of the row's family write it, with arguments as text."""
    match row.syntax:
        case CallSyntax.NAMED:
            return f"{row.start}{name}[ARGS]{arguments}{row.end}"
        case CallSyntax.TAGGED:
            assert row.tags is not None
            return f"{row.start}{row.tags.call_start}{name}{row.tags.name_end}{arguments}{row.tags.call_end}{row.end}"
    call = f'{{"name": "{name}", "{row.arguments_key}": {arguments}}}'
    return row.start + row.padding + (f"[{call}]" if row.syntax is CallSyntax.JSON_LIST else call) + row.padding + row.end


WITH_JSON_ARGUMENTS = [
    row for row in TOOL_FORMATS.values() if row.syntax is not CallSyntax.PYTHON and (row.tags is None or not row.tags.key_start)
]
OBJECTS = [
    "{}",
    ' { "city" : "Oslo" }\n',
    '{"s": "\\u00e9 \\\\ \\" \\/ \\ud83d\\ude00 \\ud800 \u00e9\U0001f600 }] </tool_call>", "n": [-1.5e3, true, null, {"k": {}}]}',
    '{"code": "if a < b:\\n\\tprint(\\"\\\\n\\")\\n"}',
]
"""JSON of arguments."""


@pytest.mark.parametrize("row", WITH_JSON_ARGUMENTS, ids=lambda row: row.name)
def test_arguments_within_a_string_are_those_of_the_plain_form(row: ToolFormat) -> None:
    """The string's escapes are undone, whichever way they are written, and wherever the text is split."""
    for arguments in OBJECTS:
        plain = Case(row.name, None, call_of(row, "f", arguments)).whole()
        assert plain.text == ""
        assert [(name, json.loads(text)) for name, text in plain.calls] == [("f", json.loads(arguments))]
        for written in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False), json.dumps(f"\n{arguments} ")):
            case = Case(row.name, None, call_of(row, "f", written))
            whole = case.whole()
            assert whole.text == ""
            assert [(name, json.loads(text)) for name, text in whole.calls] == [("f", json.loads(arguments))]
            assert case.split(lambda: 1) == whole
            assert all(output_texts.parsed(case.parser(), [case.text[:cut], case.text[cut:]]) == whole for cut in range(len(case.text)))


@pytest.mark.parametrize("row", WITH_JSON_ARGUMENTS, ids=lambda row: row.name)
def test_arguments_without_a_value_are_an_empty_object(row: ToolFormat) -> None:
    for written in ('""', '" \\n"', *([] if row.syntax is CallSyntax.NAMED else ["null", "None"])):
        case = Case(row.name, None, call_of(row, "f", written))
        assert case.whole() == case.split(lambda: 1) == Parsed(calls=[("f", "{}")])


def test_control_characters_that_the_string_escapes_once_stay_escapes_in_the_strings_within() -> None:
    """Models forget the second backslash. A line break in a string of JSON can only be meant as one."""
    text = r'<tool_call>{"name": "f", "arguments": "{\n \"code\": \"a\nb\u0009c\"\n}"}</tool_call>'
    (call,) = Case("hermes", None, text).whole().calls

    assert call == ("f", '{\n "code": "a\\nb\\u0009c"\n}')
    assert json.loads(call[1]) == {"code": "a\nb\tc"}


def test_no_piece_of_a_call_is_empty() -> None:
    for tools, text, _ in EXAMPLES:
        parser = Case(tools, "qwen3", "").parser()
        pieces = [piece for char in text for piece in parser.push(char).tool_calls]
        assert all(piece.name or piece.arguments for piece in pieces), text


def test_more_calls_than_the_limit_are_text() -> None:
    one = f"<tool_call>{F}</tool_call>"
    found = Case("hermes", None, one * (reading.MAX_CALLS + 2)).whole()

    assert len(found.calls) == reading.MAX_CALLS
    assert found.text == one * 2


def test_a_parser_that_will_find_nothing_more_says_so() -> None:
    parser = Case("pythonic", "qwen3", "").parser()
    assert not parser.is_passed
    parser.push("<think>a</think>b")

    assert parser.is_passed
    assert Case(None, None, "").parser().is_passed
    assert not Case("hermes", None, "").parser().is_passed


ONE = 1 << 20
HOSTILE = {
    "leading white space": ("hermes", " " * ONE),
    "prose": ("hermes", "word < " * (ONE // 7)),
    "half markers": ("hermes", "<tool_cal" * (ONE // 9)),
    "markers": ("hermes", "<tool_call>" * (ONE // 11)),
    "open keys": ("hermes", '<tool_call>{"' * (ONE // 13)),
    "one long argument": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * ONE),
    "arguments of backslashes": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "\\" * ONE),
    "one long argument in a string": ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"' + "x\\n\\u00e9" * (ONE // 9)),
    "white space in a string": ("hermes", '<tool_call>{"name": "f", "arguments": "{' + " " * ONE),
    "python": ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': '" + "x\\'" * (ONE // 3)),
    "deep arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {' + "[" * ONE),
    "arguments before the name": ("hermes", ('<tool_call>{"arguments": {' + "[" * 1000 + "]" * 1000 + "}, ") * (ONE // 2000)),
    "white space": ("hermes", "<tool_call>" + " " * ONE),
    "a huge name": ("hermes", '<tool_call>{"name": "' + "f" * ONE),
    "calls": ("hermes", f"<tool_call>{F}</tool_call>" * (ONE // 60)),
    "a list": ("mistral", "[TOOL_CALLS][" + f"{F}, " * (ONE // 40)),
    "a header": ("mistral_named", "[TOOL_CALLS]" + "f" * ONE),
    "headers": ("mistral_named", "[TOOL_CALLS]f[ARGS]" * (ONE // 19)),
    "objects": ("llama3_json", f"{F}; " * (ONE // 40)),
    "a literal": ("pythonic", "[f(a='" + "x\\'" * (ONE // 3)),
    "arguments": ("pythonic", "[f(" + "".join([f"a{n}=1, " for n in range(ONE // 10)])),
    "python calls": ("pythonic", "[" + "f(a={'k': [1]}), " * (ONE // 20)),
    "reasoning": ("hermes", "<think>" + "</thin" * (ONE // 6)),
    "a text value": ("qwen3_coder", "<tool_call><function=f><parameter=s>" + "\n</param" * (ONE // 8)),
    "a raw value": ("qwen3_coder", "<tool_call><function=f><parameter=l>" + "[</param" * (ONE // 8)),
    "parameters": ("glm45", "<tool_call>f" + "<arg_key>s</arg_key><arg_value>x</arg_value>" * (ONE // 44)),
    "invocations": ("minimax_m2", "<minimax:tool_call>" + '<invoke name="f">' * (ONE // 17)),
}


def parsing(name: str, size: int, piece: int) -> Callable[[], object]:
    tools, text = HOSTILE[name]
    case = Case(tools, "qwen3", text[:size])
    return lambda: case.split(lambda: piece)


@pytest.mark.parametrize("name", HOSTILE)
def test_long_outputs_take_linear_work(name: str) -> None:
    """Four times the text takes about four times as much, and less where a limit is reached; a parse that is quadratic takes sixteen."""
    assert growth(lambda size: parsing(name, size, 4), ONE // 64) < 4.2
    assert growth(lambda size: parsing(name, size, 4096), ONE // 16) < 4.2


@pytest.mark.timing
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("piece", [4, 4096])
def test_long_outputs_take_linear_time(piece: int, figure: Figure) -> None:
    """In CPU time, for what is done in C. The shortest of three counts. A parse that is quadratic grows with the power 2 of its text."""

    def cpu_s(name: str, size: int) -> float:
        parse, taken_s = parsing(name, size, piece), []
        for _ in range(3):
            began = time.process_time()
            parse()
            taken_s.append(time.process_time() - began)
        return min(taken_s)

    size = ONE // 2 if piece > 4 else ONE // 8
    times = {name: cpu_s(name, size) / max(cpu_s(name, size // 4), 0.01) for name in HOSTILE}
    worst = max(times, key=lambda name: times[name])
    figure(f"time over the text of {worst!r} grows with the power", math.log(times[worst], 4), 1, "of its length", slack=1.5)


SLOWLY_TRACED = [pytest.param(name, marks=pytest.mark.slow) for name in ("arguments before the name", "open keys")]


@pytest.mark.parametrize(
    "name",
    [
        "white space",
        "white space in a string",
        "python",
        "a huge name",
        "a header",
        "a literal",
        "a raw value",
        "a text value",
        *SLOWLY_TRACED,
    ],
)
def test_memory_stays_bounded_while_nothing_is_decided(name: str) -> None:
    tools, text = HOSTILE[name]
    parser = Case(tools, "qwen3", "").parser()
    tracemalloc.start()
    try:
        for at in range(0, ONE, 1000):
            parser.push(text[at : at + 1000])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * reading.MAX_HELD_CHARS


def test_python_values_are_json() -> None:
    (call,) = Case("pythonic", None, r"""[f(s="a\x41\"\t", n=-3, l=[], d={'x': {'y': [False]}}, u='\ud83d\ude00')]""").whole().calls

    assert json.loads(call[1]) == {"s": 'aA"\t', "n": -3, "l": [], "d": {"x": {"y": [False]}}, "u": "\U0001f600"}
