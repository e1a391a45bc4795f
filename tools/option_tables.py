"""Writes the tables of keys into docs/config.md, from the options of the source: `python -m tools.option_tables`.

A place is `<!-- keys: PATH -->` ... `<!-- end -->`; its table has the keys below PATH that stand below no longer PATH of the page, and
those below no PATH stand at `<!-- keys: rest -->`. At `<!-- keys: engine -->` are those of an
engine's own file. tests/tools/test_option_tables.py fails where the page has another table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from headrace.cli.config.load import file_keys
from headrace.cli.flags.rows import ENGINE_FLAGS
from headrace.core.option import Leaf, Option, Role, leaves, written
from headrace.engine.server.config import ProcessConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
PLACE = re.compile(r"(<!-- keys: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
REST, ENGINE_FILE = "rest", "engine"
ENGINE = "models[N].engine."
MIB = 1 << 20


def table(leaves_of_place: list[Leaf]) -> str:
    lines = ["| key | flag | default | change | turned by | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, leaves_of_place)]) + "\n"


def filled(text: str) -> str:
    """The page with every table as the source gives it."""
    places = sorted((place[2] for place in PLACE.finditer(text)), key=len, reverse=True)
    rows: dict[str, list[Leaf]] = {place: [] for place in places}
    rows[ENGINE_FILE] = [leaf for leaf in leaves(ProcessConfig, role=Role.OPERATOR) if leaf.option.help]
    for leaf in file_keys():
        rows[next((place for place in places if _is_below(leaf.path, place)), REST)].append(leaf)
    return PLACE.sub(lambda place: place[1] + table(rows[place[2]]) + place[3], text)


def _is_below(path: str, place: str) -> bool:
    return path == place or path.startswith((f"{place}.", f"{place}["))


def _row(leaf: Leaf) -> str:
    option = leaf.option
    flags = ", ".join(f"`{flag}`" for flag in _flags(leaf)) or "-"
    return f"| `{leaf.path}` | {flags} | {_default(leaf)} | {option.reload} | {option.role or '-'} | {_meaning(option)} |"


def _flags(leaf: Leaf) -> Iterator[str]:
    made = {ENGINE + flag.field: flag.names for flag in ENGINE_FLAGS}
    for names in made.get(leaf.path, leaf.option.flags or ()):
        yield from names.split("/")


def _default(leaf: Leaf) -> str:
    option = leaf.option
    if leaf.is_required:
        return "required"
    if option.on:
        return f"{_value(option.on['cpu'], leaf.path)}; on a GPU {_value(option.on['cuda'], leaf.path)}"
    return option.shown or _value(option.default, leaf.path)


def _value(value: object, path: str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and path.endswith("_bytes") and value % MIB == 0:
        return f"{value // MIB} MiB"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{value}`" if value else "none"


def _meaning(option: Option) -> str:
    bounds = ""
    if option.high is not None and not option.switch:
        low = "" if option.low is None else written(option.low)
        bounds = f" {low} to {written(option.high)}." if low else f" Above {written(option.above or 0)}, to {written(option.high)}."
    shared = " Shared by the workers." if option.is_shared else ""
    return option.help.rstrip(".") + "." + bounds + shared


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
