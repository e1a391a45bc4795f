"""Tests joining the fields that clients send back from their pieces, of which an answer may have one for each token."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.gateway.surfaces.dialect.reasoning import joined_details
from headrace.gateway.upstream import seam
from headrace.gateway.upstream.seam import PassedField, joined_values

pytestmark = pytest.mark.pure


class Copies:
    """Counts the entries that sums and unions of its lists, objects and texts copy."""

    def __init__(self) -> None:
        self.num_copied = 0

    def counting(self, kind: type) -> type:
        def made(name: str) -> Any:
            def combine(one: Any, other: Any) -> Any:
                found = getattr(kind, name)(one, other)
                self.num_copied += len(other) if name.startswith("__i") else len(one) + len(other)
                return one if name.startswith("__i") else counting(found)

            return combine

        names = [name for name in ("__add__", "__iadd__", "__or__", "__ior__") if name in kind.__dict__]
        counting = type(f"Counting{kind.__name__}", (kind,), {name: made(name) for name in names})
        return counting


def test_pieces_are_joined_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    num_pieces, copies = 2000, Copies()
    kinds = {kind: copies.counting(kind) for kind in (list, dict, str)}

    def loads(text: str) -> Any:
        value = json.loads(text)
        return kinds[type(value)](value)

    monkeypatch.setattr(seam, "json", SimpleNamespace(loads=loads))
    fields = [PassedField("reasoning_details", '[{"type": "reasoning.text"}]') for _ in range(num_pieces)]
    fields += [PassedField("extra_content", json.dumps({str(number): number})) for number in range(num_pieces)]
    values = joined_values(fields)
    assert (len(values["reasoning_details"]), len(values["extra_content"])) == (num_pieces, num_pieces)

    pieces = [kinds[dict](type="reasoning.text", index=0, text=kinds[str]("x"), **{str(number): 1}) for number in range(num_pieces)]
    details = joined_details(pieces)
    assert isinstance(details, list)
    assert [(each["text"], len(each)) for each in details] == [("x" * num_pieces, num_pieces + 3)]
    assert copies.num_copied <= 4 * num_pieces


def test_values_in_pieces_are_joined_by_their_kind() -> None:
    pieces = [("a", "[1]"), ("b", '{"x": 1, "y": 1}'), ("a", "[2, 3]"), ("b", '{"y": 2}'), ("c", "1"), ("c", '"last"'), ("a", "[]")]
    assert joined_values([PassedField(*each) for each in pieces]) == {"a": [1, 2, 3], "b": {"x": 1, "y": 2}, "c": "last"}
    assert joined_values([]) == {}


def test_details_of_one_type_and_index_are_joined() -> None:
    first = {"type": "reasoning.text", "index": 0, "text": None, "signature": None, "format": "a"}
    pieces = [first, {**first, "text": "one "}, {**first, "text": "two", "signature": "s", "format": None}]
    other = {"type": "reasoning.encrypted", "index": 0, "data": "ZA=="}
    whole = {**first, "text": "one two", "signature": "s"}
    assert joined_details([*pieces, other, first]) == [whole, other, first]
    assert joined_details([{"summary": "a", "text": 5}, {"summary": "b"}]) == [{"summary": "ab", "text": 5}]
    for unknown in ("text", None, [1], [{}, "x"], {"a": 1}):
        assert joined_details(unknown) == unknown
    assert joined_details([]) == []
