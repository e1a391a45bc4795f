"""The tables of the planning pages are those that the planner computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.lab.plan.catalogue import read_catalogue
from tools.plan_tables import MEASURED, MEASURED_PREFILL, PAGES, PLACE, TABLES, with_tables

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_that_the_planner_computes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(text, read_catalogue()), "python tools/plan_tables.py writes them"


def test_every_table_has_its_place() -> None:
    placed = [found[2] for page in PAGES for found in PLACE.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(placed) == sorted(TABLES)


def test_planned_rates_are_near_the_measured_ones() -> None:
    catalogue = read_catalogue()
    shares = [float(row.split("|")[5]) for row in list(TABLES["fit"](catalogue))[2:]]
    assert len(shares) == len(MEASURED) + len(MEASURED_PREFILL)
    assert all(0.85 < share < 1.2 for share in shares)
