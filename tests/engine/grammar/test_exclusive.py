"""A oneOf means the same as anyOf where its branches exclude each other, references resolved."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.engine.grammar.normalize import normalized

pytestmark = pytest.mark.pure

NULL, TEXT, INTEGER = {"type": "null"}, {"type": "string"}, {"type": "integer"}


def tagged(value: object, name: str = "kind", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"const": value}, **more}, "required": [name]}


def alone(name: str) -> dict[str, Any]:
    """How Rust's serde writes a variant: an object of one property."""
    return {"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": False}


DEFINITIONS = {
    "null": NULL,
    "text": TEXT,
    "point": {"type": "object", "properties": {"x": INTEGER}},
    "pair": {"type": "array", "items": INTEGER},
    "alias": {"$ref": "#/$defs/pair", "title": "x"},
    "cat": {"allOf": [{"$ref": "#/$defs/pet"}, {"properties": {"kind": {"enum": ["cat", "lion"]}}}]},
    "dog": {"allOf": [{"$ref": "#/$defs/pet"}, {"properties": {"kind": {"const": "dog"}}}]},
    "pet": {"type": "object", "required": ["kind"]},
    "tree": {"type": "object", "properties": {"next": {"oneOf": [NULL, {"$ref": "#/$defs/tree"}]}}},
}


def refer(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


EXCLUSIVE: list[list[Any]] = [
    [NULL, refer("point")],
    [refer("null"), refer("text"), refer("point"), refer("alias")],
    [refer("cat"), refer("dog"), NULL],
    [NULL, refer("tree")],
    [{"const": 1}, {"const": 2}],
    [{"const": 1}, {"const": True}, {"const": "1"}, {"enum": [[1], {"a": 1}]}, {"const": [2]}],
    [{"const": "a"}, INTEGER, {"type": ["array", "null"]}],
    [{"type": ["string", "null"]}, {"type": ["integer", "boolean"]}],
    [{**INTEGER, "maximum": 3}, {**INTEGER, "minimum": 4, "maximum": 7}, {**INTEGER, "exclusiveMinimum": 7}],
    [{"type": "number", "exclusiveMaximum": 0}, {"type": "number", "minimum": 0}],
    [{**TEXT, "maxLength": 3}, {**TEXT, "minLength": 4}],
    [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}],
    [{"type": "array", "prefixItems": [{"const": "a"}], "minItems": 1}, {"type": "array", "prefixItems": [{"const": "b"}]}],
    [tagged("a"), tagged("b", x=TEXT), tagged("c")],
    [tagged(1), tagged(2), tagged(True)],
    [tagged("a", deep=tagged(1)), tagged("b", deep=tagged(1))],
    [
        {"type": "object", "required": ["d"], "properties": {"d": tagged(1)}},
        {"type": "object", "required": ["d"], "properties": {"d": tagged(2)}},
    ],
    [alone("A"), alone("B"), {"const": "C"}, {"enum": ["D", "E"]}],
    [tagged("a"), {"type": "object", "properties": {"kind": {"type": "integer"}}}],
    [{"anyOf": [TEXT, NULL]}, {"oneOf": [INTEGER, {"type": "boolean"}]}],
    [{"allOf": [{"type": ["string", "null"]}, {"type": ["null", "integer"]}]}, TEXT],
    [{"anyOf": [{"const": 1}, {"const": 2}], "title": "x"}, {"enum": [3]}],
    [TEXT],
    [{}],
    [True, False],
    [{"const": number} for number in range(400)],
    [tagged(f"v{number}", x=INTEGER) for number in range(300)],
]


@pytest.mark.parametrize("branches", EXCLUSIVE, ids=lambda branches: json.dumps(branches)[:120])
def test_branches_that_exclude_each_other_are_alternatives(branches: list[Any]) -> None:
    schema = {"properties": {"v": {"oneOf": branches}}, "$defs": DEFINITIONS}
    assert normalized(schema) == normalized({**schema, "properties": {"v": {"anyOf": branches}}})


