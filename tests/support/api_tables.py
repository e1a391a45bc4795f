"""Writes the tables of docs/api.md and docs/usage.md from the tables of the source: `python -m tests.support.api_tables`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from headrace.gateway.ledger.record import COLUMNS
from headrace.gateway.surfaces.dialect.field_table import BOTH, CHAT, COMPLETIONS, GROUPS, FieldRule, Inside, Treatment
from headrace.gateway.surfaces.routes import ENDPOINTS
from tests.house.reader import ROOT

PAGE, USAGE_PAGE = ROOT / "docs" / "api.md", ROOT / "docs" / "usage.md"
COLUMN_ROWS = "<!-- columns: made from headrace.gateway.ledger.record -->\n", "<!-- end of columns -->"
PATHS = "<!-- paths: made from headrace.gateway.surfaces.routes -->\n", "<!-- end of paths -->"
FIELDS = "<!-- fields: made from headrace.gateway.surfaces.dialect.field_table -->\n", "<!-- end of fields -->"
BODIES = {CHAT: "chats", COMPLETIONS: "completions"}
SHOWN = {Treatment.HONOURED: "", Treatment.INERT: "Inert: ", Treatment.PASSED: "Passed on: ", Treatment.REFUSED: "Refused: "}
"""What stands before a field's rule."""


def paths_table() -> str:
    lines = ["| path | method | key | what |", "|---|---|---|---|"]
    for row in ENDPOINTS:
        key = "no" if row.is_public else "yes, or a reader's" if row.for_readers else "yes"
        lines.append(f"| `{row.shown_path}` | {row.method} | {key} | {row.summary} |")
    return "\n".join(lines) + "\n"


def fields_tables() -> str:
    lines: list[str] = []
    for group, rules in GROUPS.items():
        lines += [f"{group}:", "", "| field | rule |", "|---|---|", *_rows(rules), ""]
    return "\n".join(lines)


def _rows(rules: Iterable[FieldRule]) -> list[str]:
    """One row for all fields of one treatment and note, in the order of the first."""
    alike: dict[tuple[Treatment, str], list[str]] = {}
    for rule in rules:
        only = f" ({' or '.join(map(json.dumps, rule.off))})" if rule.treatment is Treatment.REFUSED and rule.off else ""
        alike.setdefault((rule.treatment, rule.note), []).extend(name + only for name in _names(rule))
    return [f"| {', '.join(names)} | {SHOWN[treatment]}{note} |" for (treatment, note), names in alike.items()]


def _names(rule: FieldRule) -> Iterable[str]:
    if rule.places == BOTH:
        return [f"`{rule.name}`"]
    return [f"{place}.`{rule.name}`" if isinstance(place, Inside) else f"`{rule.name}` of {BODIES[place]}" for place in rule.places]


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
