"""Tests references within the parameters of functions whose calls stand between tags: their root is the schema of all parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sampled_documents import is_taken

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar
from headrace.core.tools import CallMode, FunctionTool, ToolChoice
from headrace.text.output.forced import forced_grammar
from headrace.text.output.format_types import ToolFormat
from headrace.text.output.formats import TOOL_FORMATS

pytestmark = pytest.mark.pure

TAGGED = [row for row in TOOL_FORMATS.values() if row.tags is not None and row.tags.key_start]


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


FLAG = {"type": "boolean"}
TREE = closed(v=FLAG, kids={"type": "array", "maxItems": 2, "items": {"$ref": "#"}})
HOME = closed(n=FLAG)

CASES: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "the root": (
        TREE,
        {"v": "true", "kids": '[{"v": false, "kids": []}]'},
        {"v": "true", "kids": "[[]]"},
    ),
    "the root, with an address": (
        {**TREE, "$id": "https://example.com/tree.json"},
        {"v": "true", "kids": '[{"v": false, "kids": []}]'},
        {"v": "true", "kids": '[{"v": 1, "kids": []}]'},
    ),
    "the root, of draft 7": (
        {**TREE, "$schema": "http://json-schema.org/draft-07/schema#"},
        {"v": "true", "kids": '[{"v": false, "kids": []}]'},
        {"v": "true", "kids": '[{"v": false}]'},
    ),
    "another parameter": (
        closed(home=HOME, work={"$ref": "#/properties/home"}),
        {"home": '{"n": true}', "work": '{"n": false}'},
        {"home": '{"n": true}', "work": '{"n": 1}'},
    ),
    "a parameter with an unusual name": (
        closed(**{"a/b~c%25": HOME, "work": {"type": "object", "$ref": "#/properties/a~1b~0c%2525"}}),
        {"a/b~c%25": '{"n": true}', "work": '{"n": false}'},
        {"a/b~c%25": '{"n": true}', "work": "{}"},
    ),
    "a definition within a definition": (
        {**closed(p={"$ref": "#/$defs/P"}), "$defs": {"P": {"type": "array", "items": {"$ref": "#/$defs/Q"}}, "Q": FLAG}},
        {"p": "[true]"},
        {"p": "[1]"},
    ),
    "an element of a list": (
        closed(a={"type": "array", "prefixItems": [FLAG]}, b={"$ref": "#/properties/a/prefixItems/0"}),
        {"a": "[true]", "b": "false"},
        {"a": "[true]", "b": "[true]"},
    ),
    "an anchor below a list": (
        {**closed(p={"type": "array", "items": {"$ref": "#flag"}}), "$defs": {"F": {"$anchor": "flag", **FLAG}}},
        {"p": "[true]"},
        {"p": "[null]"},
    ),
    "a resource of its own below a list": (
        {
            **closed(p={"type": "array", "items": {"$ref": "own"}}),
            "$defs": {"F": {"$id": "own", "$ref": "#/$defs/G", "$defs": {"G": FLAG}}, "G": {}},
        },
        {"p": "[true]"},
        {"p": "[null]"},
    ),
}


def call(row: ToolFormat, values: dict[str, str]) -> str:
    assert row.tags is not None
    tags = row.tags
    arguments = "".join([f"{tags.key_start}{name}{tags.key_end}{tags.value_start}{text}{tags.value_end}" for name, text in values.items()])
    return f"{row.start}{row.padding}{tags.call_start}f{tags.name_end}{arguments}{tags.call_end}{row.padding}{row.end}"


def forced(row: ToolFormat, parameters: dict[str, Any]) -> Grammar:
    found = forced_grammar(row, [FunctionTool(name="f", parameters=parameters)], ToolChoice(mode=CallMode.REQUIRED))
    assert found is not None
    return found


@pytest.mark.parametrize("row", TAGGED, ids=lambda row: row.name)
@pytest.mark.parametrize("name", CASES)
def test_a_reference_within_a_parameter_keeps_its_root(row: ToolFormat, name: str) -> None:
    parameters, right, wrong = CASES[name]
    assert is_taken(forced(row, parameters), call(row, right))
    assert not is_taken(forced(row, parameters), call(row, wrong))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#name"},
        {"$ref": "#/$defs/none"},
        {"$ref": "other.json"},
        {"$id": "own", "$ref": "#/$defs/A", "$defs": {"A": {"type": "integer"}}},
        {"anyOf": [{"$ref": "#name"}, {"type": "null"}]},
    ],
    ids=json.dumps,
)
def test_a_parameter_whose_type_is_behind_a_name_or_an_address_is_refused(schema: dict[str, Any]) -> None:
    """Whether it is a string, which stands there without quotes, has to be known."""
    parameters = {**closed(p=schema), "$defs": {"A": {"type": "string"}, "N": {"$anchor": "name", "type": "integer"}}}
    with pytest.raises(InvalidRequest) as refused:
        forced(TAGGED[0], parameters)
    assert refused.value.field.startswith("tools[0].function.parameters.properties.p")
