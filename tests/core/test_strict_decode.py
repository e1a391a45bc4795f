"""Tests the strict decoder of configurations: errors give the path of what does not fit and the nearest known key, and no value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from headrace.core.errors import ConfigError
from headrace.core.strict_decode import MissingKey, UnknownKey, decode, read_json_object

pytestmark = pytest.mark.pure


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    size: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    name: str
    parts: tuple[Part, ...] = ()
    spare: Part | None = None
    log: bool | str = "on"
    hidden: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosy:
    INSTEAD: ClassVar[Mapping[str, str]] = {"weight": "It is always 1."}

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    by_name: dict[str, int]


def test_lists_nested_objects_and_integers_for_floats_become_what_the_fields_say() -> None:
    raw = {"name": "a", "parts": [{"size": 1, "weight": 2}, {"size": 3}], "spare": None, "log": False}
    made = decode(Whole, raw)
    assert made == Whole(name="a", parts=(Part(size=1, weight=2.0), Part(size=3)), log=False)
    assert type(made.parts[0].weight) is float


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"name": 5}, "name: expected str, got int. Write it in quotes."),
        ({"name": False}, "name: expected str, got bool. Write it in quotes."),
        ({"name": "a", "parts": [{"size": "1_000"}]}, "parts[0].size: expected int, got str. Write it in digits alone, without quotes."),
        ({"name": "a", "parts": {"size": 1}}, "parts: expected array, got object."),
        ({"name": "a", "parts": [{"size": True}]}, "parts[0].size: expected int, got bool."),
        ({"name": "a", "parts": [{"size": 1.0}]}, "parts[0].size: expected int, got float."),
        ({"name": "a", "parts": [{"size": 1, "weight": True}]}, "parts[0].weight: expected float, got bool."),
        ({"name": "a", "parts": None}, "parts: expected array, got null."),
        ({"name": "a", "spare": []}, "spare: expected object or null, got array."),
        ({"name": "a", "log": 1}, "log: expected bool or str, got int."),
        ({"parts": []}, "name: is missing."),
        ({"name": "a", "spare": {"weight": 1.0}}, "spare.size: is missing."),
        ({"name": "a", "spare": {"sise": 1}}, "spare.sise: is not a known key. Did you mean size?"),
        ({"name": "a", "zzz": 1}, "zzz: is not a known key. Known: name, parts, spare, log, hidden."),
        ({"name": "a", 5: 1}, "5: is not a known key. Known: name, parts, spare, log, hidden."),
        ([], "configuration: expected object, got array."),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(raw: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Whole, raw)
    assert str(caught.value) == words


def test_a_key_of_another_program_is_refused_with_why_it_is_not_here() -> None:
    assert decode(Choosy, {"size": 1}) == Choosy(size=1)
    for key, words in (("weight", "is not supported. It is always 1."), ("INSTEAD", "is not a known key. Known: size.")):
        with pytest.raises(ConfigError) as caught:
            decode(Choosy, {"size": 1, key: 2}, "part")
        assert str(caught.value) == f"part.{key}: {words}"


def test_errors_show_no_value() -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Whole, {"name": "a", "hidden": ["secret"]})
    assert "secret" not in str(caught.value)


def test_a_section_is_named_with_what_is_around_it() -> None:
    with pytest.raises(MissingKey, match=r"engine\.size: is missing"):
        decode(Part, {}, "engine")


def test_a_key_that_is_set_elsewhere_is_never_suggested() -> None:
    with pytest.raises(UnknownKey) as caught:
        decode(Whole, {"name": "a", "spare": {"size": 1, "weights": 1}}, refused={"spare.weight": "Set it at the top."})
    assert (caught.value.nearest, caught.value.remedy) == (None, "Set it at the top.")
    with pytest.raises(UnknownKey) as caught:
        decode(Whole, {"name": "a", "spare": {"zzz": 1}}, refused={"spare.weight": "Set it at the top."})
    assert caught.value.remedy == "Known: size."


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"file\.json"):
        read_json_object(file)


def test_a_mapping_of_free_names_keeps_them_and_names_a_value_that_does_not_fit() -> None:
    assert decode(Named, {"by_name": {"one": 1}}).by_name == {"one": 1}
    with pytest.raises(ConfigError, match=r"by_name\.one: expected int, got str"):
        decode(Named, {"by_name": {"one": "1"}})
