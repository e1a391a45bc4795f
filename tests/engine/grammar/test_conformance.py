"""Tests generated JSON schemas against their grammars. `python -m bench.conformance` does the same for 500, and for the official test
suite.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.conformance.__main__ import Conformance, Tally, markdown, tally_generated
from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.core.errors import InvalidRequest

pytestmark = pytest.mark.pure

KNOWN = {"an integer is written with a fraction", "a fraction is a bound without its last digits"}


@pytest.fixture(scope="module")
def conformance() -> Conformance:
    folder = bundled_path(DEFAULT_MODEL)
    assert folder is not None
    return Conformance(Path(folder))


def check(tally: Tally) -> None:
    assert tally.num_accepted == tally.num_schemas
    assert not tally.taken_invalid
    assert set(tally.refused_valid) <= KNOWN


def test_valid_values_are_taken_and_invalid_ones_refused(conformance: Conformance) -> None:
    tally = tally_generated(conformance, 60, seed=1)
    check(tally)
    assert (tally.num_schemas, tally.num_valid > 500, tally.num_invalid > 300) == (60, True, True)
    assert "60 | 60 |" in markdown({"generated": tally})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_more(conformance: Conformance, seed: int) -> None:
    check(tally_generated(conformance, 500, seed=seed))


@pytest.mark.parametrize(
    ("schema", "value", "why"),
    [
        ({"type": "integer"}, 1.0, "an integer is written with a fraction"),
        ({"enum": [2]}, 2.0, "an integer is written with a fraction"),
        ({"maximum": 42.79, "type": "number"}, 42.7, "a fraction is a bound without its last digits"),
    ],
)
def test_the_known_limits_are_limits_still(conformance: Conformance, schema: dict[str, Any], value: float, why: str) -> None:
    """Of spelling alone: 1 and 42.70 are taken. Where one of these fails, docs/structured.md has a sentence too many."""
    judge = conformance.judge(json.dumps(schema))
    assert not judge.takes_in_some_order(value)
    assert judge.why_refused(value) == why


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "not"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if, then"),
        ({"type": "string", "format": "iri"}, "iri"),
        ({"type": "string", "format": "json-pointer"}, "json-pointer"),
        ({"type": "object", "propertyNames": {"maxLength": 3, "pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
        ({"anyOf": [{"properties": {"a": {}}}, {"minItems": 1}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"anyOf": [{"prefixItems": [{}]}, {"minItems": 3}], "unevaluatedItems": False}, "unevaluatedItems"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"type": "object", "patternProperties": {"a*": {"type": "null"}, "aa*": {"type": "string"}}}, "not disjoint"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "https://example.com/a.json"}, "https://example.com/a.json"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(conformance: Conformance, schema: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        conformance.judge(json.dumps(schema))
    assert named in str(refused.value)


ORDERS: list[Callable[[dict[str, Any]], dict[str, Any]]] = [dict, lambda value: dict(reversed(value.items()))]


@pytest.mark.parametrize("order", ORDERS, ids=["declared", "reversed"])
def test_properties_come_in_the_order_of_the_schema(conformance: Conformance, order: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["a", "z"], "additionalProperties": False}
    judge = conformance.judge(json.dumps(schema))
    assert judge.takes(json.dumps(order({"z": 1, "a": 2}))) is (order is dict)
