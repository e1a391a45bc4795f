"""Numbers of a schema beyond what a 64-bit float holds: exact, moved inwards, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sampled_documents import documents, is_taken

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar.normalize import normalized

pytestmark = pytest.mark.pure

INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
MAX = 2**63 - 1
LEAST = -(2**63 - 1024)


def grammar(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


BIG = [9007199254740993, 1234567890123456789, 12345678901234567890, -9223372036854775808, 2**64, 10**30, -(2**53) - 1]


@pytest.mark.parametrize("number", BIG)
@pytest.mark.parametrize("kind", ["const", "enum", "nested"])
def test_an_integer_that_would_be_written_as_another_is_refused_by_name(number: int, kind: str) -> None:
    schemas: dict[str, Any] = {"const": {"const": number}, "enum": {"enum": ["a", number]}, "nested": {"enum": [{"id": [number]}]}}
    with pytest.raises(InvalidRequest) as refused:
        normalized({"properties": {"v": schemas[kind]}})
    keyword = "const" if kind == "const" else "enum"
    assert f"expected integers of at most 2^53 (9007199254740992) in {keyword}, got {number}." in str(refused.value)
    assert f"Send such a number as a string. See #/properties/v/{keyword}." in str(refused.value)


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**60, -(2**60), 2**63 - 1024, LEAST, 0, 10**15 + 1, 1.5, 0.1, 5e-324, -1e-7])
def test_a_number_that_a_float_holds_is_written_as_it_is(number: float) -> None:
    for schema, value in (({"const": number}, number), ({"type": "number", "enum": [number]}, number), ({"enum": [[number]]}, [number])):
        (text,) = documents(grammar(schema), 1)
        assert json.loads(text) == value


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({"minimum": 2**53 - 1, "maximum": 2**53 - 1}, {"minimum": 2**53 - 1, "maximum": 2**53 - 1}),
        ({"minimum": 2**53 + 1}, {"minimum": 2**53 + 2}),
        ({"maximum": 2**53 + 1}, {"maximum": 2**53}),
        ({"exclusiveMinimum": 2**53}, {"minimum": 2**53 + 2}),
        ({"exclusiveMaximum": -(2**53)}, {"maximum": -(2**53) - 2}),
        ({"minimum": 5, "exclusiveMinimum": 2**60}, {"minimum": 2**60 + 256, "maximum": MAX}),
        ({"minimum": -(2**63), "maximum": MAX}, {"minimum": LEAST, "maximum": MAX}),
        ({"minimum": 0, "maximum": 2**64 - 1}, {"minimum": 0, "maximum": MAX}),
        ({"exclusiveMinimum": 0, "maximum": 10**400}, {"exclusiveMinimum": 0, "maximum": MAX}),
        ({"minimum": 10**18}, {"minimum": 10**18, "maximum": MAX}),
        ({"maximum": -(10**18)}, {"maximum": -(10**18), "minimum": LEAST}),
    ],
)
def test_a_bound_of_integers_moves_inwards_to_the_next_that_a_float_holds(given: dict[str, int], moved: dict[str, int]) -> None:
    assert normalized({**INTEGER, **given}) == {**INTEGER, **moved}


def test_a_bound_of_fractions_has_as_many_digits_as_a_float() -> None:
    widest = {"minimum": -9223372036854770000, "maximum": 9223372036854770000}
    assert normalized({**NUMBER, "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}) == {**NUMBER, **widest}
    assert normalized({**NUMBER, "exclusiveMinimum": 2**60}) == {**NUMBER, "minimum": 1152921504606850000, "maximum": 9223372036854770000}
    assert normalized({"maximum": 1.5, "minimum": 0.1}) == {"maximum": 1.5, "minimum": 0.1}


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"exclusiveMinimum": 2**60, "exclusiveMaximum": 2**60 + 2},
        {"minimum": 2**63},
        {"maximum": -(2**63)},
        {"minimum": 10**4000},
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_that_leave_no_number_are_refused_by_name(bounds: dict[str, int], kind: str) -> None:
    with pytest.raises(InvalidRequest, match="bounds with an integer between them that a 64-bit float holds"):
        normalized({"type": kind, **bounds})


SAMPLED = [
    {**INTEGER, "minimum": -(2**63), "maximum": MAX},
    {**INTEGER, "minimum": 2**53 + 1, "maximum": 2**53 + 9},
    {**INTEGER, "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 6},
    {**INTEGER, "minimum": 10**18 + 1},
    {**INTEGER, "maximum": -(10**18) - 1},
    {**NUMBER, "minimum": 10**18 + 1, "maximum": 10**18 + 99999},
    {**NUMBER, "exclusiveMaximum": -(10**18)},
    {**NUMBER, "maximum": 1e300, "minimum": 2**53},
]


@pytest.mark.parametrize("schema", SAMPLED, ids=json.dumps)
def test_what_is_written_is_within_the_given_bounds(schema: dict[str, Any]) -> None:
    for text in documents(grammar(schema), 40):
        number = float(text) if "." in text else int(text)
        assert schema.get("minimum", number) <= number <= schema.get("maximum", number)
        assert schema.get("exclusiveMinimum", number - 1) < number or "exclusiveMinimum" not in schema
        assert schema.get("exclusiveMaximum", number + 1) > number or "exclusiveMaximum" not in schema


def test_the_largest_integers_of_64_bits_can_be_written() -> None:
    assert is_taken(grammar({**INTEGER, "maximum": MAX}), str(MAX))
    assert not is_taken(grammar({**INTEGER, "maximum": MAX}), str(MAX + 1))
    assert is_taken(grammar({**INTEGER, "minimum": -(2**63), "maximum": MAX}), str(LEAST))
    assert not is_taken(grammar({**INTEGER, "minimum": -(2**63)}), str(-(2**63) - 1))


@pytest.mark.parametrize(
    ("given", "is_held"), [(1, True), (0.01, True), (2.5, True), (2**32 - 1, True), (2**32, False), (0.07, False), (1e-300, False)]
)
def test_a_multiple_that_the_library_does_not_hold_is_refused_by_name(given: float, is_held: bool) -> None:
    schema = {**NUMBER, "multipleOf": given}
    if is_held:
        assert normalized(schema) == schema
        return
    with pytest.raises(InvalidRequest, match="multipleOf of at most 4294967295"):
        normalized(schema)
