"""Tests that a name written with escapes does not pass as another property."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sampled_documents import is_taken

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind

pytestmark = pytest.mark.pure

COUNT = {"type": "integer"}
OPEN = {"type": "object", "properties": {"a": COUNT}, "required": ["a"]}
MATCHED = {"type": "object", "patternProperties": {"^x": COUNT}, "additionalProperties": {"type": "string"}}
ESCAPED: dict[str, tuple[Any, str, str]] = {
    "a listed name": (OPEN, '{"a": 1, "b": "c"}', '{"a": 1, "\\u0061": "c"}'),
    "a listed name that others precede": (OPEN, '{"a": 1, "b": 2, "c": {}}', '{"a": 1, "b": 2, "\\u0061": {}}'),
    "a required name alone": ({"type": "object", "required": ["a"]}, '{"a": 1, "b": 2}', '{"a": 1, "\\u0061": 2}'),
    "a name of no value": ({"type": "object", "properties": {"a": False}}, '{"b": 1}', '{"\\u0061": 1}'),
    "a name with a line break": ({**OPEN, "properties": {"a": COUNT, "b\n": COUNT}}, '{"a": 1, "b\\n": 1}', '{"a": 1, "b\\u000a": "c"}'),
    "a name beyond ASCII": ({"properties": {"\U0001f600": COUNT}, "type": "object"}, '{"\U0001f600": 1}', '{"\\ud83d\\ude00": "c"}'),
    "a name that matches an expression": (MATCHED, '{"xy": 1, "y": "c"}', '{"\\u0078y": "c"}'),
    "a listed name that an expression matches": (
        {"type": "object", "properties": {"x\n": COUNT}, "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
        '{"xy": null}',
        '{"x\\u000a": null}',
    ),
    "in a list": ({"type": "array", "items": OPEN}, '[{"a": 1}]', '[{"a": 1, "\\u0061": "c"}]'),
    "combined": ({"allOf": [OPEN, {"properties": {"b": COUNT}}]}, '{"a": 1, "b": 2, "c": 3}', '{"a": 1, "\\u0062": "c"}'),
}


@pytest.mark.parametrize("name", ESCAPED)
@pytest.mark.parametrize("is_embedded", [False, True])
def test_an_escaped_name_is_no_other_name(name: str, is_embedded: bool) -> None:
    schema, good, bad = ESCAPED[name]
    source = json.dumps(schema)
    grammar = Grammar(GrammarKind.LARK, f"start: %json {source}") if is_embedded else Grammar(GrammarKind.JSON_SCHEMA, source)
    assert is_taken(grammar, good)
    assert not is_taken(grammar, bad)


@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {**OPEN, "properties": {"a": {"type": "string"}}, "additionalProperties": False}, {"type": "object"}]
)
def test_escapes_stay_where_no_name_is_listed_beside_free_ones(schema: dict[str, Any]) -> None:
    text = '"\\u0061\\u00e9"'
    written = text if schema["type"] == "string" else f'{{"a": {text}}}'
    assert is_taken(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), written)


def test_a_listed_text_that_needs_an_escape_is_refused_where_there_are_none() -> None:
    schema = {**OPEN, "properties": {"a": {"enum": ["b", "\x01"]}}}
    with pytest.raises(InvalidRequest, match="control characters") as refused:
        is_taken(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "{}")
    assert refused.value.field == "grammar"
    closed = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "additionalProperties": False}))
    assert is_taken(closed, '{"a": "\\u0001"}')
