"""Writes the tables of docs/api.md and docs/usage.md from the tables of the source: `python -m tests.support.api_tables`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from headrace.gateway.ledger.record import COLUMNS
from headrace.gateway.surfaces.dialect.field_table import BOTH, GROUPS, FieldRule, Inside, Treatment
from headrace.gateway.surfaces.routes import ENDPOINTS
from tests.house.reader import ROOT

PAGE, USAGE_PAGE = ROOT / "docs" / "api.md", ROOT / "docs" / "usage.md"
COLUMN_ROWS = "<!-- columns: made from headrace.gateway.ledger.record -->\n", "<!-- end of columns -->"
PATHS = "<!-- paths: made from headrace.gateway.surfaces.routes -->\n", "<!-- end of paths -->"
FIELDS = "<!-- fields: made from headrace.gateway.surfaces.dialect.field_table -->\n", "<!-- end of fields -->"


def paths_table() -> str:
    lines = ["| path | method | key | what |", "|---|---|---|---|"]
    for row in ENDPOINTS:
        key = "no" if row.is_public else "yes, or a reader's" if row.for_readers else "yes"
        lines.append(f"| `{row.shown_path}` | {row.method} | {key} | {row.summary} |")
    return "\n".join(lines) + "\n"


def fields_tables() -> str:
    lines: list[str] = []
    for group, rules in GROUPS.items():
        lines += [f"{group}:", "", "| field | in | treatment | rule |", "|---|---|---|---|", *_rows(rules), ""]
    return "\n".join(lines)


def _rows(rules: Iterable[FieldRule]) -> list[str]:
    alike: dict[str, list[str]] = {}
    for rule in rules:
        places = (
            "both"
            if rule.places == BOTH
            else ", ".join(place if isinstance(place, Inside) else place.split("/")[2] for place in rule.places)
        )
        treatment = f"only {rule.off_words}" if rule.treatment is Treatment.REFUSED else rule.treatment
        alike.setdefault(f"{places} | {treatment} | {rule.note}", []).append(f"`{rule.name}`")
    return [f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()]


def columns_table() -> str:
    lines = ["| field | what |", "|---|---|"]
    for meaning, columns in groupby(COLUMNS, key=lambda column: column.meaning):
        lines.append(f"| {', '.join(f'`{column.name}`' for column in columns)} | {meaning} |")
    return "\n".join(lines) + "\n"


def shown(marks: tuple[str, str], page: Path = PAGE) -> str:
    begin, end = marks
    return page.read_text(encoding="ascii").split(begin)[1].split(end)[0]


def main() -> None:
    for page, (begin, end), table in (
        (PAGE, PATHS, paths_table()),
        (PAGE, FIELDS, fields_tables()),
        (USAGE_PAGE, COLUMN_ROWS, columns_table()),
    ):
        before, rest = page.read_text(encoding="ascii").split(begin)
        page.write_text(before + begin + table + end + rest.split(end)[1], encoding="ascii")


if __name__ == "__main__":
    main()
