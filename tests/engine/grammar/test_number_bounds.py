"""Tests numbers of a schema beyond what a 64-bit float holds: exact, moved inwards, or refused."""

from __future__ import annotations

import json
import math
import random
from decimal import Decimal
from typing import Any

import pytest
from sampled_documents import documents, is_taken

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar.normalize import normalized
from headrace.engine.grammar.number_bounds import as_read

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
    with pytest.raises(InvalidRequest, match="bounds with an exact number between them, as integers up to 2"):
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
    limit = (
        r"expected multipleOf of at most 4294967295"
        if isinstance(given, int)
        else r"multiplied by 10 again and again, .*Use a power of ten"
    )
    with pytest.raises(InvalidRequest, match=limit):
        normalized(schema)


def test_a_long_integer_is_shown_with_an_exponent() -> None:
    for schema in ({"const": 10**300}, {"multipleOf": 10**300}):
        with pytest.raises(InvalidRequest, match=r"got 1e\+300\. "):
            normalized(schema)


TWO_SPELLINGS = [2525951598397.4062, -9655588180080.812]
"""Floats in the middle of two decimal numbers: another library may write ...063 and ...813."""

INEXACT = [9.204938554384977, -9.204938554384977, 0.0009522444552911937, 1234.5678901234567, 123456789.12345679]


@pytest.mark.parametrize("number", INEXACT)
@pytest.mark.parametrize("schema", ["const", "enum", "nested"])
def test_a_fraction_that_the_library_reads_as_another_is_refused_by_name(number: float, schema: str) -> None:
    schemas: dict[str, Any] = {"const": {"const": number}, "enum": {"enum": [1.5, number]}, "nested": {"enum": [{"at": [number, 0]}]}}
    keyword = "const" if schema == "const" else "enum"
    with pytest.raises(InvalidRequest) as refused:
        normalized({"properties": {"v": schemas[schema]}})
    assert f"expected numbers of at most 15 digits, 22 after the point, in {keyword}, got {number}. " in str(refused.value)
    assert f"Round it. Send such a number as a string. See #/properties/v/{keyword}." in str(refused.value)


def test_listed_fractions_are_written_as_they_are_or_refused() -> None:
    rng = random.Random(1)
    numbers = [rng.choice([1, -1]) * rng.random() * 10 ** rng.randint(-4, 7) for _ in range(300)]
    numbers += [rng.randrange(1, 10**15) / 10 ** rng.randint(1, 22) for _ in range(300)]
    exact = [number for number in numbers if as_read(number) == number]
    for begin in range(0, len(exact), 50):
        chosen = exact[begin : begin + 50]
        assert json.loads(next(documents(grammar({"const": chosen}), 1))) == chosen
    assert len(exact) < len(numbers)
    assert len(exact) > len(numbers) * 0.9
    assert not {number for number in numbers[300:] if as_read(number) != number}


@pytest.mark.parametrize("number", [*INEXACT, *TWO_SPELLINGS])
@pytest.mark.parametrize("side", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_no_number_beyond_a_bound_of_many_digits_is_taken(number: float, side: str) -> None:
    beyond = math.nextafter(number, -math.inf if "inimum" in side else math.inf)
    bound = grammar({**NUMBER, side: number})
    assert not is_taken(bound, format(Decimal(repr(beyond)), "f"))
    assert not (side.startswith("exclusive") and is_taken(bound, format(Decimal(repr(number)), "f")))
    assert is_taken(bound, f"{number * (2 if ('inimum' in side) == (number > 0) else 0.5):.10f}")


def test_of_two_bounds_of_a_side_the_stricter_one_is_kept() -> None:
    given = {"minimum": 1, "exclusiveMinimum": 1, "maximum": 5, "exclusiveMaximum": 6.5}
    assert normalized({**NUMBER, **given}) == {**NUMBER, "exclusiveMinimum": 1, "maximum": 5}


def test_an_integer_keeps_above_a_bound_just_above_another_integer() -> None:
    bound = grammar({**INTEGER, "minimum": 9.000000000000002, "maximum": 11})
    assert [is_taken(bound, text) for text in ("9", "10", "11")] == [False, True, True]


def test_bounds_of_many_digits_that_leave_no_number_are_refused_by_name() -> None:
    bounds = {"minimum": INEXACT[0], "maximum": INEXACT[0]}
    with pytest.raises(InvalidRequest, match=r"bounds with an exact number between them, as integers up to 2.* numbers of 15 digits are"):
        normalized({**NUMBER, **bounds})