OVERLAPPING: list[list[Any]] = [
    [INTEGER, {"type": "number"}],
    [{"type": ["string", "null"]}, NULL],
    [{"const": 1}, {"enum": [2, 1]}],
    [{"const": 1}, {"const": 1}],
    [{"enum": ["a", None]}, refer("null")],
    [refer("point"), refer("pet")],
    [refer("pet"), refer("cat")],
    [{**INTEGER, "maximum": 4}, {**INTEGER, "minimum": 4}],
    [{**TEXT, "pattern": "^a"}, {**TEXT, "pattern": "^b"}],
    [{**TEXT, "format": "date"}, {**TEXT, "format": "date-time"}],
    [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}],
    [{"type": "object", "properties": {"kind": {"const": "a"}}}, {"type": "object", "properties": {"kind": {"const": "b"}}}],
    [{"properties": {"kind": {"const": "a"}}, "required": ["kind"]}, {"properties": {"kind": {"const": "b"}}, "required": ["kind"]}],
    [alone("A"), {**alone("B"), "additionalProperties": True, "required": []}],
    [{"type": "array", "prefixItems": [{"const": "a"}]}, {"type": "array", "prefixItems": [{"const": "b"}]}],
    [{}, TEXT],
    [True, True],
]


@pytest.mark.parametrize("branches", OVERLAPPING, ids=lambda branches: json.dumps(branches)[:120])
def test_branches_that_a_value_may_satisfy_together_are_refused(branches: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalized({"properties": {"v": {"oneOf": branches}}, "$defs": DEFINITIONS})
    assert "a oneOf whose branches visibly exclude each other. Use anyOf. See #/properties/v/oneOf." in str(refused.value)


def test_what_is_said_beside_the_branches_counts() -> None:
    branches = [{"properties": {"kind": {"const": value}}} for value in "ab"]
    beside = {"type": "object", "required": ["kind"]}
    assert "anyOf" in normalized({**beside, "oneOf": branches})
    assert "allOf" in normalized({"allOf": [beside, {"oneOf": branches}]})
    assert normalized({"anyOf": [TEXT, {**beside, "oneOf": branches}]})["anyOf"][1]["anyOf"] == branches
    assert "anyOf" in normalized({"type": "object", "maxProperties": 1, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]})


def test_one_of_beside_any_of_is_a_branch_of_its_own() -> None:
    schema = {"anyOf": [TEXT, INTEGER], "oneOf": [{"const": 1}, {"const": "a"}]}
    assert normalized(schema) == {"anyOf": [TEXT, INTEGER], "allOf": [{"anyOf": [{"const": 1}, {"const": "a"}]}]}


def test_the_property_of_a_discriminator_has_to_be_there_where_the_branches_differ_in_it_alone() -> None:
    """As pydantic writes a union of models whose tags have defaults: they are not in `required`, and without one it finds no model."""
    branches = [{"type": "object", "properties": {"kind": {"const": value, "default": value}}} for value in "ab"]
    plain = [{"type": "object", "properties": {"kind": {"const": value}}} for value in "ab"]
    assert normalized({"oneOf": branches, "discriminator": {"propertyName": "kind"}}) == {"allOf": [{"required": ["kind"]}], "anyOf": plain}
    required = [{**branch, "required": ["kind"]} for branch in plain]
    assert normalized({"oneOf": required, "discriminator": {"propertyName": "kind"}}) == {"anyOf": required}
    with pytest.raises(InvalidRequest, match="visibly exclude"):
        normalized({"oneOf": branches, "discriminator": {"propertyName": "other"}})


def test_comparing_many_branches_is_bounded() -> None:
    many = [{"type": "object", "properties": {f"p{number}": {}}, "required": [f"p{number}"]} for number in range(3000)]
    with pytest.raises(InvalidRequest, match="visibly exclude"):
        normalized({"oneOf": many})
    unlike = [alone(f"p{number}") for number in range(400)]
    with pytest.raises(InvalidRequest, match="visibly exclude"):
        normalized({"oneOf": unlike})
