"""Tests that the page of limits has the built-in tiers as they are."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from headrace.policy.limits.tier import BUILT_IN_TIERS, DEFAULT_TIER, Tier
from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

COLUMNS = ("class_", "weight", "requests_per_minute", "max_context_tokens")
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| ([\d.]+) \| (\S+) \| (\S+) \|$", re.MULTILINE)


def number(cell: str) -> float | None:
    return None if cell == "-" else float(cell.replace(",", ""))


def test_the_page_of_limits_has_the_built_in_tiers() -> None:
    rows = ROW.findall((ROOT / "docs" / "limits.md").read_text(encoding="utf-8"))
    shown = {name: (class_, *map(number, numbers)) for name, class_, *numbers in rows}
    assert shown == {name: tuple(getattr(tier, column) for column in COLUMNS) for name, tier in BUILT_IN_TIERS.items()}
    for tier in BUILT_IN_TIERS.values():
        others = [field.name for field in fields(Tier) if field.name not in COLUMNS]
        assert all(getattr(tier, name) == getattr(Tier(), name) for name in others), "a number that the page has no column for"
    assert DEFAULT_TIER == "standard"


def test_a_free_request_has_32k_of_context_and_an_enterprise_one_128k() -> None:
    assert (BUILT_IN_TIERS["free"].max_context_tokens, BUILT_IN_TIERS["enterprise"].max_context_tokens) == (32 * 1024, 128 * 1024)
