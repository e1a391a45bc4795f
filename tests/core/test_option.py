"""Tests options as fields: what they allow, what sections hand on, and which paths a reload may change."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headrace.core.errors import ConfigError
from headrace.core.option import Leaf, Reload, Role, check_options, leaves, live_paths, option, options, required, section

pytestmark = pytest.mark.pure


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    name: str = required("Its name.")
    class_: str = option("plain", "Its class.", one_of=("plain", "large"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    count: int = option(4, "Number of them.", low=1, high=2**20, is_shared=True)
    share: float = option(0.5, "Part of all.", above=0.0, high=1)
    wait_s: float | None = option(None, "Seconds [to wait](page.md).", low=0.0, reload=Reload.RESTART)
    free: float = option(1.0, "Any number.")
    bound: int | None = option(None, "Most of `them`.", shown="the model's", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    port: int = option(80, "Port.", "--port", low=0, high=65535)
    key: str = option("", "Secret.", role=Role.SECURITY, repr=False)
    part: Part = section(Part, role=Role.OPERATOR)
    items: tuple[Item, ...] = option((), "Items.", reload=Reload.LIVE)
    named: dict[str, Item] = section(dict, reload=Reload.LIVE, role=Role.TENANTS)
    one: Item | None = option(None, "One.", role=Role.BILLING)


def found() -> dict[str, Leaf]:
    return {leaf.path: leaf for leaf in leaves(Whole)}


def test_keys_are_named_as_a_file_has_them() -> None:
    parts = ["part.count", "part.share", "part.wait_s", "part.free", "part.bound"]
    items = [f"{where}.{key}" for where in ("items[N]", "named[NAME]", "one") for key in ("name", "class")]
    assert list(found()) == ["port", "key", *parts, *items]
    assert [path for path, leaf in found().items() if leaf.is_required] == ["items[N].name", "named[NAME].name", "one.name"]


def test_a_section_hands_on_what_its_fields_do_not_say() -> None:
    roles = {path: leaf.option.role for path, leaf in found().items()}
    assert roles["port"] is None
    assert roles["part.count"] is Role.OPERATOR
    assert roles["named[NAME].class"] is Role.TENANTS
    assert roles["one.name"] is Role.BILLING
    live = [path for path, leaf in found().items() if leaf.option.reload is Reload.LIVE]
    assert live == ["items[N].name", "items[N].class", "named[NAME].name", "named[NAME].class"]
    assert list(live_paths(Whole)) == ["items", "named"]


def test_a_secret_is_not_shown() -> None:
    assert "hidden" not in repr(Whole(key="hidden"))


def test_options_of_a_class_are_in_order() -> None:
    assert [name for name, _ in options(Part)] == ["count", "share", "wait_s", "free", "bound"]


@pytest.mark.parametrize(
    "given",
    [
        *({"count": 1}, {"count": 2**20}, {"share": 1.0}, {"share": 1e-9}, {"wait_s": 0.0}, {"wait_s": None}, {"bound": None}),
        {"wait_s": 3},
    ],
)
def test_what_is_within_bounds_is_allowed(given: dict[str, float]) -> None:
    check_options(Part(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 0}, "at.count: 0 is outside 1..1048576."),
        ({"count": 2**20 + 1}, "at.count: 1048577 is outside 1..1048576."),
        ({"count": 1.5}, "at.count: 1.5 is not a whole number."),
        ({"count": True}, "at.count: True is not a whole number."),
        ({"share": 0.0}, "at.share: 0.0 is outside 0..1."),
        ({"share": float("nan")}, "at.share: nan is outside 0..1."),
        ({"share": "x"}, "at.share: 'x' is not a number."),
        ({"wait_s": -1.0}, "at.wait_s: -1.0 is negative. Leave it out for no limit."),
        ({"wait_s": float("nan")}, "at.wait_s: nan is not a finite number. Leave it out for no limit."),
        ({"wait_s": float("inf")}, "at.wait_s: inf is not a finite number. Leave it out for no limit."),
        ({"wait_s": "x"}, "at.wait_s: 'x' is not a number."),
        ({"free": float("inf")}, "at.free: inf is not a finite number."),
        ({"bound": 0}, "at.bound: 0 is not positive. Leave it out for the model's."),
    ],
)
def test_what_is_outside_is_refused_with_the_bounds_and_what_leaving_it_out_does(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_options(Part(**given), "at")  # type: ignore[arg-type]
    assert str(refused.value) == said


def test_another_value_than_those_allowed_is_refused_with_these() -> None:
    with pytest.raises(ConfigError, match=r"^class: 'small' is not one of plain, large"):
        check_options(Item(name="a", class_="small"))


def test_help_for_terminals_has_no_markdown() -> None:
    texts = {name: described.plain_help for name, described in options(Part)}
    assert (texts["wait_s"], texts["bound"]) == ("Seconds to wait.", "Most of them.")
