"""Tests Python functions as tools: their schemas, calls with a model's arguments, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, TypedDict

import pytest

from headrace.core.errors import InvalidRequest
from headrace.functions import MAX_RESULT_CHARS, PythonFunction, functions_in

pytestmark = pytest.mark.pure


class Unit(Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclass
class Place:
    city: str
    country: str = "France"


class Range(TypedDict):
    low: int
    high: int


def weather(place: Place, unit: Unit = Unit.CELSIUS) -> str:
    """The weather
    at a place.

    More that the model does not need.

    Args:
        place: where
        unit (Unit): c or f
    """
    return f"{place.city}, {place.country}: 20 {unit.name}"


def draw(limits: Range, kind: Literal["int", "float"], names: list[str], weights: dict[str, float] | None = None) -> dict[str, object]:
    return {"limits": limits, "kind": kind, "names": names, "weights": weights}


def now() -> str:
    """The time."""
    return "noon"


def add(a: int, b: float, is_exact: bool, note: Optional[str]) -> float:  # noqa: UP045
    return a + b


def schema_of(function: Callable[..., object]) -> dict[str, Any]:
    parameters = PythonFunction.of(function).tool.parameters
    assert parameters is not None
    made: dict[str, Any] = json.loads(json.dumps(parameters))
    return made


def test_hints_and_docstring_become_a_schema() -> None:
    made = PythonFunction.of(weather).tool
    assert (made.name, made.description, made.is_strict) == ("weather", "The weather at a place.", False)
    assert schema_of(weather) == {
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/Place", "description": "where"},
            "unit": {"$ref": "#/$defs/Unit", "description": "c or f", "default": "c"},
        },
        "required": ["place"],
        "additionalProperties": False,
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "country": {"type": "string", "default": "France"}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "Unit": {"enum": ["c", "f"]},
        },
    }


def test_every_kind_of_hint_has_a_schema() -> None:
    made = schema_of(draw)["properties"]
    assert made["kind"] == {"enum": ["float", "int"]}
    assert made["names"] == {"type": "array", "items": {"type": "string"}}
    assert {"type": "null"} in made["weights"]["anyOf"]
    assert schema_of(draw)["$defs"]["Range"]["required"] == ["high", "low"]
    made = schema_of(add)["properties"]
    assert [made[name].get("type") for name in ("a", "b", "is_exact")] == ["integer", "number", "boolean"]
    assert made["note"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(("function", "strict"), [(now, True), (add, True), (weather, False), (draw, False)])
def test_a_function_is_strict_where_openai_would_take_it_as_strict(function: Callable[..., object], strict: bool) -> None:
    assert PythonFunction.of(function).tool.is_strict is strict


@pytest.mark.parametrize(
    ("function", "arguments", "answer"),
    [
        (now, "", "noon"),
        (now, "{}", "noon"),
        (weather, '{"place": {"city": "Paris"}}', "Paris, France: 20 CELSIUS"),
        (weather, '{"place": {"city": "Oslo", "country": "Norway"}, "unit": "f"}', "Oslo, Norway: 20 FAHRENHEIT"),
        (draw, '{"limits": {"low": 1, "high": 2}, "kind": "int", "names": ["a"]}', None),
        (add, '{"a": 1, "b": 2, "is_exact": true, "note": null}', "3.0"),
    ],
)
def test_a_call_gets_values_of_the_hinted_types(function: Callable[..., object], arguments: str, answer: str | None) -> None:
    made = PythonFunction.of(function).answer(arguments)
    expected = '{"limits":{"low":1,"high":2},"kind":"int","names":["a"],"weights":null}'
    assert made == (expected if answer is None else answer)


@pytest.mark.parametrize(
    "arguments",
    [
        "[]",
        "{",
        "null",
        '{"place": 5}',
        '{"place": {"city": "x"}, "more": 1}',
        '{"place": {"city": "x"}, "unit": "k"}',
        "[" * 100_000,
        "\ud800",
    ],
    ids=["list", "cut", "null", "type", "unknown", "enum", "deep", "surrogate"],
)
def test_arguments_that_do_not_fit_are_the_answer(arguments: str) -> None:
    assert PythonFunction.of(weather).answer(arguments).startswith("error: the arguments do not fit: ")


def test_what_a_function_raises_is_the_answer() -> None:
    def fails(text: str) -> str:
        raise LookupError(text)

    assert PythonFunction.of(fails).answer('{"text": "no such city"}') == "error: LookupError: no such city"


def test_a_long_result_is_cut_and_says_so() -> None:
    def long(count: int) -> str:
        return "x" * count

    made = PythonFunction.of(long)
    assert made.answer(json.dumps({"count": MAX_RESULT_CHARS})) == "x" * MAX_RESULT_CHARS
    assert made.answer(json.dumps({"count": MAX_RESULT_CHARS + 1})).endswith(f"x [cut: {MAX_RESULT_CHARS + 1} characters in all]")


class Opaque:
    pass


def no_hint(a) -> str:  # type: ignore[no-untyped-def]
    return ""


def opaque(a: Opaque) -> str:
    return ""


def starred(*a: int) -> str:
    return ""


def keywords(**a: int) -> str:
    return ""


def positional(a: int, /) -> str:
    return ""


def unreadable(a: "Nowhere") -> str:  # type: ignore[name-defined] # noqa: F821, UP037
    return ""


async def later(a: int) -> str:
    return ""


def pieces(a: int) -> Iterator[str]:
    yield ""


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (no_hint, "no_hint.a"),
        (opaque, "opaque.a"),
        (starred, "starred.a"),
        (keywords, "keywords.a"),
        (positional, "positional.a"),
        (unreadable, "unreadable"),
        (later, "later"),
        (pieces, "pieces"),
    ],
)
def test_what_no_schema_describes_is_refused_by_name(function: Callable[..., object], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PythonFunction.of(function)
    assert refused.value.field == named


def test_a_file_gives_the_functions_that_it_defines(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom os.path import join\n"
        "@dataclass\nclass P:\n    x: int\n"
        "def one(p: P) -> int:\n    return p.x\n"
        "def _own() -> int:\n    return 1\n"
    )
    made = functions_in(path)
    assert list(made) == ["one"]
    assert made["one"].answer('{"p": {"x": 5}}') == "5"
    path.write_text(path.read_text() + "__all__ = ['_own']\n")
    assert list(functions_in(path)) == ["_own"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "a Python file"), ("x = 1", "a file that defines functions"), ("1 / 0", "ZeroDivisionError"), ("def f(", "SyntaxError")],
)
def test_a_file_that_gives_none_is_refused_with_the_reason(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "tools.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidRequest, match=reason):
        functions_in(path)
