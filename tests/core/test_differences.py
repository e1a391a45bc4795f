"""Tests the differences of configurations as people read them, and that no secret stands in one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.core.differences import differences

pytestmark = pytest.mark.pure


@dataclass(frozen=True)
class Key:
    secret: str = field(repr=False)
    tenant: str = "acme"


@dataclass(frozen=True)
class Named:
    name: str
    size: int = 1


@dataclass(frozen=True)
class Config:
    port: int = 8000
    items: tuple[Named, ...] = ()
    keys: tuple[Key, ...] = field(default=(), repr=False)
    salt: str = field(default="", repr=False)
    more: dict[str, Any] = field(default_factory=dict)


def lines(before: object, after: object) -> list[str]:
    return [str(difference) for difference in differences(before, after)]


def test_equal_values_have_none() -> None:
    assert lines(Config(items=(Named("a"),)), Config(items=(Named("a"),))) == []


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (Config(port=80), ["~ port: 8000 -> 80"]),
        (Config(items=(Named("b"), Named("a"))), ["~ items: order b, a"]),
        (Config(items=(Named("a", 2), Named("c"))), ["~ items[a].size: 1 -> 2", "- items[b]", "+ items[c]"]),
        (Config(keys=(Key("one"), Key("two", "other"))), ["+ keys: Key(tenant='other')"]),
        (Config(salt="new"), ["~ salt: (not shown)"]),
        (Config(more={"a": {"b": [1, 2]}}), ["+ more.a"]),
    ],
)
def test_each_difference_has_its_path(after: Config, found: list[str]) -> None:
    before = Config(items=(Named("a"), Named("b")), keys=(Key("one"),), salt="old")
    given = {name: getattr(after, name) for name in ("items", "keys", "salt") if getattr(after, name)}
    kept = {name: getattr(before, name) for name in ("items", "keys", "salt")}
    assert lines(before, Config(**{"port": after.port, "more": after.more, **kept, **given})) == found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Config(salt="se"), Config(salt="secret")),
        (Config(keys=(Key("secret-1"),)), Config(keys=(Key("secret-2"),))),
        ({"token": "se"}, {"token": "secret"}),
        ({"api_keys": []}, {"api_keys": [{"key": "secret", "tenant": "acme"}]}),
        ({"api_keys": [{"key": "secret"}]}, {}),
        ({"a": {"sha256": "old"}}, {"a": {"sha256": "secret"}}),
        ({"remote": [{"name": "a", "token": "x"}]}, {"remote": [{"name": "a", "token": "secret"}, {"name": "b", "token": "secret"}]}),
        ({"a": ["x"]}, {"a": [{"b": {"token": "secret"}}]}),
        ({"a": 1}, {"a": {"token": "secret"}}),
        ({"a": [1]}, {"a": Config(salt="secret")}),
    ],
)
def test_no_secret_is_shown(before: object, after: object) -> None:
    found = lines(before, after)
    assert found
    assert "secret" not in " ".join(found)
