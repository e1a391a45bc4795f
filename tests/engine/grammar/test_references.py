"""Tests references of a schema: their targets, and those that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.engine.grammar.normalize import normalized

pytestmark = pytest.mark.pure

NULL, FLAG = {"type": "null"}, {"type": "boolean"}
OLD = "http://json-schema.org/draft-07/schema#"

FOUND: list[tuple[dict[str, Any], str]] = [
    ({"$defs": {"a/b": NULL}}, "#/$defs/a~1b"),
    ({"$defs": {"a~b": NULL}}, "#/$defs/a~0b"),
    ({"$defs": {"a b%": NULL}}, "#/$defs/a%20b%25"),
    ({"$defs": {"a b%": NULL}}, "#/$defs/a b%"),
    ({"definitions": {"Box<string,number>": NULL}}, "#/definitions/Box%3Cstring%2Cnumber%3E"),
    ({"components": {"schemas": {"A": NULL}}}, "#/components/schemas/A"),
    ({"properties": {"w": {"items": NULL}}}, "#/properties/w/items"),
    ({"allOf": [{}, {"properties": {"w": NULL}}]}, "#/allOf/1/properties/w"),
    ({"$defs": {"a": {"$anchor": "here", **NULL}}}, "#here"),
    ({"$defs": {"a": {"$dynamicAnchor": "here", **NULL}}}, "#here"),
    ({"$defs": {"a": {"$id": "#here", **NULL}}, "$schema": OLD}, "#here"),
    ({"$defs": {"a": {"$id": "T", **NULL}}}, "T"),
    ({"$defs": {"a": {"id": "T#", **NULL}}, "$schema": "http://json-schema.org/draft-04/schema#"}, "T"),
    ({"$id": "https://example.com/s/root.json", "$defs": {"a": NULL}}, "https://example.com/s/root.json#/$defs/a"),
    ({"$id": "https://example.com/s/root.json", "$defs": {"a": NULL}}, "root.json#/$defs/a"),
    ({"$id": "https://example.com/s/root.json", "$defs": {"a": {"$id": "a.json", "$defs": {"b": NULL}}}}, "a.json#/$defs/b"),
    ({"$id": "https://example.com/s/root.json", "$defs": {"a": {"$id": "/t/a.json", **NULL}}}, "../t/a.json"),
    ({"$id": "urn:example:root", "$defs": {"a": NULL}}, "urn:example:root#/$defs/a"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c", "title": "x"}, "c": NULL}}, "#/$defs/a"),
]


@pytest.mark.parametrize(("rest", "reference"), FOUND, ids=[reference for _, reference in FOUND])
def test_a_reference_is_resolved_within_the_document(rest: dict[str, Any], reference: str) -> None:
    properties = {**rest.get("properties", {}), "v": {"$ref": reference, "description": "a note"}}
    written = normalized({**rest, "properties": properties})
    assert written["$defs"][written["properties"]["v"]["$ref"].removeprefix("#/$defs/")] == NULL


def test_a_nested_address_moves_what_references_within_it_mean() -> None:
    inner = {
        "$id": "https://example.com/inner",
        "$defs": {"t": FLAG},
        "properties": {"v": {"$ref": "#/$defs/t"}, "w": {"$ref": "#/$defs/u"}},
    }
    written = normalized({"$defs": {"t": NULL, "u": NULL}, "properties": {"a": inner, "b": {"$ref": "#/$defs/t"}}})
    within = written["properties"]["a"]["properties"]
    found = {
        name: written["$defs"][rule["$ref"].removeprefix("#/$defs/")] for name, rule in (*within.items(), ("b", written["properties"]["b"]))
    }
    assert found == {"v": FLAG, "w": NULL, "b": NULL}, "w is not in the inner schema, and is looked for in the document"


def test_up_to_draft_7_an_address_beside_a_reference_does_not_count() -> None:
    schema = {"$id": "https://example.com/a/", "$defs": {"x": {"$id": "t.json", **NULL}}}
    beside = {"$id": "https://example.com/b/", "$ref": "t.json"}
    assert normalized({**schema, "$schema": OLD, "properties": {"v": beside}})["properties"]["v"] == {"$ref": "#/$defs/t.json"}
    with pytest.raises(InvalidRequest, match=r"t\.json"):
        normalized({**schema, "properties": {"v": beside}})


@pytest.mark.parametrize("root", ["#", ""])
def test_the_root_is_referred_to_as_it_is(root: str) -> None:
    schema = {"type": "object", "properties": {"child": {"$ref": root, "default": None}}}
    assert normalized(schema) == {"type": "object", "properties": {"child": {"$ref": "#"}}}
    named = {"$ref": "#/definitions/T", "definitions": {"T": {"type": "array", "items": {"$ref": "#/definitions/T"}}}}
    assert normalized(named) == {"type": "array", "items": {"$ref": "#"}}


def test_a_schema_that_several_refer_to_is_written_once() -> None:
    definitions = {"a": {"items": FLAG}, "b": {"items": NULL}}
    properties = {name: {"$ref": "#/$defs/a/items"} for name in "xyz"}
    assert normalized({"properties": properties, "$defs": definitions})["$defs"] == {"items": FLAG}
    properties["w"] = {"$ref": "#/$defs/b/items"}
    assert normalized({"properties": properties, "$defs": definitions})["$defs"] == {"items": FLAG, "items_2": NULL}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (
            "#/$defs/missing",
            'a $ref to a part of the same schema, got "#/$defs/missing". Put what it refers to under $defs. See #/items/$ref.',
        ),
        ("https://example.com/a.json", 'got "https://example.com/a.json". Put'),
        ("other.json#/a", 'got "other.json#/a"'),
        ("file:///etc/passwd", 'got "file:///etc/passwd"'),
        ("http://[::1", 'got "http://[::1"'),
        ("#missing", 'got "#missing"'),
        ("#/required", 'got "#/required"'),
        ("#/required/7", 'got "#/required/7"'),
        ("Pair", 'got "Pair"'),
        (5, "a text in $ref, got 5"),
    ],
)
def test_a_reference_to_nothing_in_the_document_is_refused_by_name(reference: object, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalized({"items": {"$ref": reference}, "required": ["a"]})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "definitions",
    [
        {"a": {"$ref": "#/$defs/a"}},
        {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}},
        {"a": {"type": "object", "oneOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}, {"minProperties": 1}]}},
    ],
    ids=json.dumps,
)
def test_references_in_a_circle_are_refused_by_name(definitions: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalized({"properties": {"v": {"$ref": "#/$defs/a"}}, "$defs": definitions})
    assert "references that end at a schema with other keywords, got " in str(refused.value)
    assert "in a circle" in str(refused.value)


def test_a_dynamic_reference_that_can_mean_one_schema_alone_is_an_ordinary_one() -> None:
    tree = {"$dynamicAnchor": "node", "type": "array", "items": {"$dynamicRef": "#node"}}
    assert normalized(tree) == {"type": "array", "items": {"$ref": "#"}}
    assert normalized({"$recursiveAnchor": True, "type": "array", "items": {"$recursiveRef": "#"}}) == {
        "type": "array",
        "items": {"$ref": "#"},
    }
    with pytest.raises(InvalidRequest, match=r'a \$dynamicRef that means one schema alone, got "#node"'):
        normalized({**tree, "$defs": {"other": {"$id": "other", "$dynamicAnchor": "node"}}})
