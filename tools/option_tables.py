"""Writes the tables of keys into docs/config.md, from the options of the source: `python -m tools.option_tables`.

A place is `<!-- keys: PATH -->` ... `<!-- end -->`; its table has the keys below PATH that stand below no longer PATH of the page, and
those below no PATH stand at `<!-- keys: rest -->`. At `<!-- keys: engine -->` are those of an
engine's own file. tests/tools/test_option_tables.py fails where the page has another table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.cli.config.load import file_keys
from headrace.cli.flags.flag import CommandFlag
from headrace.cli.flags.rows import ENGINE_PROCESS_FLAGS, GATEWAY_FLAGS, SERVE_FLAGS
from headrace.core.option import Leaf, Option, Role, leaves, written
from headrace.engine.server.config import ProcessConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
PLACE = re.compile(r"(<!-- keys: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
REST, ENGINE_FILE = "rest", "engine"
SERVER_FLAGS = (*SERVE_FLAGS, *GATEWAY_FLAGS)
MIB = 1 << 20


def table(leaves_of_place: list[Leaf], flags: Sequence[CommandFlag]) -> str:
    lines = ["| key | flag | default | change | turned by | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_row(leaf, flags) for leaf in leaves_of_place)]) + "\n"


def filled(text: str) -> str:
    """The page with every table as the source gives it."""
    places = sorted((place[2] for place in PLACE.finditer(text)), key=len, reverse=True)
    rows: dict[str, list[Leaf]] = {place: [] for place in places}
    rows[ENGINE_FILE] = [leaf for leaf in leaves(ProcessConfig, role=Role.OPERATOR) if leaf.option.help]
    for leaf in file_keys():
        rows[next((place for place in places if _is_below(leaf.path, place)), REST)].append(leaf)
    flags: dict[str, Sequence[CommandFlag]] = {ENGINE_FILE: ENGINE_PROCESS_FLAGS}
    return PLACE.sub(lambda place: place[1] + table(rows[place[2]], flags.get(place[2], SERVER_FLAGS)) + place[3], text)


def keys_of(path: str) -> str:
    """The path of a flag as the file has it: a key, or a section or list around some."""
    key = re.sub(r"^model\.", "models[N].", path)
    return "gateway.api_keys[N].key" if key == "gateway.api_keys" else key


def _is_below(path: str, place: str) -> bool:
    return path == place or path.startswith((f"{place}.", f"{place}["))


def _row(leaf: Leaf, flags: Sequence[CommandFlag]) -> str:
    option = leaf.option
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(_names(leaf, flags))) or "-"
    return f"| `{leaf.path}` | {names} | {_default(leaf)} | {option.reload} | {option.role or '-'} | {_meaning(option)} |"


def _names(leaf: Leaf, flags: Sequence[CommandFlag]) -> Iterator[str]:
    for flag in flags:
        if any(_is_below(leaf.path, keys_of(path)) for path in flag.paths):
            for names in flag.names or (str(flag.about["metavar"]),):
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
