"""Every option there is: keys of the configuration file with type and default, and flags of every command.

`python -m tests.house.options > tests/house/options.txt` freezes the list; test_options.py holds the code against it, so that a new
option is always a decision somebody made and wrote down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_origin, get_type_hints

import typer.main

from headrace.cli.config import ServeConfig
from headrace.cli.config_variables import ELSEWHERE
from headrace.cli.main import app
from headrace.core.strict_decode import inner, key_of


def config_options(kind: type = ServeConfig, where: str = "") -> Iterator[tuple[str, str]]:
    """(path, "type = default") of every key that can stand in the file, in the order of the classes."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        path, hint = f"{where}{key_of(item.name)}", inner(hints[item.name])
        if path in ELSEWHERE:
            continue  # made from other keys; refused in a file
        element = get_args(hint)[0] if get_origin(hint) is tuple else None
        of_name = get_args(hint)[1] if get_origin(hint) is dict else None
        if isinstance(element, type) and is_dataclass(element):
            yield from config_options(element, f"{path}[N].")
        elif isinstance(of_name, type) and is_dataclass(of_name):
            yield from config_options(of_name, f"{path}[NAME].")
        elif isinstance(hint, type) and is_dataclass(hint):
            yield from config_options(hint, f"{path}.")
        else:
            shown = hints[item.name]
            default = "(required)" if item.default is MISSING else repr(item.default)
            if "option" in item.metadata and (on := item.metadata["option"].on):
                default = " or ".join(f"{value!r} on {device}" for device, value in on.items())
            yield path, f"{shown.__name__ if isinstance(shown, type) else shown} = {default}"


def flags() -> Iterator[tuple[str, str]]:
    """(command, its flags) of every command, hidden ones included."""

    def walk(command: object, name: str) -> Iterator[tuple[str, str]]:
        params = getattr(command, "params", [])
        words = [word for param in params for word in (*param.opts, *param.secondary_opts) if word.startswith("-")]
        yield name, " ".join(sorted(words))
        for child, inner_command in sorted(getattr(command, "commands", {}).items()):
            yield from walk(inner_command, f"{name} {child}")

    yield from walk(typer.main.get_command(app), "headrace")


def listing() -> str:
    lines = [f"{path}: {rest}" for path, rest in config_options()]
    lines += [f"{command}: {words}" for command, words in flags()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing(), end="")
