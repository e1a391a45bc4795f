"""Writes the tables of docs/api.md from the tables of the source: `python -m tests.support.api_tables`."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.gateway.surfaces.dialect.field_table import BOTH, GROUPS, FieldRule, Inside, Treatment
from headrace.gateway.surfaces.routes import ENDPOINTS
from tests.house.reader import ROOT

PAGE = ROOT / "docs" / "api.md"
PATHS = "<!-- paths: made from headrace.gateway.surfaces.routes -->\n", "<!-- end of paths -->"
FIELDS = "<!-- fields: made from headrace.gateway.surfaces.dialect.field_table -->\n", "<!-- end of fields -->"
"""The lines before and after each table."""


def paths_table() -> str:
    lines = ["| path | method | key | what |", "|---|---|---|---|"]
    lines += [f"| `{row.shown_path}` | {row.method} | {'no' if row.is_public else 'yes'} | {row.summary} |" for row in ENDPOINTS]
    return "\n".join(lines) + "\n"


def fields_tables() -> str:
    lines: list[str] = []
    for group, rules in GROUPS.items():
        lines += [f"{group}:", "", "| field | in | treatment | rule |", "|---|---|---|---|", *_rows(rules), ""]
    return "\n".join(lines)


def _rows(rules: Iterable[FieldRule]) -> list[str]:
    """One line for all fields of the same place, treatment and rule."""
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


def shown(marks: tuple[str, str]) -> str:
    """What the page has between two marks."""
    begin, end = marks
    return PAGE.read_text(encoding="ascii").split(begin)[1].split(end)[0]


def main() -> None:
    text = PAGE.read_text(encoding="ascii")
    for (begin, end), table in ((PATHS, paths_table()), (FIELDS, fields_tables())):
        before, rest = text.split(begin)
        text = before + begin + table + end + rest.split(end)[1]
    PAGE.write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
