"""The tables of docs/api.md, made from the tables of the source. `python -m tests.support.api_tables` writes them into the page."""

from __future__ import annotations

from headrace.gateway.surfaces.dialect.field_table import GROUPS, FieldRule, Inside, Treatment
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
        lines += [f"{group}:", "", "| field | in | treatment | rule |", "|---|---|---|---|", *map(_row, rules), ""]
    return "\n".join(lines)


def _row(rule: FieldRule) -> str:
    note = f"Only {rule.off_words}. {rule.note}" if rule.treatment is Treatment.REFUSED else rule.note
    places = [place if isinstance(place, Inside) else place.split("/")[2] for place in rule.places]
    return f"| `{rule.name}` | {', '.join(places)} | {rule.treatment} | {note} |"


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
